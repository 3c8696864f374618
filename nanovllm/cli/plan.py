"""`nanovllm plan`: what of a model goes where on a given card, how long a context fits, how fast it can be at most.

From config.json alone: no weights, no GPU, nothing is downloaded. The memory is that of memory/budget.py, by which the
engine decides too; the speed is that of memory/speed.py, or for several GPUs, of which each gets its part, that of
scaling.py. torch is imported inside functions: `nanovllm --help` is instant.

    plan = make_plan(PlanOptions(model="DIR", gpu_memory_gb=11, host_memory_gb=64))
    show_plan(plan)                 # tables; plan.tiers is None and plan.refusal says why if it cannot run
    LLM(**plan.settings)            # the options to use
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.cli.options import ENGINE, OptionGroup
from nanovllm.cli.scaling_tables import (
    INSIDE,
    NETWORKS,
    Scaling,
    check_divides,
    find_machine,
    find_topology,
    markdown,
    scaling_record,
    scaling_rows,
)
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.memory.budget import GIB, DoesNotFit, Memory, Tiers, Wants, gib
from nanovllm.memory.choice import choose
from nanovllm.memory.facts import ModelFacts
from nanovllm.memory.scaling import Topology
from nanovllm.memory.speed import Links, SpeedEstimate, predict
from nanovllm.model_config import ModelConfig
from nanovllm.moe.offload.cache import DISK_BANDWIDTH

if TYPE_CHECKING:
    from rich.console import Console

    from nanovllm.hardware.device import Device

BATCHES = (1, 16)
# GB/s that cards of so many GiB are sold with: (up to GiB, slow, fast), the link to the host and their own memory.
LINKS = ((24, 12, 25), (2**20, 25, 55))
LINK_NAMES = {12: "PCIe 3 x16", 25: "PCIe 4 x16", 55: "PCIe 5 x16"}
READS = ((12, 350, 600), (24, 450, 1000), (48, 700, 1000), (100, 1900, 3350), (2**20, 4000, 4800))


@dataclass(frozen=True)
class PlanOptions:
    model: str = "smollm2"
    gpu_memory_gb: float | None = None
    host_memory_gb: float | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_utilization: float = 0.9
    dtype: str = "auto"
    expert_placement: str = "auto"
    expert_cache_gb: float | None = None
    expert_host_gb: float | None = None
    bandwidth_gbs: float | None = None
    disk_gbs: float = DISK_BANDWIDTH / 1e9
    gpu_read_gbs: float | None = None
    measure: bool = False
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    hosts: int = 1
    link: str = "nvlink"
    link_gbs: float | None = None
    link_us: float | None = None
    network: str = "ethernet"
    network_gbs: float | None = None
    network_us: float | None = None
    gpu_tflops: float | None = None
    table: bool = False

    def engine_config(self) -> EngineConfig:
        """The options that the engine has too, checked as it checks them."""
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        given = {name: value for name, value in dataclasses.asdict(self).items() if name in known and value is not None}
        return EngineConfig.from_options(**given)


COMMON = frozenset(
    {
        "model",
        "gpu_memory_gb",
        "host_memory_gb",
        "max_model_len",
        "max_num_seqs",
        "expert_placement",
        "measure",
        "tensor_parallel_size",
        "hosts",
        "table",
    }
)
PLAN = OptionGroup(
    title="Plan",
    of=PlanOptions,
    build=lambda values: PlanOptions(**values),
    common=COMMON,
    help={
        **{field.name: ENGINE.help.get(field.name, "") for field in dataclasses.fields(PlanOptions)},
        "gpu_memory_gb": "Plan for a card with so many gigabytes; default: the one in this machine.",
        "host_memory_gb": "Gigabytes of memory of the machine around it; default: this machine's.",
        "max_model_len": "Longest prompt plus output wanted; none = chosen for you.",
        "max_num_batched_tokens": "Tokens of one step; none = chosen for you.",
        "max_num_seqs": "Sequences running at the same time; none = chosen for you.",
        "dtype": "As for the engine; auto is 16 bits here.",
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


@dataclass(frozen=True)
class Estimate:
    options: PlanOptions
    model: ModelFacts
    memory: Memory
    wants: Wants
    tiers: Tiers | None  # None: cannot run
    refusal: DoesNotFit | None
    links: tuple[Links, Links]  # slow, fast
    assumptions: tuple[str, ...]
    scaling: Scaling  # over the ranks that `model` and `memory` are one of

    @property
    def runs(self) -> bool:
        return self.tiers is not None

    def speeds(self, batch: int) -> tuple[SpeedEstimate, SpeedEstimate]:
        """Of one GPU: (even routing, slow links, copying and computing in turns; skewed routing, fast links,
        overlapped)"""
        assert self.tiers is not None
        slow, fast = self.links
        return (
            predict(self.model, self.tiers, slow, batch, skewed=False, overlap=False),
            predict(self.model, self.tiers, fast, batch, skewed=True, overlap=True),
        )

    @property
    def settings(self) -> dict[str, Any]:
        """Options of the engine."""
        options, wants = self.options, self.wants
        chosen: dict[str, Any] = {"model": options.model}
        if options.gpu_memory_gb is not None:
            chosen["gpu_memory_gb"] = options.gpu_memory_gb
        chosen |= {
            "max_model_len": wants.max_model_len,
            "max_num_batched_tokens": wants.max_num_batched_tokens,
            "max_num_seqs": wants.max_num_seqs,
            "gpu_memory_utilization": options.gpu_memory_utilization,
        }
        if options.dtype != "auto":
            chosen["dtype"] = options.dtype
        for name in ("tensor_parallel_size", "expert_parallel_size"):
            if getattr(options, name) > 1:
                chosen[name] = getattr(options, name)
        if options.hosts > 1:
            chosen["distributed_executor_backend"] = "ray"
        if self.tiers is not None and self.model.num_experts:
            chosen["expert_placement"] = self.tiers.placement
            for name in ("expert_cache_gb", "expert_host_gb"):
                if self.tiers.placement == "offload" and getattr(options, name) is not None:
                    chosen[name] = getattr(options, name)
        return chosen

    @property
    def command(self) -> str:
        words = ["nanovllm", "generate", "Why is the sky blue?"]
        for name, value in self.settings.items():
            words += [f"--{name.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value)]
        return shlex.join(words)


def make_plan(options: PlanOptions) -> Estimate:
    """Raises what the engine would for a wrong option or an unusable model; a card that is too small is in the plan."""
    config = options.engine_config()
    topology = find_topology(options)
    model = read_facts(config)
    check_divides(options, model.config)
    model = replace(model, num_ranks=topology.num_ranks, expert_size=topology.expert_size)
    memory = find_memory(options, topology)
    links, assumptions = find_links(options, memory)
    machine, said = find_machine(options, memory, (links[0].gpu_read, links[1].gpu_read))
    wants, tiers, refusal = choose(memory, model, options)
    scaling = Scaling.of(model, topology, machine, said)
    return Estimate(options, model, memory, wants, tiers, refusal, links, assumptions, scaling)


def fewest_gpus(plan: Estimate) -> int | None:
    """On one host, for a plan that does not fit: of how many such cards each has room for its part."""
    for num_ranks in (2, 4, 8, 16):
        more = replace(plan.options, tensor_parallel_size=num_ranks, expert_parallel_size=1, hosts=1)
        with contextlib.suppress(ConfigError):  # does not divide
            check_divides(more, plan.model.config)
            model = replace(plan.model, num_ranks=num_ranks, expert_size=1)
            if num_ranks > plan.model.num_ranks and choose(find_memory(more, Topology(num_ranks)), model, more)[1]:
                return num_ranks
    return None


def make_table(plan: Estimate) -> str:
    """Of the plan's model and cards, whatever its number of them."""

    def fit(model: ModelFacts, topology: Topology) -> tuple[Tiers | None, DoesNotFit | None]:
        return choose(find_memory(plan.options, topology), model, plan.options)[1:]

    whole = replace(plan.model, num_ranks=1, expert_size=1)
    return markdown(plan.options, whole, plan.scaling.machine, fit)


