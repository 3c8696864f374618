"""What can go wrong with experts: refused with figures and nothing left behind, or an error of that request while the
engine goes on answering right.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from nanovllm import LLM, ConfigError, ModelError, SamplingParams
from nanovllm.cli.plan import PlanOptions, make_estimate
from nanovllm.memory.budget import GIB
from nanovllm.moe.offload import store as store_module
from tests.tiny_models import TinyModel

ROOT = Path(__file__).resolve().parents[2]
TRAINED = ROOT / "tests/fixtures/tiny-mixtral"
EXPERT_BYTES = 3 * 128 * 256 * 4  # of the trained Mixtral in fp32; 4 layers of 8
EXPERTS = "model.layers.2.block_sparse_moe.experts"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[700, 12, 900, 44], [5, 300, 7], list(range(100, 130))]
TIERS: dict[str, dict[str, Any]] = {
    "resident": {},
    "memory": {"expert_placement": "offload", "expert_host_gb": 1},
    "disk": {"expert_cache_gb": 6 * EXPERT_BYTES / GIB, "expert_host_gb": 0},
    "mixed": {"expert_cache_gb": 6 * EXPERT_BYTES / GIB, "expert_host_gb": 11 * EXPERT_BYTES / GIB},
}
every_tier = pytest.mark.parametrize("tier", TIERS)


def gb(num_experts: float) -> float:
    return num_experts * EXPERT_BYTES / GIB


def make(path: Path = TRAINED, **options: Any) -> LLM:
    defaults = {
        "device": "cpu",
        "skip_tokenizer_init": True,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "num_kvcache_blocks": 32,
    }
    return LLM(str(path), **{**defaults, **options})


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [o.error for o in outputs] == [None] * len(PROMPTS)
    assert llm.engine.scheduler.blocks.num_used == 0
    return [o["token_ids"] for o in outputs]


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    with make() as llm:
        return tokens(llm)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module.logger, "level", logging.CRITICAL)  # warnings of the disk tier, failed steps


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TRAINED, tmp_path / "model"))


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened to host memory: on a GPU it is locked, and stays so until it is released."""
    events: list[str] = []

    class Watched(store_module.HostBlock):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            events.append("locked")

        def close(self) -> None:
            events.append("released")
            super().close()

    monkeypatch.setattr(store_module, "HostBlock", Watched)
    return events


def open_files() -> list[str]:
    return sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if is_open(fd))


def is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")  # the one that listed them is closed again


def refused(path: Path, error: type[Exception], blocks: list[str], *parts: str, **options: Any) -> str:
    """The message. Nothing stays open or locked, and the next engine serves."""
    files = open_files()
    with pytest.raises(error) as caught:
        make(path, **options)
    message = str(caught.value)
    for part in parts:
        assert part in message
    del caught
    assert open_files() == files
    assert blocks.count("locked") == blocks.count("released")
    return message


# ---- refused before anything is built --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_buffers", [0.01, 1, 1.99])
def test_buffers_below_top_k(num_buffers: float, blocks: list[str], wanted: list[list[int]]) -> None:
    value = gb(num_buffers)
    message = refused(
        TRAINED,
        ConfigError,
        blocks,
        f"expert_cache_gb={value}",
        f"holds {int(num_buffers)} experts of 0.4 MiB",
        "a token needs 2 at once",
        expert_cache_gb=value,
    )
    assert not blocks, "refused before memory was taken"
    offered = float(message.rsplit("at least ", 1)[1])
    with make(expert_cache_gb=offered) as llm:
        assert tokens(llm) == wanted
    with make(expert_cache_gb=gb(2)) as llm:
        assert tokens(llm) == wanted


def test_a_cap_below_the_dense_part(blocks: list[str], wanted: list[list[int]]) -> None:
    """2 MiB of dense weights; the figures are in the message, and the card it offers is large enough."""
    for options in ({}, {"expert_placement": "offload"}, {"expert_cache_gb": gb(2)}):
        blocks.clear()
        message = refused(
            TRAINED,
            ConfigError,
            blocks,
            "GPU memory are missing: the dense part needs 1.8 MiB",
            "of 1.0 MiB 0.9 MiB may be used",
            gpu_memory_gb=2**-10,
            **options,
        )
        assert not blocks
        offered = float(re.findall(r"a card \(gpu_memory_gb\) of at least ([\d.]+) GiB", message)[0])
        with make(gpu_memory_gb=offered, **options) as llm:
            assert tokens(llm) == wanted
    with pytest.raises(ConfigError, match=r"gpu_memory_gb=1000000: .* has .* GiB; give at most that"):
        make(gpu_memory_gb=10**6)


def test_resident_under_a_cap_names_the_way_out(blocks: list[str], wanted: list[list[int]]) -> None:
    message = refused(
        TRAINED,
        ConfigError,
        blocks,
        "32 experts 12.0 MiB",
        "expert_placement='offload' (or 'auto') runs here with",
        gpu_memory_gb=0.012,
        expert_placement="resident",
    )
    buffers = int(re.findall(r"runs here with (\d+) of 32", message)[0])
    with make(gpu_memory_gb=0.012, expert_placement="offload") as llm:
        experts = llm.engine.describe()["runs_on"]["experts"]
        assert 2 <= experts["cached_slots"] + experts["streaming_slots"] <= buffers + 1
        assert tokens(llm) == wanted


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"expert_placement": "offload"}, "expert_placement='offload'"),
        ({"expert_cache_gb": 0.5}, "expert_cache_gb=0.5"),
        ({"expert_placement": "offload", "expert_cache_gb": 0.5}, "expert_placement='offload'"),
    ],
)
def test_a_dense_model_has_nothing_to_offload(
    llama: TinyModel, blocks: list[str], options: dict[str, Any], named: str
) -> None:
    parts = (named, "LlamaForCausalLM has no experts", "leave it out")
    refused(llama.path, ConfigError, blocks, *parts, **options)
    with pytest.raises(ConfigError, match=re.escape(named)):
        make_estimate(PlanOptions(model=str(llama.path), gpu_memory_gb=8, host_memory_gb=8, **options))
    for harmless in ({"expert_placement": "resident"}, {"expert_policy": "lru", "expert_host_gb": 1}):
        with make(llama.path, **harmless) as llm:
            assert llm.generate([5], GREEDY, use_tqdm=False)[0].metrics.experts is None


