"""What of the kernel benchmark can be checked without a GPU: refusals, its baseline, its tables, the clock."""

from __future__ import annotations

import time

import pytest
import torch

from nanovllm.bench.kernels import Heads, Lab, naive_attention, parse_shapes, print_kernels
from nanovllm.errors import ConfigError
from nanovllm.hardware.device import Device
from nanovllm.hardware.timing import REPEATS, record_launches, time_on_device
from tests.cli.runner import Run

CPU = Device(torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_needs_a_gpu(run: Run) -> None:
    result = run("bench", "kernels")
    assert result.code == 2
    assert "needs a GPU" in result.err
    assert result.out == ""


@pytest.mark.parametrize(
    ("option", "value"),
    [("--prefill", "8*2"), ("--decode", "0x4"), ("--input-lens", "0"), ("--heads", "16,5,128"), ("--heads", "16,8")],
)
def test_a_typo_is_told_first(run: Run, option: str, value: str) -> None:
    result = run("bench", "kernels", option, value)
    assert result.code == 2
    assert value in result.err
    assert option in result.err


def test_shapes_and_heads() -> None:
    assert parse_shapes("--decode", "256x840, 1x1") == [(256, 840), (1, 1)]
    assert Heads.parse("8,8,64") == Heads(8, 8, 64)
    with pytest.raises(ConfigError):
        parse_shapes("--decode", "")


@pytest.mark.parametrize("length", [1, 2, 17])
def test_naive_is_attention(length: int) -> None:
    """A baseline that computes something else would be beaten for nothing."""
    q, k, v = torch.randn(3, 2, 4, length, 8).unbind()
    hidden = torch.ones(length, length, dtype=torch.bool).triu_(1)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(naive_attention(q, k, v, hidden), expected)


def test_inputs_of_the_lab() -> None:
    lab = Lab(CPU, torch.float32, Heads(4, 2, 8))
    k, v, lens, tables = lab.paged(3, 65)
    assert k.shape == v.shape == (6, 64, 2, 8)
    assert sorted(tables.flatten().tolist()) == list(range(6))
    assert lens.tolist() == [65] * 3
    assert lab.flops(1, 2) == 4 * 8 * 4 * 3  # three pairs of query and key
    assert lab.kv_bytes(3, 65) == 2 * 3 * 65 * 2 * 8 * 4
    assert [tuple(call().shape) for call in lab.dense(3, 5, 5)] == [(3, 4, 5, 8)]
    assert {tuple(call().shape) for call in lab.dense(3, 5, 1)} == {(3, 4, 1, 8)}
    assert lab.naive(5)[0]().shape == (1, 4, 5, 8)


def test_the_clock() -> None:
    calls = []

    def work() -> None:
        calls.append(time.sleep(0.002))

    assert 0.002 <= time_on_device(work, CPU) < 0.1
    assert len(calls) == REPEATS + 1
    assert record_launches(work, CPU) == []


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    missing = {"shape": "64x1024", "triton_seconds": None, "sdpa_seconds": 1e-3, "rate": None, "share_of_limit": None}
    print_kernels({
        "ceilings": {"read_bytes_per_second": 4.46e12, "copy_bytes_per_second": 4e12, "matmul_flops": 780e12},
        "prefill": [{"shape": "8x2048", "triton_seconds": 120e-6, "sdpa_seconds": 200e-6, "rate": 400e12,
                     "share_of_limit": 0.5}],
        "decode": [missing],
        "crossover": [{"length": 512, "score_bytes": 2**23, "naive_seconds": None, "naive_grids": [],
                       "flash_seconds": 9e-6, "flash_grids": [136]}],
    })  # fmt: skip
    out = capsys.readouterr().out
    assert "reads 4.46 TB/s, copies 4.00 TB/s and multiplies 780 TFLOP/s" in out
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]
    assert rows == [
        ["8x2048", "120", "200", "400", "50%"],
        ["64x1024", "OOM", "1,000", "OOM", "-"],
        ["512", "OOM", "9", "8", "-", "1: 136"],
    ]