def read_facts(config: EngineConfig) -> ModelFacts:
    from nanovllm.engine.defaults import resolve_max_model_len
    from nanovllm.lowrank.folder import low_rank_forms
    from nanovllm.models.registry import find_family
    from nanovllm.weights.checkpoint import open_checkpoint
    from nanovllm.weights.resolve import resolve_model

    checkpoint = open_checkpoint(resolve_model(config.model, offline=True, progress=False))
    try:
        model = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config)
        forms = low_rank_forms(checkpoint.path, model)
    finally:
        checkpoint.close()
    find_family(model)  # an architecture that this engine does not have is refused here, not after a download
    resolve_max_model_len(config, model)
    trained = resolve_max_model_len(replace(config, max_model_len=None), model)
    return ModelFacts(model, 4 if config.dtype == "float32" else 2, trained, forms)


def find_memory(options: PlanOptions, topology: Topology) -> Memory:
    """Of one rank: a card, and its part of its host."""
    from nanovllm.hardware.device import Device

    host_gb = options.host_memory_gb
    if host_gb is not None and not 0 < host_gb < 2**20:
        raise ConfigError(f"host_memory_gb={host_gb}: must be a positive number of gigabytes, or left out")
    host = Device.choose("cpu").memory()[1] if host_gb is None else int(host_gb * GIB)
    host //= topology.per_host
    if options.gpu_memory_gb is not None:
        return Memory(int(options.gpu_memory_gb * GIB), host, options.gpu_memory_utilization)
    device = Device.choose("auto")
    if not device.is_gpu:
        raise ConfigError("gpu_memory_gb: there is no GPU here; say for which card to plan, e.g. --gpu-memory-gb 11")
    return Memory(device.memory()[1], host, options.gpu_memory_utilization)


