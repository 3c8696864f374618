"""The sampler of GPU use, with a stand-in for the driver's tool."""

import types
from pathlib import Path

import pytest
import torch

from nanovllm.hardware import utilisation
from nanovllm.hardware.device import Device

GPU = types.SimpleNamespace(is_gpu=True, torch_device=torch.device("cpu"))


def test_a_cpu_has_none() -> None:
    with utilisation.sampled(Device(torch.device("cpu"))) as found:
        pass
    assert found.percent is None


@pytest.mark.parametrize(
    ("samples", "expected"), [("0 10 50 60 70", 60.0), ("0 10 50 60", None), ("[N/A] [N/A]", None), ("", None)]
)
def test_the_first_samples_do_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, samples: str, expected: float | None
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{word}'\n" for word in samples.split()) + "exec sleep 60.125\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    properties = types.SimpleNamespace(uuid="0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    with utilisation.sampled(GPU) as found:  # type: ignore[arg-type]
        while not samples_written(tool):
            pass
    assert found.percent == expected


def samples_written(tool: Path) -> bool:
    """The stand-in has written all its lines once it has become `sleep`."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes() == b"sleep\x0060.125\x00":
                return True
        except OSError:
            continue
    return False


def test_the_tool_is_ended_even_if_the_work_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexec sleep 60.125\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="0"))
    with pytest.raises(ZeroDivisionError), utilisation.sampled(GPU):  # type: ignore[arg-type]
        raise ZeroDivisionError
