"""`nanovllm plan`: what of a model goes where on a given card, how long a context fits, how fast it can be at most.

From config.json alone: no weights, no GPU, nothing is downloaded. The memory is that of moe/sizing.py, by which the
engine decides too; the speed is that of moe/speed.py. torch is imported inside functions: `nanovllm --help` is instant.

    plan = make_plan(PlanOptions(model="DIR", gpu_memory_gb=11, host_memory_gb=64))
    show_plan(plan)                 # tables; plan.tiers is None and plan.refusal says why if it cannot run
    LLM(**plan.settings)            # the options to use
"""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.cli.options import ENGINE, OptionGroup
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.model_config import ModelConfig
from nanovllm.moe.sizing import (
    GIB,
    STEP_TOKENS,
    DoesNotFit,
    Memory,
    ModelFacts,
    Tiers,
    Wants,
    default_step_tokens,
    gib,
    size_tiers,
)
from nanovllm.moe.speed import Links, Speed, predict

if TYPE_CHECKING:
    from nanovllm.hardware.device import Device

BATCHES = (1, 16)
MIN_LEN = 256  # below that nobody wants to use it
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
    disk_gbs: float = 3.0
    gpu_read_gbs: float | None = None
    measure: bool = False

    def engine_config(self) -> EngineConfig:
        """The options that the engine has too, checked as it checks them."""
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        given = {name: value for name, value in dataclasses.asdict(self).items() if name in known and value is not None}
        return EngineConfig.from_options(**given)


PLAN = OptionGroup(
    title="Plan",
    of=PlanOptions,
    build=lambda values: PlanOptions(**values),
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
    },
)


@dataclass(frozen=True)
class Plan:
    options: PlanOptions
    model: ModelFacts
    memory: Memory
    wants: Wants
    tiers: Tiers | None  # None: cannot run
    refusal: DoesNotFit | None
    links: tuple[Links, Links]  # slow, fast
    assumptions: tuple[str, ...]

    def speeds(self, batch: int) -> tuple[Speed, Speed]:
        """(even routing, slow links, copying and computing in turns; skewed routing, fast links, overlapped)"""
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


def make_plan(options: PlanOptions) -> Plan:
    """Raises what the engine would for a wrong option or an unusable model; a card that is too small is in the plan."""
    config = options.engine_config()
    model = read_facts(config)
    memory = find_memory(options)
    links, assumptions = find_links(options, memory)
    wants, tiers, refusal = choose(memory, model, options)
    return Plan(options, model, memory, wants, tiers, refusal, links, assumptions)


def read_facts(config: EngineConfig) -> ModelFacts:
    from nanovllm.engine.llm_engine import resolve_max_model_len
    from nanovllm.models.registry import find_family
    from nanovllm.weights.checkpoint import open_checkpoint
    from nanovllm.weights.resolve import resolve_model
    from nanovllm.weights.svd_checkpoint import low_rank_layouts

    checkpoint = open_checkpoint(resolve_model(config.model, offline=True, progress=False))
    try:
        model = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config)
        layouts = low_rank_layouts(checkpoint.path, model)
    finally:
        checkpoint.close()
    find_family(model)  # an architecture that this engine does not have is refused here, not after a download
    resolve_max_model_len(config, model)
    trained = resolve_max_model_len(replace(config, max_model_len=None), model)
    return ModelFacts(model, 4 if config.dtype == "float32" else 2, trained, layouts)


def find_memory(options: PlanOptions) -> Memory:
    from nanovllm.hardware.device import Device

    host_gb = options.host_memory_gb
    if host_gb is not None and not 0 < host_gb < 2**20:
        raise ConfigError(f"host_memory_gb={host_gb}: must be a positive number of gigabytes, or left out")
    host = Device.choose("cpu").memory()[1] if host_gb is None else int(host_gb * GIB)
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
    from nanovllm.hardware.bandwidth import host_to_device_bandwidth, read_bandwidth

    return host_to_device_bandwidth(device) / 1e9, read_bandwidth(device) / 1e9


# ---- choosing what nobody asked for --------------------------------------------------------------------------------


def choose(
    memory: Memory, model: ModelFacts, options: PlanOptions
) -> tuple[Wants, Tiers | None, DoesNotFit | None]:
    """Settings that fit. First few sequences and a short context, to see whether and how the model runs at all; then as
    much as that leaves room for."""
    trained = model.trained_len or model.config.max_position_embeddings
    refusal = None
    for length, most_tokens in ((2048, None), (MIN_LEN, STEP_TOKENS[0])):
        wants = _wants(memory, model, options, options.max_model_len or min(length, trained), 16, most_tokens)
        try:
            tiers = size_tiers(memory, model, wants)
        except DoesNotFit as error:
            refusal = error
            continue
        return _grow(memory, model, options, wants, tiers)
    return wants, None, refusal


