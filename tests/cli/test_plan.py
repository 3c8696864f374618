"""`nanovllm plan`: from config.json alone, what goes where; and the example that plans and then runs."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanovllm.cli.plan import make_estimate
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError, ModelError
from nanovllm.memory.budget import GIB
from nanovllm.memory.options import PlanOptions
from tests.cli.runner import Run
from tests.weights.quantised_samples import compressed_config

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "benchmarks/models"
MIXTRAL = MODELS / "mixtral-8x7b"
TINY = ROOT / "tests/fixtures/tiny-mixtral"
FP8 = ("--quantization", "fp8")
CARD = ("--gpu-memory-gb", "11", "--host-memory-gb", "64")


def plan_json(run: Run, *args: Any) -> Any:
    return run("plan", "--json", "-", *args).last_json


def test_mixtral_on_11_gb(run: Run) -> None:
    result = run("plan", "--model", MIXTRAL, *CARD)
    assert result.code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.out.splitlines() if "│" in line]
    places = {(row[0], row[1]): row[2:] for row in rows if len(row) == 4}
    assert places["dense weights", "GPU"] == ["", "2.99"]
    assert places["expert slots, cached", "GPU"] == ["12 (0 or 1 a layer)", "3.94"]
    assert places["expert slots, streaming", "GPU"] == ["4", "1.31"]
    assert places["experts", "host"] == ["170", "55.78"]
    assert places["experts", "slots only"] == ["12", "3.94"]
    assert places["experts", "disk"] == ["74", "24.28"]
    assert places["KV cache", "GPU"][0].endswith(" tokens")
    for text in (
        "what goes where: offload",
        "longest context: 32768",
        "PCIe 3 x16 12 or PCIe 4 x16 25",
        "disk: 3 GB/s",
        "74 are read from disk each time",
        "settings:",
    ):
        assert text in result.out, result.out
    speeds = {row[0]: row[1:] for row in rows if row[0] in ("1", "16")}
    assert set(speeds) == {"1", "16"}
    assert all(re.fullmatch(r"[\d.]+ to [\d.]+", value) for row in speeds.values() for value in row)
    assert speeds["1"][2] == "3.53 to 6.52"  # GB from disk


def test_the_settings_are_a_command_that_parses(run: Run) -> None:
    from tests.test_docs import parse_command

    record = plan_json(run, "--model", MIXTRAL, *CARD, "--expert-host-gb", 40, "--dtype", "float16")
    assert record["command"] in run("plan", "--model", MIXTRAL, *CARD, "--expert-host-gb", 40, "--dtype", "float16").out
    parse_command(record["command"])
    config = EngineConfig.from_options(**record["settings"])
    words = shlex.split(record["command"])
    for name, value in record["settings"].items():
        assert words[words.index(f"--{name.replace('_', '-')}") + 1] == (
            f"{value:g}" if isinstance(value, float) else str(value)
        )
    assert (config.expert_placement, config.expert_host_gb, config.dtype) == ("offload", 40, "float16")
    assert (config.gpu_memory_gb, config.max_model_len, config.max_num_batched_tokens) == (11, 4096, 2048)


def test_a_kv_cache_in_8_bit_floats(run: Run) -> None:
    model = ("--model", MODELS / "qwen3-8b", "--gpu-memory-gb", "21", "--host-memory-gb", "64")
    plain, small = plan_json(run, *model), plan_json(run, *model, "--kv-cache-dtype", "fp8")
    assert (plain["kv_bytes_per_token"], small["kv_bytes_per_token"]) == (36 * 2 * 1024 * 2, 36 * 2 * 1024)
    longest = [record["tiers"]["longest_context"] for record in (plain, small)]
    assert longest[1] == pytest.approx(2 * longest[0], rel=0.01)
    assert small["settings"]["kv_cache_dtype"] == "fp8"
    assert "kv_cache_dtype" not in plain["settings"]
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='int8': .* is for CPUs"):
        make_estimate(PlanOptions(model=str(MODELS / "qwen3-8b"), kv_cache_dtype="int8"))


def test_experts_in_8_bit_floats(run: Run, tmp_path: Path) -> None:
    """Half the bytes: all experts fit host memory, more are cached, and the bound is twice as high and more."""
    plain, small = plan_json(run, "--model", MIXTRAL, *CARD), plan_json(run, "--model", MIXTRAL, *CARD, *FP8)
    assert (plain["expert_bytes"], small["expert_bytes"]) == (352_321_536, 176_160_768 + 131_072)  # and the scales
    assert small["settings"]["quantization"] == "fp8"
    assert "--quantization fp8" in small["command"]
    assert (plain["tiers"]["num_cached"], small["tiers"]["num_cached"]) == (12, 35)
    assert (plain["tiers"]["disk_experts"], small["tiers"]["disk_experts"]) == (74, 0)
    assert small["tiers"]["host_experts"] == 256
    rich = ("--model", MIXTRAL, "--gpu-memory-gb", "11", "--host-memory-gb", "128")
    slow, fast = (plan_json(run, *rich, *more)["speeds"]["1"]["low"]["tokens_per_second"] for more in ((), FP8))
    assert 2 < fast / slow < 2.5  # the link is the bound, and more experts are cached
    out = run("plan", "--model", MIXTRAL, *CARD, *FP8).out
    assert "8 experts a layer of 0.16 GiB (8-bit floats), top 2" in out
    # A model that is published so: auto knows it from config.json, and blocks have other scales than rows.
    config = json.loads((MIXTRAL / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    stored = plan_json(run, "--model", tmp_path, *CARD)
    assert stored["expert_bytes"] == 176_160_768 + 3 * 112 * 32 * 4
    assert "quantization" not in stored["settings"]
    assert plan_json(run, "--model", tmp_path, *CARD, "--quantization", "none")["expert_bytes"] == 352_321_536


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 93.6),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, 352.3),
        (compressed_config("pack-quantized", {**INT4, "actorder": "weight"}), 93.6),
        (compressed_config("pack-quantized", {**INT4, "actorder": "group"}), 352.3),
    ],
)
def test_experts_with_inputs_in_their_own_order_are_16_bits(
    tmp_path: Path, config: dict[str, Any], size: float
) -> None:
    whole = json.loads((MIXTRAL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**whole, "quantization_config": config}))
    found = make_estimate(PlanOptions(model=str(tmp_path), gpu_memory_gb=24, host_memory_gb=64))
    assert found.model.expert_bytes / 1e6 == pytest.approx(size, rel=1e-3)


def test_blocks_that_ranks_cut_are_16_bits(run: Run) -> None:
    """DeepSeek-V3's experts, 2048 rows of gate: 16 ranks cut blocks of 128, 32 do not. Spread ones are never cut."""
    model, half = ("--model", MODELS / "deepseek-v3", "--gpu-memory-gb", "80", "--host-memory-gb", "2000"), {}
    for ranks in (1, 16, 32):
        half[ranks] = plan_json(run, *model, "--tensor-parallel-size", ranks)["expert_bytes"]
    numbers = 3 * 7168 * 2048
    assert half[1] == numbers + 3 * 16 * 56 * 4
    assert half[16] == numbers // 16 + 1024  # 672 bytes of scales, and what makes the block round
    assert half[32] == 2 * numbers // 32


