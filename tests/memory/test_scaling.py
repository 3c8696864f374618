"""The cost model of several GPUs: against sums done by hand, at its limits, and docs/scaling.md against both."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanovllm.cli.plan import make_estimate
from nanovllm.memory.facts import ModelFacts
from nanovllm.memory.machines import H200_FLOPS, H200_READ, INSIDE, NETWORKS
from nanovllm.memory.options import PlanOptions
from nanovllm.memory.scaling import (
    COUNTS_SECONDS,
    START_SECONDS,
    Collectives,
    Link,
    Machine,
    Topology,
    all_gather_seconds,
    all_reduce_seconds,
    decode_cost,
    prefill_cost,
)
from tests.cli.runner import Run
from tests.test_docs import blocks, check_command, parse_command, problem_with, read, spans, table_rows

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "benchmarks/models"
RESULTS = ROOT / "benchmarks/results"
PAGE = "docs/scaling.md"
LINK, NETWORK = Link(100e9, 2e-6), Link(10e9, 20e-6)
MACHINE = Machine(4e12, 800e12, LINK, NETWORK)
FREE = Link(math.inf, 0.0)


def facts(name: str, num_ranks: int = 1, expert_size: int = 1) -> ModelFacts:
    estimate = make_estimate(PlanOptions(model=str(MODELS / name), gpu_memory_gb=139, host_memory_gb=512))
    return replace(estimate.model, num_ranks=num_ranks, expert_size=expert_size)


# ---- collectives ---------------------------------------------------------------------------------------------------


def test_one_rank_communicates_nothing() -> None:
    assert all_reduce_seconds(1e9, 1, LINK) == all_gather_seconds(1e9, 1, LINK) == 0
    cost = decode_cost(facts("qwen3-8b"), Topology(), MACHINE, 64, 1024)
    assert (cost.talking, cost.sent_bytes, cost.network_bytes, cost.num_collectives) == (0, 0, 0, 0)


def test_a_ring_for_much_and_a_tree_for_little() -> None:
    """Eight ranks: 14 hops of an eighth, or 6 hops and twice the whole: equal where 8 x 2 us = m / 4 / 100 GB/s."""
    crossing = 8 * 2e-6 * 4 * 100e9
    for num_bytes in (0, crossing / 2, crossing * 0.999):
        assert all_reduce_seconds(num_bytes, 8, LINK) == pytest.approx(6 * 2e-6 + 2 * num_bytes / 100e9)
    for num_bytes in (crossing * 1.001, crossing * 10):
        assert all_reduce_seconds(num_bytes, 8, LINK) == pytest.approx(14 * 2e-6 + 14 / 8 * num_bytes / 100e9)
    assert all_reduce_seconds(1e6, 2, LINK) == pytest.approx(2 * 2e-6 + 1e6 / 100e9)
    assert all_gather_seconds(8e6, 8, LINK) == pytest.approx(7 * 2e-6 + 7e6 / 100e9)


def test_two_stages_over_hosts() -> None:
    collectives = Collectives(Topology(8, 2), MACHINE)
    collectives.all_reduce(8e6)
    inside, between = 6 * 2e-6 + 6 / 4 * 8e6 / 100e9, 2 * 20e-6 + 8e6 / 10e9
    assert collectives.seconds == pytest.approx(START_SECONDS + inside + between)
    assert collectives.sent_bytes == pytest.approx(2 * 8e6 * 7 / 8)
    assert collectives.network_bytes == pytest.approx(8e6)  # a host of two sends half of it twice
    collectives.all_gather(8e6, times=3)
    assert collectives.count == 4
    assert collectives.network_bytes == pytest.approx(8e6 + 3 * 4e6)


def test_an_exchange() -> None:
    """Of a rank's 8 MB, 1/8 stays, 3/8 go to the host's others, 4/8 abroad, over a wire that four share."""
    collectives = Collectives(Topology(8, 2, 8), MACHINE)
    collectives.all_to_all(8e6)
    assert collectives.seconds == pytest.approx(START_SECONDS + 3e6 / 100e9 + 4 * 4e6 / 10e9 + 20e-6)
    assert (collectives.sent_bytes, collectives.network_bytes, collectives.exchanged_bytes) == pytest.approx(
        (7e6, 16e6, 7e6)
    )
    one = Collectives(Topology(8, 1, 8), MACHINE)
    one.all_to_all(8e6)
    assert one.seconds == pytest.approx(START_SECONDS + 7e6 / 100e9 + 2e-6)
    assert one.network_bytes == 0


# ---- steps ---------------------------------------------------------------------------------------------------------


def test_a_decode_step_by_hand() -> None:
    """Qwen3-8B on two GPUs: 73 all-reduces of 64 x 4096 x 2 bytes and a gather of the logits."""
    model = facts("qwen3-8b", 2)
    cost = decode_cost(model, Topology(2), MACHINE, 64, 1024)
    message, logits = 64 * 4096 * 2, 64 * 151936 * 2
    assert cost.num_collectives == 2 * 36 + 1 + 1
    assert cost.sent_bytes == pytest.approx(73 * message + logits / 2)
    talking = 73 * (START_SECONDS + 2 * 2e-6 + message / 100e9) + START_SECONDS + 2e-6 + logits / 2 / 100e9
    assert cost.talking == pytest.approx(talking)
    weights = model.dense_bytes - model.embedding_bytes
    kv = 64 * 1024 * 2 * 36 * 4 * 128 * 2
    assert cost.read_bytes == pytest.approx(weights + kv)
    assert cost.computing == pytest.approx((weights + kv) / 4e12)
    assert cost.seconds == cost.computing + cost.talking


def test_prompts_are_arithmetic() -> None:
    model = facts("qwen3-8b")
    cost = prefill_cost(model, Topology(), MACHINE, 16, 1024)
    body = (model.dense_bytes - 2 * model.embedding_bytes) // 2
    attention = 4 * 16 * 1024 * 512 * 4096 * 36
    assert cost.flops == pytest.approx(2 * 16 * 1024 * body + 2 * 16 * 151936 * 4096 + attention)
    assert cost.computing == pytest.approx(cost.flops / 800e12)
    short = prefill_cost(model, Topology(), MACHINE, 1, 16)
    assert short.computing == pytest.approx(short.read_bytes / 4e12)


@pytest.mark.parametrize("name", ["qwen3-8b", "mixtral-8x7b", "llama-3-70b"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_with_free_links_nothing_but_replication_is_lost(name: str, num_ranks: int) -> None:
    """Norms and the router are on all ranks, and beyond 8 ranks so are KV heads."""
    machine = replace(MACHINE, link=FREE, network=FREE)
    whole, part = facts(name), facts(name, num_ranks)
    one = decode_cost(whole, Topology(), machine, 64, 1024)
    several = decode_cost(part, Topology(num_ranks), machine, 64, 1024)
    gain = one.computing / several.computing
    kv, all_read = 64 * 1024 * whole.kv_bytes_per_token, one.read_bytes
    best = all_read / ((all_read - kv) / num_ranks + kv / min(num_ranks, 8))
    assert 0.98 * best < gain <= best
    assert several.talking == pytest.approx(several.num_collectives * START_SECONDS)


def test_spread_experts_by_hand() -> None:
    """The formulas of moe/spread.py: two all-to-alls, a gather, and the counts, in place of one all-reduce a layer."""
    tokens, hidden, layers = 64, 4096, 32
    for expert_size in (2, 4, 8):
        model, topology = facts("mixtral-8x7b", 8, expert_size), Topology(8, 1, expert_size)
        cost = decode_cost(model, topology, MACHINE, tokens, 1024)
        row = 2 * hidden * 2 + 8  # there and back, and what is sent with it
        exchanged = layers * tokens * 2 * row * 7 / 8 / 8 * (8 / expert_size)
        assert cost.exchanged_bytes == pytest.approx(exchanged)
        reduced = (layers + 1) * 2 * tokens * hidden * 2 * 7 / 8
        gathered = (layers * tokens * hidden + tokens * 32000) * 2 * 7 / 8
        assert cost.sent_bytes == pytest.approx(reduced + exchanged + gathered)
        assert cost.num_collectives == layers + 1 + 3 * layers + 1
        cut = decode_cost(facts("mixtral-8x7b", 8), Topology(8), MACHINE, tokens, 1024)
        assert cost.read_bytes == pytest.approx(cut.read_bytes)
        assert cost.flops == pytest.approx(cut.flops)
        assert cost.talking > COUNTS_SECONDS * layers


def test_a_shared_mlp_is_added_up_with_experts_that_are_cut() -> None:
    cut, spread = (decode_cost(facts("deepseek-v2-lite", 8, e), Topology(8, 1, e), MACHINE, 1, 1024) for e in (1, 8))
    assert cut.num_collectives == 2 * 27 + 1 + 1, "a shared MLP is added up with the experts"
    assert spread.num_collectives == cut.num_collectives + 3 * 26, "or by itself, beside spread ones"


def test_slower_links_and_more_hosts_are_never_faster() -> None:
    for name in ("qwen3-8b", "mixtral-8x7b", "llama-3-70b"):
        for cost in (lambda *of: decode_cost(*of, 64, 1024), lambda *of: prefill_cost(*of, 16, 1024)):
            model = facts(name, 8)
            slow = replace(MACHINE, link=Link(LINK.bytes_per_second / 2, LINK.latency))
            seconds = [cost(model, Topology(8, hosts), MACHINE).seconds for hosts in (1, 2, 4, 8)]
            assert seconds == sorted(seconds)
            assert cost(model, Topology(8), slow).seconds > seconds[0]


# ---- the page ------------------------------------------------------------------------------------------------------


def test_the_tables_of_the_page_are_what_the_command_prints(run: Run) -> None:
    found = re.findall(r"^```bash\n(nanovllm plan [^\n]*--table[^\n]*)\n```\n\n((?:\|.*\n)+)", read(PAGE), re.M)
    assert len(found) == 5
    named = {model for command, _ in found for model in re.findall(r"models/(\S+)", command)}
    assert named == {"qwen3-8b", "mixtral-8x7b", "llama-3-70b"}
    for command, table in found:
        result = run(*shlex.split(command)[1:])
        assert result.code == 0, result.err
        assert result.out == table, command


def computed_rate(model: ModelFacts, machine: Machine, workload: str) -> float | None:
    """As the bench counts: a batch of B prompts of L tokens with L new ones each, the first of which comes with the
    prompt; or prompt tokens."""
    found = re.fullmatch(r"(prefill )?(\d+)x(\d+)", workload)
    if found is None:
        return None
    batch, length = int(found[2]), int(found[3])
    seconds = prefill_cost(model, Topology(), machine, batch, length).seconds
    if not found[1]:
        seconds += (length - 1) * decode_cost(model, Topology(), machine, batch, length * 3 // 2).seconds
    return batch * length / seconds


def test_the_measured_numbers_of_the_page_are_those_of_the_result_files() -> None:
    ratios, rows = [], []
    for name in ("qwen3-8b", "mixtral-8x7b"):
        estimate = make_estimate(PlanOptions(model=str(MODELS / name), gpu_memory_gb=139, host_memory_gb=512))
        for result in json.loads((RESULTS / f"2026-11-15-h200-{name}.json").read_text())["results"]:
            rate = computed_rate(estimate.model, estimate.hardware.machine, result["workload"])
            if rate is not None:
                measured = result["tokens_per_second"]
                ratios.append(f"{rate / measured:.2f}")
                rows.append([name, result["workload"], f"{measured:,.0f}", f"{rate:,.0f}", ratios[-1]])
    said = [row for row in table_rows(read(PAGE)) if len(row) == 5 and row[0] in ("qwen3-8b", "mixtral-8x7b")]
    assert said == rows
    words = f"{min(ratios)} to {max(ratios)} times"
    assert words in read(PAGE)
    assert words in " ".join(read("nanovllm/memory/scaling.py").split())


def test_what_is_called_measured_was_measured() -> None:
    ceilings = json.loads((RESULTS / "2026-11-15-h200-bench-kernels.json").read_text())["results"]["ceilings"]
    assert pytest.approx(ceilings["read_bytes_per_second"], rel=1e-3) == H200_READ
    assert pytest.approx(ceilings["matmul_flops"], rel=1e-3) == H200_FLOPS


def test_the_links_of_the_page_are_those_of_the_code() -> None:
    rows = {row[0].strip("`"): row[2:4] for row in table_rows(read(PAGE)) if len(row) == 5}
    for name, (link, _) in {**INSIDE, **NETWORKS}.items():
        assert rows[name] == [f"{link.bytes_per_second / 1e9:g}", f"{link.latency * 1e6:g}"]
    assert f"{START_SECONDS * 1e6:g} us" in read(PAGE)
    assert f"{COUNTS_SECONDS * 1e6:g} us" in read(PAGE)


def test_names_and_commands_of_the_page_exist() -> None:
    wrong: dict[str, Any] = {span: problem for span in spans(read(PAGE)) if (problem := problem_with(span))}
    known = {
        "RAY_ADDRESS",
        "NCCL_DEBUG=INFO",
        "NCCL_SOCKET_IFNAME",
        "X-Nanovllm-Replica",
        "--replicas",
        "--node-rank 1",
        "RAY_AUTH_MODE=token",
        "nano-vllm[ray]",
        "/metrics",
        "nvidia-smi topo -m",
    }
    assert not set(wrong) - known
    lines = [line for block in blocks(read(PAGE), "bash") for line in block.splitlines()]
    ours = [line for line in lines if line.startswith(("nanovllm ", "RAY_ADDRESS"))]
    assert len(ours) >= 8
    for line in ours:
        parse_command(line[line.index("nanovllm ") :])
    for line in lines:
        if line.startswith("nanovllm "):
            check_command(line)