def find_links(options: PlanOptions, memory: Memory) -> tuple[tuple[Links, Links], tuple[str, ...]]:
    for name in ("bandwidth_gbs", "disk_gbs", "gpu_read_gbs"):
        value = getattr(options, name)
        if value is not None and not 0 < value < 1e6:
            raise ConfigError(f"{name}={value}: must be a positive number of gigabytes (10^9 bytes) per second")
    bandwidth, read = options.bandwidth_gbs, options.gpu_read_gbs
    if options.measure:
        from nanovllm.hardware.device import Device

        measured = measure(Device.choose("auto"))
        bandwidth, read = bandwidth or measured[0], read or measured[1]
    size = memory.gpu_bytes / GIB
    link = (bandwidth, bandwidth) if bandwidth else next((a, b) for most, a, b in LINKS if size <= most)
    reads = (read, read) if read else next((a, b) for most, a, b in READS if size <= most)
    how = "measured" if options.measure else "given"
    named = " or ".join(f"{LINK_NAMES[int(gbs)]} {gbs}" for gbs in link) if bandwidth is None else ""
    said = (
        f"host to GPU: {named} GB/s (assumed)" if named else f"host to GPU: {bandwidth:.4g} GB/s ({how})",
        f"disk: {options.disk_gbs:.4g} GB/s",
        f"GPU memory: {read:.4g} GB/s ({how})" if read else f"GPU memory: {reads[0]} to {reads[1]} GB/s (assumed)",
    )
    slow, fast = (Links(link[i] * 1e9, options.disk_gbs * 1e9, reads[i] * 1e9) for i in range(2))
    return (slow, fast), said


def measure(device: Device) -> tuple[float, float]:
    """GB/s (host to device, of the device's own memory)"""
    from tqdm import tqdm

    from nanovllm.hardware.bandwidth import host_to_device_bandwidth, read_bandwidth

    links = tqdm((host_to_device_bandwidth, read_bandwidth), "measuring", unit="link", disable=None, leave=False)
    to_device, of_device = (link(device) / 1e9 for link in links)
    return to_device, of_device


# ---- what the user sees --------------------------------------------------------------------------------------------


def plan_record(plan: Estimate) -> dict[str, Any]:
    record: dict[str, Any] = {
        "model": plan.options.model,
        "architecture": plan.model.config.architecture,
        "runs": plan.tiers is not None,
        "gpu_bytes": plan.memory.gpu_bytes,
        "host_bytes": plan.memory.host_bytes,
        "usable_bytes": plan.memory.usable_bytes,
        "kv_bytes_per_token": plan.model.kv_bytes_per_token,
        "num_experts": plan.model.num_experts,
        "assumptions": list(plan.assumptions),
    }
    if plan.tiers is None:
        assert plan.refusal is not None
        reason = {"reason": str(plan.refusal), "missing_bytes": plan.refusal.missing_bytes}
        return {**record, **reason, "fewest_gpus": fewest_gpus(plan)}
    tiers = plan.tiers
    record["tiers"] = {
        **dataclasses.asdict(tiers),
        "num_cached": tiers.num_cached,
        "num_slots": tiers.num_slots,
        "gpu_expert_bytes": tiers.gpu_expert_bytes,
        "lone_experts": tiers.lone_experts,
    }
    record["speeds"] = {
        str(batch): {"low": dataclasses.asdict(low), "high": dataclasses.asdict(high)}
        for batch in BATCHES
        for low, high in [plan.speeds(batch)]
    }
    if plan.scaling.topology.num_ranks > 1:
        record["scaling"] = scaling_record(plan.scaling)
    return {**record, "settings": plan.settings, "command": plan.command}