@pytest.mark.parametrize(("kind", "size"), [("int4", 110.1), ("int8", 198.2), ("fp8", 176.3), ("none", 352.3)])
def test_experts_in_fewer_bits(kind: str, size: float) -> None:
    """Megabytes of one expert of Mixtral: 5, 9, 8 and 16 bits a weight; and a smaller one needs less of a link."""
    found = make_estimate(PlanOptions(model=str(MIXTRAL), quantization=kind, gpu_memory_gb=24, host_memory_gb=64))
    assert found.model.expert_bytes / 1e6 == pytest.approx(size, rel=1e-3)
    assert found.model.expert_numbers == {"none": "", "fp8": "8-bit floats"}.get(kind, f"{kind}-32")
    assert (found.tiers is not None and found.tiers.disk_experts == 0) == (kind != "none")


def test_json(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    result = run("plan", "--model", MIXTRAL, *CARD, "--json", file)
    record = json.loads(file.read_text())
    assert "what goes where" in result.out
    assert record == plan_json(run, "--model", MIXTRAL, *CARD)
    assert record["runs"] is True
    assert record["gpu_bytes"] == 11 * GIB
    tiers = record["tiers"]
    assert (tiers["num_cached"], tiers["num_streaming"], tiers["num_slots"]) == (12, 4, 16)
    assert (tiers["host_experts"], tiers["disk_experts"], sum(tiers["quotas"])) == (170, 74, 12)
    assert tiers["lone_experts"] == 12
    assert tiers["expert_bytes"] == 352_321_536
    low, high = record["speeds"]["1"]["low"], record["speeds"]["1"]["high"]
    assert low["tokens_per_second"] < high["tokens_per_second"]
    assert low["copied_bytes"] == pytest.approx((64 - 12 * 2 / 8) * 352_321_536)
    refused = run("plan", "--model", MIXTRAL, *CARD, "--json", tmp_path / "no" / "plan.json")
    assert refused.code == 2
    assert "cannot be written" in refused.err
    other = tmp_path / "config.json"
    other.write_text('{"architectures": []}')
    refused = run("plan", "--model", MIXTRAL, *CARD, "--json", other)
    assert refused.code == 2
    assert "is a file of another kind, and would be overwritten" in refused.err
    assert other.read_text() == '{"architectures": []}'


def test_qwen3_moe_and_dense(run: Run) -> None:
    record = plan_json(run, "--model", MODELS / "qwen3-30b-a3b", *CARD)
    assert record["tiers"]["placement"] == "offload"
    assert record["tiers"]["disk_experts"] == 0  # 54 GiB of experts, 56 GiB of host memory
    assert record["tiers"]["num_streaming"] == 16
    assert record["tiers"]["longest_context"] == 40960
    dense = plan_json(run, "--model", MODELS / "qwen3-8b", "--gpu-memory-gb", 24, "--host-memory-gb", 64)
    assert dense["tiers"]["placement"] == "resident"
    assert "expert_placement" not in dense["settings"]
    assert dense["settings"]["max_model_len"] == dense["tiers"]["longest_context"]
    assert 20_000 < dense["tiers"]["longest_context"] < 40960
    large = plan_json(run, "--model", MIXTRAL, "--gpu-memory-gb", 139, "--host-memory-gb", 128)
    assert large["settings"]["expert_placement"] == "resident"
    assert (large["settings"]["max_num_seqs"], large["settings"]["max_model_len"]) == (256, 32768)
    # between the two: resident at full speed, but not with the whole context
    between = plan_json(run, "--model", MIXTRAL, "--gpu-memory-gb", 105, "--host-memory-gb", 128)
    assert between["settings"]["expert_placement"] == "resident"
    assert 2048 < between["settings"]["max_model_len"] < 32768


@pytest.mark.parametrize("gigabytes", [5, 6, 8, 11, 24, 48, 96, 100, 105, 110, 139])
@pytest.mark.parametrize("model", ["mixtral-8x7b", "qwen3-30b-a3b", "qwen3-0.6b"])
def test_every_plan_can_be_asked_for_and_comes_out_the_same(model: str, gigabytes: int) -> None:
    """The settings, given back as wishes, give the same tiers: the engine will decide as the plan says."""
    options = PlanOptions(model=str(MODELS / model), gpu_memory_gb=gigabytes, host_memory_gb=128)
    estimate = make_estimate(options)
    assert estimate.tiers is not None
    assert estimate.wants.max_num_seqs <= estimate.wants.max_num_batched_tokens
    EngineConfig.from_options(**estimate.settings)
    wishes = {name: value for name, value in estimate.settings.items() if name != "model"}
    again = make_estimate(PlanOptions(model=options.model, host_memory_gb=128, **wishes))
    assert again.tiers == estimate.tiers


def test_cannot_run(run: Run, tmp_path: Path) -> None:
    result = run("plan", "--model", MIXTRAL, "--gpu-memory-gb", 4, "--host-memory-gb", 64, "--json", tmp_path / "x")
    assert result.code == 1
    assert "cannot run: 0.75 GiB of GPU memory are missing: the dense part needs 2.99 GiB" in result.out
    assert "settings:" not in result.out
    record = json.loads((tmp_path / "x").read_text())
    assert record["runs"] is False
    assert record["missing_bytes"] == pytest.approx(0.75 * GIB, abs=GIB / 100)
    assert record["reason"] in result.out
    assert "settings" not in record
    needed = float(record["reason"].split("at least ")[1].split(" GiB")[0])
    assert run("plan", "--model", MIXTRAL, "--gpu-memory-gb", needed, "--host-memory-gb", 64).code == 0
    assert run("plan", "--model", MIXTRAL, "--gpu-memory-gb", needed - 0.02, "--host-memory-gb", 64).code == 1


EIGHT, MOE = "qwen3-8b", "mixtral-8x7b"


@pytest.mark.parametrize(
    ("model", "args", "words"),
    [
        (MOE, "--max-model-len 40000", "reads at most 32768"),
        (MOE, "--gpu-memory-gb 0", "gpu_memory_gb=0"),
        (MOE, "--host-memory-gb -1", "host_memory_gb=-1"),
        (MOE, "--bandwidth-gbs 0", "bandwidth_gbs=0"),
        (MOE, "--disk-gbs nan", "disk_gbs=nan"),
        (MOE, "--expert-placement disk", "auto, resident, offload"),
        (MOE, "--expert-cache-gb 0.5", "expert_cache_gb=0.5: holds 1 experts"),
        (MOE, "--expert-cache-gb 9", "expert_cache_gb=9.0: dense weights (2.99 GiB)"),
        (MOE, "--expert-cache-gb 12", "expert_cache_gb=12.0 is more than gpu_memory_gb=11.0"),
        (MOE, "--max-num-seqs 64 --max-num-batched-tokens 32", "max_num_batched_tokens=32"),
        (MOE, "--model no/such/folder", "no such file or folder"),
        (EIGHT, "--tensor-parallel-size 3", "num_attention_heads=32 does not divide; possible: [1, 2, 4, 8"),
        (EIGHT, "--tensor-parallel-size 8 --hosts 3", "hosts=3: tensor_parallel_size=8 counts the GPUs"),
        (EIGHT, "--hosts 2", "possible: [1]"),
        (EIGHT, "--hosts 0", "hosts=0"),
        (EIGHT, "--tensor-parallel-size 2 --expert-parallel-size 2", "has no experts to spread"),
        (MOE, "--tensor-parallel-size 4 --expert-parallel-size 3", "must divide"),
        (MOE, "--tensor-parallel-size 16 --expert-parallel-size 16", "8 experts in a layer"),
        (EIGHT, "--link string", "link='string': must be one of nvlink, pcie"),
        (EIGHT, "--network pigeon", "network='pigeon': must be one of ethernet, infiniband"),
        (EIGHT, "--link-gbs 0", "link_gbs=0"),
        (EIGHT, "--network-us nan", "network_us=nan"),
        (EIGHT, "--gpu-tflops -1", "gpu_tflops=-1"),
    ],
)
def test_wrong_options_are_errors(run: Run, model: str, args: str, words: str) -> None:
    result = run("plan", "--model", MODELS / model, *CARD, *args.split())
    assert result.code == 2
    assert words in result.err
    assert len(result.err.splitlines()) == 1


def test_no_gpu_and_no_size(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanovllm.hardware.device import Device

    cpu = Device.choose("cpu")
    monkeypatch.setattr(Device, "choose", classmethod(lambda cls, wanted: cpu))
    result = run("plan", "--model", MIXTRAL)
    assert result.code == 2
    assert "--gpu-memory-gb 11" in result.err
    assert run("plan", "--model", MIXTRAL, "--gpu-memory-gb", 11).code == 0  # the host is this machine


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    config = json.loads((MIXTRAL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["FooForCausalLM"]}))
    with pytest.raises(ModelError, match="FooForCausalLM"):
        make_estimate(PlanOptions(model=str(tmp_path), gpu_memory_gb=11))


def test_the_table_of_the_docs_is_this_plan() -> None:
    text = (ROOT / "docs/small-gpus.md").read_text(encoding="utf-8").split("## Mixtral on 11 GB")[1]
    found = re.findall(r"^\| (\d+) \| ([\d,]+) \| (\d+) \+ (\d+) \| (\d+) / (\d+) \| (.+?) \| (.+?) \|$", text, re.M)
    assert len(found) == 6
    for host, length, cached, streaming, on_host, on_disk, one, sixteen in found:
        options = PlanOptions(
            model=str(MIXTRAL), gpu_memory_gb=11, host_memory_gb=int(host), max_model_len=int(length.replace(",", ""))
        )
        estimate = make_estimate(options)
        assert estimate.tiers is not None
        said = (int(cached), int(streaming), int(on_host), int(on_disk))
        tiers = estimate.tiers
        assert said == (tiers.num_cached, tiers.num_streaming, tiers.host_experts, tiers.disk_experts)
        for batch, text in ((1, one), (16, sixteen)):
            assert text == " to ".join(f"{speed.tokens_per_second:.2f}" for speed in estimate.speeds(batch))


def test_the_table_of_number_formats_in_the_docs_is_this_plan() -> None:
    text = (ROOT / "docs/small-gpus.md").read_text(encoding="utf-8")
    row = r"^\| (\d+) \| (\d+) \| (16 bits|FP8|4 bits) \| (\d+) \+ (\d+) \| (\d+) / (\d+) \| (.+?) \| (.+?) \|$"
    found = re.findall(row, text, re.M)
    kinds = {
        "16 bits": {"model": str(MIXTRAL)},
        "FP8": {"model": str(MIXTRAL), "quantization": "fp8"},
        "4 bits": {"model": str(MODELS / "mixtral-8x7b-awq")},
    }
    assert [sum(row[2] == kind for row in found) for kind in kinds] == [3, 5, 6]
    for card, host, kind, *counts, one, sixteen in found:
        sizes = {"gpu_memory_gb": int(card), "host_memory_gb": int(host), "max_model_len": 4096}
        estimate = make_estimate(PlanOptions(**kinds[kind], **sizes))
        tiers = estimate.tiers
        assert tiers is not None
        assert [int(n) for n in counts] == [
            tiers.num_cached,
            tiers.num_streaming,
            tiers.host_experts,
            tiers.disk_experts,
        ]
        for batch, speed in ((1, one), (16, sixteen)):
            assert speed == " to ".join(f"{s.tokens_per_second:.2f}" for s in estimate.speeds(batch))


# ---- several GPUs --------------------------------------------------------------------------------------------------

LARGE = ("--gpu-memory-gb", "139", "--host-memory-gb", "512")


def test_two_hosts(run: Run) -> None:
    args = ("--model", MODELS / "qwen3-8b", *LARGE, "--tensor-parallel-size", 8, "--hosts", 2)
    result = run("plan", *args)
    assert result.code == 0
    for text in (
        "8 GPUs on 2 hosts; bytes below are those of each GPU",
        "host 128.00 GiB",
        "a step, computed",
        "nothing was measured on several GPUs",
        "4,330 GB/s (measured on an H200)",
        "NVLink 4, 360 GB/s and 2 us (assumed)",
        "100 Gb/s Ethernet, 11 GB/s and 25 us (assumed)",
        "MB all-reduced a layer",
        "MB a host sends",
        "over one such GPU.",
    ):
        assert text in result.out, result.out
    rows = {
        row[0]: row[1:]
        for row in ([cell.strip() for cell in line.split("│")[1:-1]] for line in result.out.splitlines() if "│" in line)
    }
    assert rows["dense weights"][2] == "1.91"
    record = plan_json(run, *args)
    works = record["scaling"]["works"]
    assert list(works) == ["1 sequence", "64 sequences", "16 prompts"]
    assert rows["64 sequences"][4] == f"{2 * 64 * 4096 * 2 / 1e6:.3g}" == "1.05"
    assert rows["64 sequences"][1] == f"{works['64 sequences']['speedup']:.2f}"
    assert record["settings"]["tensor_parallel_size"] == 8
    assert record["settings"]["distributed_executor_backend"] == "ray"
    EngineConfig.from_options(**record["settings"])
    one = plan_json(run, "--model", MODELS / "qwen3-8b", *LARGE)
    assert "scaling" not in one
    assert record["tiers"]["dense_bytes"] < one["tiers"]["dense_bytes"] / 7.9
    assert record["kv_bytes_per_token"] == one["kv_bytes_per_token"] / 8


def test_links_that_are_given(run: Run) -> None:
    args = ("--model", MODELS / "qwen3-8b", *LARGE, "--tensor-parallel-size", 4, "--hosts", 2)
    given = ("--link-gbs", 100, "--link-us", 3, "--network-gbs", 50, "--gpu-tflops", 500, "--gpu-read-gbs", 3000)
    record = plan_json(run, *args, *given)
    machine = record["scaling"]["machine"]
    assert machine["link"] == pytest.approx({"bytes_per_second": 100e9, "latency": 3e-6})
    assert machine["network"] == pytest.approx({"bytes_per_second": 50e9, "latency": 25e-6})
    assert (machine["read"], machine["flops"]) == (3e12, 500e12)
    assert record["scaling"]["assumptions"] == [
        "a GPU reads 3,000 GB/s (given) and computes 500 TFLOP/s (given)",
        "between GPUs of a host 100 GB/s and 3 us (given)",
        "between hosts 100 Gb/s Ethernet, 50 GB/s and 25 us (given in part)",
    ]
    slow = plan_json(run, *args, "--link", "pcie", "--network", "infiniband")["scaling"]["machine"]
    assert (slow["link"]["bytes_per_second"], slow["network"]["bytes_per_second"]) == (40e9, 45e9)
    small = plan_json(run, "--model", MODELS / "qwen3-0.6b", "--gpu-memory-gb", 24, "--tensor-parallel-size", 2)
    assert "a GPU reads 725 GB/s (assumed) and computes 120 TFLOP/s (assumed)" in small["scaling"]["assumptions"]
    assert len(small["scaling"]["assumptions"]) == 2


def test_too_large_for_one_gpu(run: Run) -> None:
    args = ("--model", MODELS / "llama-3-70b", *LARGE)
    result = run("plan", *args)
    assert result.code == 1
    assert "cannot run: 7.01 GiB of GPU memory are missing" in result.out
    assert "2 such GPUs hold it: --tensor-parallel-size 2" in result.out
    assert plan_json(run, *args)["fewest_gpus"] == 2
    two = run("plan", *args, "--tensor-parallel-size", 2)
    assert two.code == 0
    assert "over one such GPU, if the model fitted in it (it does not)" in two.out
    small = run("plan", "--model", MODELS / "llama-3-70b", "--gpu-memory-gb", 24, "--tensor-parallel-size", 2)
    assert small.code == 1
    assert "8 such GPUs hold it" in small.out
    tiny = plan_json(run, "--model", MODELS / "llama-3-70b", "--gpu-memory-gb", 4)
    assert (tiny["runs"], tiny["fewest_gpus"]) == (False, None)


def test_experts_on_several_gpus(run: Run) -> None:
    args = ("--model", MIXTRAL, *LARGE, "--tensor-parallel-size", 8)
    spread = plan_json(run, *args, "--expert-parallel-size", 8)
    cut = plan_json(run, *args)
    assert spread["tiers"]["resident_bytes"] == cut["tiers"]["resident_bytes"] == 256 * 352_321_536 // 8
    assert (spread["tiers"]["resident_experts"], cut["tiers"]["resident_experts"]) == (32, 256)
    assert spread["settings"]["expert_parallel_size"] == 8
    assert spread["scaling"]["works"]["1 sequence"]["exchanged_bytes"] > 0
    assert cut["scaling"]["works"]["1 sequence"]["exchanged_bytes"] == 0
    assert "of it all-to-all" in run("plan", *args, "--expert-parallel-size", 8).out
    assert "of it all-to-all" not in run("plan", *args).out
    small = ("--model", MIXTRAL, *CARD, "--tensor-parallel-size", 4)
    offloaded = run("plan", *small)  # each rank offloads its part of every expert
    assert "what goes where: offload" in offloaded.out
    assert "What the GPUs say to each other comes on top" in offloaded.out
    assert "a step, computed" not in offloaded.out
    refused = run("plan", *small, "--expert-parallel-size", 4)
    assert refused.code == 1  # spread experts stay on the GPUs
    assert "are missing" in refused.out


def test_redundant_experts(run: Run) -> None:
    """One more expert a layer on each of eight GPUs, and a buffer for the two that a layer has there then."""
    args, expert = ("--model", MIXTRAL, *LARGE, "--tensor-parallel-size", 8, "--expert-parallel-size", 8), 352_321_536
    plain = plan_json(run, *args)
    moving = plan_json(run, *args, "--enable-eplb")
    record = plan_json(run, *args, "--enable-eplb", "--num-redundant-experts", 8)
    assert [found["redundant_experts"] for found in (plain, moving, record)] == [0, 0, 32]
    assert [found["spare_bytes"] for found in (plain, moving, record)] == [0, expert, 2 * expert]
    assert [found["tiers"]["resident_experts"] for found in (plain, moving, record)] == [32, 32, 64]
    sizes = [found["tiers"]["resident_bytes"] for found in (plain, moving, record)]
    assert sizes == [32 * expert, 33 * expert, 66 * expert]
    block = 64 * record["kv_bytes_per_token"]
    lost = plain["tiers"]["kv_bytes"] - record["tiers"]["kv_bytes"]
    assert abs(lost - 34 * expert) < block, "the KV cache has less by just that"
    assert record["settings"]["enable_eplb"] is True
    assert record["settings"]["num_redundant_experts"] == 8
    assert "--enable-eplb --num-redundant-experts 8" in record["command"]
    out = run("plan", *args, "--enable-eplb", "--num-redundant-experts", 8).out
    assert "64, 32 of them redundant" in out
    assert "spare expert buffer" in out
    assert "experts a layer of 0.33 GiB" in out, "the spare buffer is not in the mean"
    small = run("plan", "--model", MIXTRAL, "--gpu-memory-gb", 11, *args[-4:], "--enable-eplb")
    assert small.code == 1
    assert "32 experts 10.83 GiB (0 redundant, a spare buffer of 0.33 GiB)" in small.out
    assert "16 such GPUs hold it: --tensor-parallel-size 16 --expert-parallel-size 8" in small.out
    advised = ("--tensor-parallel-size", 16, "--expert-parallel-size", 8)
    assert run("plan", "--model", MIXTRAL, "--gpu-memory-gb", 11, *advised, "--enable-eplb").code == 0
    for wrong in (("--num-redundant-experts", 8), ("--enable-eplb", "--num-redundant-experts", 6)):
        assert run("plan", *args, *wrong).code != 0


def test_a_table_says_what_does_not_divide_and_what_does_not_fit(run: Run, tmp_path: Path) -> None:
    config = json.loads((MODELS / "qwen3-0.6b/config.json").read_text())
    odd = {**config, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(odd))
    divides = [line.split(" | ")[2] for line in run("plan", "--model", tmp_path, *LARGE, "--table").out.splitlines()]
    assert [cell == "does not divide" for cell in divides[2:6]] == [False, False, True, True]
    result = run("plan", "--model", MODELS / "llama-3-70b", "--gpu-memory-gb", 24, "--table")
    assert result.code == 0
    lines = [line.strip("| ").split(" | ") for line in result.out.splitlines()]
    assert len({len(line) for line in lines}) == 1
    fits = {int(line[0]): line[3] for line in lines[2:] if line[1] == "1"}
    assert fits[1] == fits[2] == fits[4] == "does not fit"
    assert fits[8][0].isdigit()


# ---- the example ---------------------------------------------------------------------------------------------------


def run_example(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "example_mixtral.py"), *args],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_the_example_plans_and_runs() -> None:
    done = run_example("--model", str(TINY), "--gpu-memory-gb", "11", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    assert "what goes where: resident" in done.stdout
    assert len(re.findall(r"^Completion: '.+'$", done.stdout, re.M)) == 2
    assert re.search(r"^\d+ tokens in [\d.]+ s: [\d.]+ tok/s", done.stdout, re.M)
    assert "expert" in done.stdout.splitlines()[-1] or "hit" in done.stdout


def test_the_example_says_when_it_cannot_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(*args: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["example_mixtral.py", *args])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(ROOT / "example_mixtral.py"), run_name="__main__")
        return left.value.code

    assert leave("--model", str(MIXTRAL), "--gpu-memory-gb", "3") == 1
    out = capsys.readouterr().out
    assert "cannot run" in out
    assert "Completion" not in out
    assert str(leave("--model", str(ROOT / "nothing"))).startswith("error: ")