def _wants(
    memory: Memory, model: ModelFacts, options: PlanOptions, length: int, num_seqs: int, most_tokens: int | None
) -> Wants:
    num_seqs = options.max_num_seqs or min(num_seqs, options.max_num_batched_tokens or num_seqs)
    num_tokens = options.max_num_batched_tokens
    if num_tokens is None:
        num_tokens = max(most_tokens, num_seqs) if most_tokens else default_step_tokens(memory, model, num_seqs)
    return Wants(
        max_model_len=length,
        max_num_batched_tokens=num_tokens,
        max_num_seqs=num_seqs,
        placement=options.expert_placement,
        cache_gb=options.expert_cache_gb,
        host_gb=options.expert_host_gb,
    )


def _grow(
    memory: Memory, model: ModelFacts, options: PlanOptions, wants: Wants, tiers: Tiers
) -> tuple[Wants, Tiers | None, None]:
    """A resident model: as many sequences and as long as fit. An offloaded one stays with 16 sequences, which already
    touch nearly all experts, and gets the longest power of two whose KV cache is within its share."""
    tries: list[Wants] = []
    if tiers.placement == "resident":
        many = _wants(memory, model, options, wants.max_model_len, 256 if memory.gpu_bytes > 24 * GIB else 64, None)
        for base in (many, wants):
            longest = _longest(memory, model, base)
            tries.append(replace(base, max_model_len=options.max_model_len or max(longest, wants.max_model_len)))
    elif options.max_model_len is None:
        length = wants.max_model_len
        share = (tiers.gpu_expert_bytes + tiers.kv_bytes) // 10
        while length * 2 <= tiers.longest_context and length * 2 * model.kv_bytes_per_token <= share:
            length *= 2
        tries.append(replace(wants, max_model_len=length))
    for better in tries:
        try:
            found = size_tiers(memory, model, better)
        except DoesNotFit:
            continue
        if found.placement == tiers.placement:
            return better, found, None
    return wants, tiers, None


def _longest(memory: Memory, model: ModelFacts, wants: Wants) -> int:
    try:
        found = size_tiers(memory, model, wants)
    except DoesNotFit:
        return 0
    return found.longest_context if found.placement == "resident" else 0


# ---- what the user sees --------------------------------------------------------------------------------------------


def plan_record(plan: Plan) -> dict[str, Any]:
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
        return {**record, "reason": str(plan.refusal), "missing_bytes": plan.refusal.missing_bytes}
    tiers = plan.tiers
    record["tiers"] = {
        **dataclasses.asdict(tiers), "num_cached": tiers.num_cached, "num_slots": tiers.num_slots,
        "gpu_expert_bytes": tiers.gpu_expert_bytes,
    }  # fmt: skip
    record["speeds"] = {
        str(batch): {"low": dataclasses.asdict(low), "high": dataclasses.asdict(high)}
        for batch in BATCHES
        for low, high in [plan.speeds(batch)]
    }
    return {**record, "settings": plan.settings, "command": plan.command}


def show_plan(plan: Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True, markup=False)
    config = plan.model.config
    kind = f"{config.num_layers} layers"
    if config.moe is not None:
        size = gib(plan.model.mean_expert_bytes) + (" (low-rank)" if plan.model.layouts else "")
        kind += f", {config.moe.num_experts} experts a layer of {size}, top {config.moe.top_k}"
    console.print(f"{plan.options.model}: {config.architecture}, {kind}")
    console.print(
        f"GPU {gib(plan.memory.gpu_bytes)}, of which {gib(plan.memory.usable_bytes)} may be used "
        f"(gpu_memory_utilization={plan.options.gpu_memory_utilization}); host {gib(plan.memory.host_bytes)}\n"
    )
    if plan.tiers is None:
        console.print(f"cannot run: {plan.refusal}")
        return
    places = Table("what", "where", "how many", "GiB", title=f"what goes where: {plan.tiers.placement}",
                   title_justify="left")  # fmt: skip
    for what, where, count, num_bytes in rows(plan):
        places.add_row(what, where, count, f"{num_bytes / GIB:.2f}")
    console.print(places)
    speeds = Table("sequences", "tokens a second, at most", "GB copied a token", title="speed, all together",
                   title_justify="left")  # fmt: skip
    for batch in BATCHES:
        low, high = plan.speeds(batch)
        copied = [f"{speed.copied_bytes / batch / 1e9:.2f}" for speed in (high, low)]
        speeds.add_row(str(batch), f"{rate(low)} to {rate(high)}", " to ".join(copied))
    console.print(speeds)
    console.print("Limits of the links, not promises; the range is from even routing to skewed. "
                  f"{'; '.join(plan.assumptions)}.")  # fmt: skip
    console.print(f"longest context: {plan.tiers.longest_context} tokens for one sequence; with the settings below "
                  f"the KV cache holds {plan.tiers.kv_tokens} tokens")  # fmt: skip
    for line in plan.tiers.notes:
        console.print(f"note: {line}")
    console.print(f"\nsettings:\n{plan.command}")


def rate(speed: Speed) -> str:
    number = speed.tokens_per_second
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def rows(plan: Plan) -> list[tuple[str, str, str, int]]:
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
        found.append(("experts", "disk", str(tiers.disk_experts), tiers.disk_bytes))
    return found
