"""`nanovllm plan`: an Estimate as tables, as JSON and as a command to run. memory/ computes, this file shows.

From config.json alone: no weights, no GPU, nothing is downloaded. torch is imported inside functions, so that
`nanovllm --help` is instant.

    estimate = make_estimate(PlanOptions(model="DIR", gpu_memory_gb=11, host_memory_gb=64))
    show_estimate(estimate)         # tables; if the model cannot run, what is missing
    LLM(**estimate.settings)        # the options to use
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from nanovllm.cli.options import ENGINE, OptionGroup
from nanovllm.config import EngineConfig
from nanovllm.engine.interrupts import import_torch
from nanovllm.memory.budget import GIB, gib
from nanovllm.memory.estimate import Estimate, find_topology
from nanovllm.memory.facts import ModelFacts
from nanovllm.memory.machines import INSIDE, NETWORKS, Hardware
from nanovllm.memory.options import PlanOptions
from nanovllm.memory.scaling import WORKS
from nanovllm.memory.speed import SpeedEstimate
from nanovllm.model_config import ModelConfig

if TYPE_CHECKING:
    from rich.console import Console

BATCHES = (1, 16)
COMMON = frozenset({"model", "gpu_memory_gb", "host_memory_gb", "max_model_len", "max_num_seqs", "expert_placement"})
COMMON |= {"measure", "tensor_parallel_size", "hosts", "table"}
PLAN = OptionGroup(
    title="Plan",
    of=PlanOptions,
    common=COMMON,
    help={
        **{field.name: ENGINE.help.get(field.name, "") for field in dataclasses.fields(PlanOptions)},
        "gpu_memory_gb": "Plan for a card with so many gigabytes; default: the one in this machine.",
        "host_memory_gb": "Gigabytes of memory of the machine around it; default: this machine's.",
        "max_model_len": "Longest prompt plus output wanted; none = chosen for you.",
        "max_num_batched_tokens": "Tokens of one step; none = chosen for you.",
        "max_num_seqs": "Sequences running at the same time; none = chosen for you.",
        "dtype": "As for the engine; auto is 16 bits here.",
        "quantization": "auto = as the model is published; fp8, int8, int4 = quantised when loaded; none = dtype.",
        "bandwidth_gbs": "GB/s from host memory to the GPU; default: a range by the size of the card.",
        "disk_gbs": "GB/s of the disk, for experts that host memory does not hold.",
        "gpu_read_gbs": "GB/s of the GPU's own memory; default: a range by the size of the card.",
        "measure": "Measure both bandwidths on this machine.",
        "tensor_parallel_size": "Over how many GPUs to split the model, on all hosts together.",
        "hosts": "On how many machines those GPUs are, as many on each.",
        "link": f"Between the GPUs of a host: {', '.join(INSIDE)}.",
        "link_gbs": "GB/s that a GPU sends to another one of its host; default: by --link.",
        "link_us": "Microseconds that a message between them takes; default: by --link.",
        "network": f"Between hosts: {', '.join(NETWORKS)}.",
        "network_gbs": "GB/s that a host sends to another one; default: by --network.",
        "network_us": "Microseconds that a message between hosts takes; default: by --network.",
        "gpu_tflops": "TFLOP/s of a GPU in 16 bits; default: by the size of the card.",
        "table": "Instead: a Markdown table of this model on 1 to 8 GPUs of 1 to 4 hosts.",
    },
)


def make_estimate(options: PlanOptions) -> Estimate:
    """Raises what the engine would for a wrong option or an unusable model."""

    def check_sizes(config: EngineConfig, model: ModelConfig) -> None:
        import_torch()
        from nanovllm.ranks.several import check_sizes

        check_sizes(config, model)

    config = options.engine_config()
    find_topology(options)
    return Estimate.of(options, read_facts(config), Hardware.find(options), check_sizes)


def read_facts(config: EngineConfig) -> ModelFacts:
    import_torch()
    import torch

    from nanovllm.engine.defaults import resolve_max_model_len
    from nanovllm.lowrank.folder import low_rank_forms
    from nanovllm.models.registry import find_family
    from nanovllm.runner.quantization import choose_kv_dtype, choose_scales, scaled_facts
    from nanovllm.weights.checkpoint import open_checkpoint
    from nanovllm.weights.resolve import resolve_model

    checkpoint = open_checkpoint(resolve_model(config.model, offline=True, progress=False))
    try:
        model = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config)
        forms = low_rank_forms(checkpoint.path, model)
        stored = scaled_facts(choose_scales(config, model, checkpoint, True, forms is not None))
    finally:
        checkpoint.close()
    find_family(model)  # an architecture that this engine does not have is refused here, not after a download
    resolve_max_model_len(config, model)
    trained = resolve_max_model_len(replace(config, max_model_len=None), model)
    dtype = torch.float32 if config.dtype == "float32" else torch.float16
    choose_kv_dtype(config, model, True, dtype)  # refuses what no GPU has
    return ModelFacts(model, dtype.itemsize, trained, forms, kv_cache_dtype=config.kv_cache_dtype, **stored)


def command(estimate: Estimate) -> str:
    words = ["nanovllm", "generate", "Why is the sky blue?"]
    for name, value in estimate.settings.items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(f"{value:g}" if isinstance(value, float) else str(value))
    return shlex.join(words)


# ---- JSON ----------------------------------------------------------------------------------------------------------


def estimate_record(estimate: Estimate) -> dict[str, Any]:
    record: dict[str, Any] = {
        "model": estimate.options.model,
        "architecture": estimate.model.config.architecture,
        "runs": estimate.tiers is not None,
        "gpu_bytes": estimate.memory.gpu_bytes,
        "host_bytes": estimate.memory.host_bytes,
        "usable_bytes": estimate.memory.usable_bytes,
        "kv_bytes_per_token": estimate.model.kv_bytes_per_token,
        "expanded_kv_bytes": estimate.model.expanded_kv_bytes,
        "num_experts": estimate.model.num_experts,
        "expert_bytes": estimate.model.expert_bytes,
        "redundant_experts": estimate.model.redundant_experts,
        "spare_bytes": estimate.model.spare_bytes,
        "assumptions": list(estimate.hardware.link_notes),
    }
    tiers = estimate.tiers
    if tiers is None:
        assert estimate.refusal is not None
        reason = {"reason": str(estimate.refusal), "missing_bytes": estimate.refusal.missing_bytes}
        more = estimate.fewest_gpus()
        return {**record, **reason, "fewest_gpus": None if more is None else more.num_ranks}
    record["tiers"] = {
        **asdict(tiers),
        "num_cached": tiers.num_cached,
        "num_slots": tiers.num_buffers,
        "gpu_expert_bytes": tiers.gpu_expert_bytes,
        "lone_experts": tiers.lone_experts,
    }
    record["speeds"] = {
        str(batch): dict(zip(("low", "high"), map(asdict, estimate.speeds(batch)))) for batch in BATCHES
    }
    if estimate.topology.num_ranks > 1:
        record["scaling"] = scaling_record(estimate)
    return {**record, "settings": estimate.settings, "command": command(estimate)}


def scaling_record(estimate: Estimate) -> dict[str, Any]:
    works = {
        work.name: {"tokens_per_second": work.tokens_per_second, "speedup": work.speedup, **asdict(work.cost)}
        for work in estimate.scaling.works
    }
    parts = {"topology": asdict(estimate.topology), "machine": asdict(estimate.hardware.machine)}
    return {**parts, "works": works, "assumptions": list(estimate.scaling_notes)}


# ---- tables --------------------------------------------------------------------------------------------------------


def show_estimate(estimate: Estimate) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, markup=False)
    if estimate.options.table:
        print("".join(f"| {' | '.join(row)} |\n" for row in grid_rows(estimate)), end="")
        return
    console.print("\n".join(heading(estimate)) + "\n")
    tiers = estimate.tiers
    if tiers is None:
        console.print(f"cannot run: {estimate.refusal}")
        if more := estimate.fewest_gpus():
            spread = f" --expert-parallel-size {more.expert_size}" if more.expert_size > 1 else ""
            console.print(f"{more.num_ranks} such GPUs hold it: --tensor-parallel-size {more.num_ranks}{spread}")
        return
    show_table(console, f"what goes where: {tiers.placement}", place_rows(estimate))
    if estimate.topology.num_ranks == 1 or tiers.placement == "offload":
        show_speeds(estimate, console)
    if estimate.topology.num_ranks > 1 and tiers.placement == "resident":
        show_scaling(estimate, console)
    console.print(
        f"longest context: {tiers.longest_context} tokens for one sequence; with the settings below "
        f"the KV cache holds {tiers.kv_tokens} tokens"
    )
    if (share := estimate.model.expanded_kv_bytes) is not None:
        expanded, latent = share * estimate.topology.num_ranks, estimate.model.kv_bytes_per_token
        console.print(
            f"a token takes {latent} bytes of KV cache (latent attention); keys and values of all heads would take "
            f"{expanded}, {expanded / latent:.1f} times as much"
        )
    for line in tiers.notes:
        console.print(f"note: {line}")
    console.print(f"\nsettings:\n{command(estimate)}")


def show_table(console: Console, title: str, rows: Iterator[list[str]]) -> None:
    """The first row is the heading."""
    from rich.table import Table

    table = Table(*next(rows), title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def heading(estimate: Estimate) -> Iterator[str]:
    config, topology, memory = estimate.model.config, estimate.topology, estimate.memory
    kind = f"{config.num_layers} layers"
    if config.moe is not None:
        numbers = estimate.model.expert_numbers
        how = " (low-rank)" if estimate.model.forms else f" ({numbers})" if numbers else ""
        size = gib(estimate.model.mean_expert_bytes) + how
        kind += f", {config.moe.num_experts} experts a layer of {size}, top {config.moe.top_k}"
    yield f"{estimate.options.model}: {config.architecture}, {kind}"
    if topology.num_ranks > 1:
        hosts = f"{topology.num_hosts} hosts" if topology.num_hosts > 1 else "one host"
        yield f"{topology.num_ranks} GPUs on {hosts}; bytes below are those of each GPU"
    yield (
        f"GPU {gib(memory.gpu_bytes)}, of which {gib(memory.usable_bytes)} may be used "
        f"(gpu_memory_utilization={estimate.options.gpu_memory_utilization}); host {gib(memory.host_bytes)}"
    )


def place_rows(estimate: Estimate) -> Iterator[list[str]]:
    tiers = estimate.tiers
    assert tiers is not None

    def row(what: str, where: str, count: str, num_bytes: int) -> list[str]:
        return [what, where, count, f"{num_bytes / GIB:.2f}"]

    yield ["what", "where", "how many", "GiB"]
    yield row("dense weights", "GPU", "", tiers.dense_bytes)
    if tiers.resident_experts:
        redundant, spare = estimate.model.redundant_experts, estimate.model.spare_bytes
        count = f"{tiers.resident_experts}, {redundant} of them redundant" if redundant else str(tiers.resident_experts)
        yield row("experts", "GPU", count, tiers.resident_bytes - spare)
        if spare:
            yield row("spare expert buffer", "GPU", str(estimate.model.layer_experts), spare)
    if tiers.placement == "offload":
        size, low, high = tiers.expert_bytes, min(tiers.quotas), max(tiers.quotas)
        share = f"{low} a layer" if low == high else f"{low} or {high} a layer"
        yield row("expert slots, cached", "GPU", f"{tiers.num_cached} ({share})", tiers.num_cached * size)
        yield row("expert slots, streaming", "GPU", str(tiers.num_streaming), tiers.num_streaming * size)
    yield row("KV cache", "GPU", f"{tiers.kv_tokens} tokens", tiers.kv_bytes)
    yield row("largest step", "GPU", f"{estimate.wants.max_num_batched_tokens} tokens", tiers.step_bytes)
    if tiers.captured_bytes:
        yield row("captured steps, sampler", "GPU", "", tiers.captured_bytes)
    yield row("graphs, libraries", "GPU", "", tiers.reserve_bytes)
    if tiers.placement == "offload":
        yield row("experts", "host", str(tiers.host_experts), tiers.host_bytes)
        if tiers.lone_experts:
            alone = estimate.model.all_experts_bytes - tiers.host_bytes - tiers.disk_bytes
            yield row("experts", "slots only", str(tiers.lone_experts), alone)
        yield row("experts", "disk", str(tiers.disk_experts), tiers.disk_bytes)


def show_speeds(estimate: Estimate, console: Console) -> None:
    show_table(console, "speed, all together", speed_rows(estimate))
    console.print(
        "Limits of the links, not promises; the range is from even routing to skewed. "
        f"{'; '.join(estimate.hardware.link_notes)}."
    )
    if estimate.topology.num_ranks > 1:
        talking = ", ".join(f"{work.cost.talking * 1e3:.2f} ms for {work.name}" for work in estimate.scaling.works)
        console.print(f"What the GPUs say to each other comes on top, in each step: {talking} (computed).")


def speed_rows(estimate: Estimate) -> Iterator[list[str]]:
    yield ["sequences", "tokens a second, at most", "GB copied a token", "of them from disk"]
    for batch in BATCHES:
        low, high = estimate.speeds(batch)

        def gigabytes(name: str, pair: tuple[SpeedEstimate, ...] = (high, low), batch: int = batch) -> str:
            return " to ".join(f"{getattr(speed, name) / batch / 1e9:.2f}" for speed in pair)

        rates = f"{rate(low.tokens_per_second)} to {rate(high.tokens_per_second)}"
        yield [str(batch), rates, gigabytes("copied_bytes"), gigabytes("disk_bytes")]


def show_scaling(estimate: Estimate, console: Console) -> None:
    show_table(console, "a step, computed", scaling_rows(estimate))
    whole = replace(estimate.model, num_ranks=1, expert_size=1, num_redundant=None)
    alone = "one such GPU"
    if whole.dense_bytes + whole.all_experts_bytes > estimate.memory.usable_bytes:
        alone += ", if the model fitted in it (it does not)"
    console.print(
        f"Sequences and prompts of 1024 tokens. Speed-up: over {alone}. All of this is computed, nothing was "
        f"measured on several GPUs: {'; '.join(estimate.scaling_notes)}."
    )


def scaling_rows(estimate: Estimate) -> Iterator[list[str]]:
    model, several_hosts = estimate.model, estimate.topology.num_hosts > 1
    is_spread = estimate.topology.expert_size > 1 and model.num_sparse_layers > 0
    has_shared = model.config.moe is not None and model.config.moe.shared_size > 0
    num_reduces = 1 if is_spread and not has_shared else 2  # in a layer
    names = ["", "tokens a second", "speed-up", "computing ms", "talking ms", "MB all-reduced a layer"]
    yield [*names, "MB a GPU sends", *["of it all-to-all"] * is_spread, *["MB a host sends"] * several_hosts]
    for work in estimate.scaling.works:
        cost, reduced = work.cost, num_reduces * work.tokens * model.config.hidden_size * model.itemsize
        sizes = [reduced, cost.sent_bytes, *[cost.exchanged_bytes] * is_spread, *[cost.network_bytes] * several_hosts]
        times = (f"{seconds * 1e3:.2f}" for seconds in (cost.computing, cost.talking))
        yield [work.name, rate(work.tokens_per_second), f"{work.speedup:.2f}", *times, *map(megabytes, sizes)]


def grid_rows(estimate: Estimate) -> Iterator[list[str]]:
    """For Markdown: a row for each number of GPUs on a host and of hosts."""
    head = ["GPUs", "hosts", "GiB of weights a GPU", "tokens in the KV cache"]
    head += [title for name, _, _ in WORKS for title in (f"{name}, tok/s", "speed-up")]
    blank = ["-"] * (2 * len(WORKS))
    yield head
    yield ["---"] * len(head)
    for topology, found in estimate.grid():
        row = [str(topology.num_ranks), str(topology.num_hosts)]
        if found is None:
            yield [*row, "does not divide", "-", *blank]
            continue
        row.append(f"{(found.model.dense_bytes + found.model.all_experts_bytes) / GIB:.1f}")
        if found.tiers is None or found.tiers.placement == "offload":
            yield [*row, "does not fit", *blank]
            continue
        speeds = ((rate(work.tokens_per_second), f"{work.speedup:.2f}") for work in found.scaling.works)
        yield [*row, f"{found.tiers.kv_tokens:,}", *(cell for pair in speeds for cell in pair)]


def rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.3g}" if num_bytes < 1e9 else f"{num_bytes / 1e6:,.0f}"