# ---- damaged files ---------------------------------------------------------------------------------------------------


@every_tier
@pytest.mark.parametrize("part", ["3.w1", "7.w2"])
def test_a_missing_expert(folder: Path, tier: str, part: str, blocks: list[str], wanted: list[list[int]]) -> None:
    """An error and not zeros, on the tier that is filled and on the one that is only located."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    name = f"{EXPERTS}.{part}.weight"
    save_file({key: tensor for key, tensor in weights.items() if key != name}, path)
    place = {"3.w1": "experts.gate_up.weight[3.gate]", "7.w2": "experts.down.weight[7]"}[part]
    parts = ("1 not found in the checkpoint", f"layers.2.mlp.{place}")
    refused(folder, ModelError, blocks, *parts, **TIERS[tier])
    save_file(weights, path)
    with make(folder, **TIERS[tier]) as llm:
        assert tokens(llm) == wanted


@every_tier
def test_a_truncated_file(folder: Path, tier: str, blocks: list[str], wanted: list[list[int]]) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for size in (len(whole) - 1, 100):
        os.truncate(path, size)
        refused(folder, ModelError, blocks, "model.safetensors: not a whole safetensors file", **TIERS[tier])
        assert not blocks
    path.write_bytes(whole)
    with make(folder, **TIERS[tier]) as llm:
        assert tokens(llm) == wanted


@every_tier
def test_shards_and_an_index_that_names_a_missing_one(
    folder: Path, tier: str, blocks: list[str], wanted: list[list[int]]
) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"part-{int('experts' in name) + int('layers.2' in name)}.safetensors" for name in weights}
    for shard in set(names.values()):
        save_file({name: weights[name] for name in weights if names[name] == shard}, folder / shard)
    index = folder / "model.safetensors.index.json"
    for wrong in ("part-9.safetensors", "part-0.safetensors"):
        one = next(name for name in names if names[name] == "part-2.safetensors")
        index.write_text(json.dumps({"weight_map": {**names, one: wrong}}))
        parts = ("shards are missing", wrong) if wrong == "part-9.safetensors" else (one, wrong, "it is not")
        refused(folder, ModelError, blocks, *parts, **TIERS[tier])
    index.write_text(json.dumps({"weight_map": names}))
    with make(folder, **TIERS[tier]) as llm:
        assert tokens(llm) == wanted


def test_an_error_while_loading_leaves_nothing(
    folder: Path, blocks: list[str], monkeypatch: pytest.MonkeyPatch, wanted: list[list[int]]
) -> None:
    """Half of the places are filled, then the disk fails; or the user has had enough."""
    from nanovllm.weights.safetensors_folder import SafetensorsFolder

    read = SafetensorsFolder.read
    for error in (OSError("bad sector"), KeyboardInterrupt()):
        count = 0

        def broken(self: SafetensorsFolder, name: str, error: BaseException = error) -> Any:
            nonlocal count
            count += 1
            if count == 40:
                raise error
            return read(self, name)

        with monkeypatch.context() as patch:
            patch.setattr(SafetensorsFolder, "read", broken)
            refused(folder, type(error), blocks, **TIERS["mixed"])
        assert blocks
    with make(folder, **TIERS["mixed"]) as llm:
        assert tokens(llm) == wanted


# ---- while it serves -------------------------------------------------------------------------------------------------


def test_a_file_that_shrinks_while_it_is_served(folder: Path, wanted: list[list[int]]) -> None:
    """The request that needs the lost bytes ends with an error that names the file. The engine lives: it serves what
    it has, and everything again once the file is whole (the same file: it is open)."""
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    files = open_files()
    with make(folder, expert_cache_gb=gb(2), expert_host_gb=0, enable_prefix_caching=False) as llm:
        assert tokens(llm) == wanted
        os.truncate(path, 100)
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        for output in outputs:
            assert output.outputs[0].finish_reason == "error"
            assert output["token_ids"] == []
            assert output.error is not None
            assert "ModelError" in output.error
            assert f"{path}: ends before byte" in output.error
            assert "restore it" in output.error
        assert not llm.engine.has_unfinished_requests()
        assert llm.engine.scheduler.blocks.num_used == 0
        with path.open("r+b") as file:
            file.write(whole)
        assert tokens(llm) == wanted
    assert open_files() == files


def test_experts_that_are_here_do_not_miss_their_file(folder: Path, wanted: list[list[int]]) -> None:
    with make(folder, expert_cache_gb=gb(36), expert_host_gb=0, enable_prefix_caching=False) as llm:
        first = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0]
        assert first["token_ids"] == wanted[0]
        for _ in range(3):  # all that these need is on the device by then
            assert tokens(llm) == wanted
        (folder / "model.safetensors").write_bytes(b"")
        assert tokens(llm) == wanted
        others = [[token] * 9 for token in range(3, 2000, 97)]
        failed = [o for o in llm.generate(others, GREEDY, use_tqdm=False) if o.error]
        assert failed, "some want an expert that was never read"
        assert all("model.safetensors" in o.error for o in failed)
        assert tokens(llm) == wanted