def show_plan(plan: Estimate) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True, markup=False)
    if plan.options.table:
        print(make_table(plan), end="")
        return
    config = plan.model.config
    kind = f"{config.num_layers} layers"
    if config.moe is not None:
        size = gib(plan.model.mean_expert_bytes) + (" (low-rank)" if plan.model.forms else "")
        kind += f", {config.moe.num_experts} experts a layer of {size}, top {config.moe.top_k}"
    console.print(f"{plan.options.model}: {config.architecture}, {kind}")
    topology = plan.scaling.topology
    if topology.num_ranks > 1:
        hosts = f"{topology.num_hosts} hosts" if topology.num_hosts > 1 else "one host"
        console.print(f"{topology.num_ranks} GPUs on {hosts}; bytes below are those of each GPU")
    console.print(
        f"GPU {gib(plan.memory.gpu_bytes)}, of which {gib(plan.memory.usable_bytes)} may be used "
        f"(gpu_memory_utilization={plan.options.gpu_memory_utilization}); host {gib(plan.memory.host_bytes)}\n"
    )
    if plan.tiers is None:
        console.print(f"cannot run: {plan.refusal}")
        if more := fewest_gpus(plan):
            console.print(f"{more} such GPUs hold it: --tensor-parallel-size {more}")
        return
    places = Table(
        "what", "where", "how many", "GiB", title=f"what goes where: {plan.tiers.placement}", title_justify="left"
    )
    for what, where, count, num_bytes in rows(plan):
        places.add_row(what, where, count, f"{num_bytes / GIB:.2f}")
    console.print(places)
    if topology.num_ranks == 1 or plan.tiers.placement == "offload":
        show_speeds(plan, console)
    if topology.num_ranks > 1 and plan.tiers.placement == "resident":
        show_scaling(plan, console)
    console.print(
        f"longest context: {plan.tiers.longest_context} tokens for one sequence; with the settings below "
        f"the KV cache holds {plan.tiers.kv_tokens} tokens"
    )
    for line in plan.tiers.notes:
        console.print(f"note: {line}")
    console.print(f"\nsettings:\n{plan.command}")


def show_speeds(plan: Estimate, console: Console) -> None:
    from rich.table import Table

    speeds = Table(
        "sequences",
        "tokens a second, at most",
        "GB copied a token",
        "of them from disk",
        title="speed, all together",
        title_justify="left",
    )
    for batch in BATCHES:
        low, high = plan.speeds(batch)
        copied, disk = (
            " to ".join(f"{getattr(speed, name) / batch / 1e9:.2f}" for speed in (high, low))
            for name in ("copied_bytes", "disk_bytes")
        )
        speeds.add_row(str(batch), f"{rate(low)} to {rate(high)}", copied, disk)
    console.print(speeds)
    console.print(
        f"Limits of the links, not promises; the range is from even routing to skewed. {'; '.join(plan.assumptions)}."
    )
    if plan.scaling.topology.num_ranks > 1:
        talking = ", ".join(f"{work.cost.talking * 1e3:.2f} ms for {work.name}" for work in plan.scaling.works)
        console.print(f"What the GPUs say to each other comes on top, in each step: {talking} (computed).")


def show_scaling(plan: Estimate, console: Console) -> None:
    from rich.table import Table

    heading, *found = scaling_rows(plan.scaling, plan.model)
    table = Table(*heading, title="a step, computed", title_justify="left")
    for row in found:
        table.add_row(*row)
    console.print(table)
    whole = replace(plan.model, num_ranks=1, expert_size=1)
    alone = "one such GPU"
    if whole.dense_bytes + whole.all_experts_bytes > plan.memory.usable_bytes:
        alone += ", if the model fitted in it (it does not)"
    console.print(
        f"Sequences and prompts of 1024 tokens. Speed-up: over {alone}. All of this is computed, nothing was "
        f"measured on several GPUs: {'; '.join(plan.scaling.assumptions)}."
    )


def rate(speed: SpeedEstimate) -> str:
    number = speed.tokens_per_second
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def rows(plan: Estimate) -> list[tuple[str, str, str, int]]:
    """(what, where, how many, bytes)"""
    tiers, wants = plan.tiers, plan.wants
    assert tiers is not None
    size, found = tiers.expert_bytes, [("dense weights", "GPU", "", tiers.dense_bytes)]
    if tiers.resident_experts:
        found.append(("experts", "GPU", str(tiers.resident_experts), tiers.resident_bytes))
    if tiers.placement == "offload":
        low, high = min(tiers.quotas), max(tiers.quotas)
        share = f"{low} a layer" if low == high else f"{low} or {high} a layer"
        found += [
            ("expert slots, cached", "GPU", f"{tiers.num_cached} ({share})", tiers.num_cached * size),
            ("expert slots, streaming", "GPU", str(tiers.num_streaming), tiers.num_streaming * size),
        ]
    found += [
        ("KV cache", "GPU", f"{tiers.kv_tokens} tokens", tiers.kv_bytes),
        ("largest step", "GPU", f"{wants.max_num_batched_tokens} tokens", tiers.step_bytes),
        ("graphs, libraries", "GPU", "", tiers.reserve_bytes),
    ]
    if tiers.placement == "offload":
        found.append(("experts", "host", str(tiers.host_experts), tiers.host_bytes))
        if tiers.lone_experts:
            alone = plan.model.all_experts_bytes - tiers.host_bytes - tiers.disk_bytes
            found.append(("experts", "slots only", str(tiers.lone_experts), alone))
        found.append(("experts", "disk", str(tiers.disk_experts), tiers.disk_bytes))
    return found
