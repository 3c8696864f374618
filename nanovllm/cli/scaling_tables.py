"""`nanovllm plan --tensor-parallel-size N --hosts M`: the cost model of scaling.py on a given machine, as tables.

Which numbers are measured and which are assumed is said with each: one H200 was measured (benchmarks/results), links
between GPUs and hosts were not, and nothing here was ever run on two GPUs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.errors import ConfigError
from nanovllm.memory.budget import GIB, DoesNotFit, Memory, Tiers
from nanovllm.memory.facts import ModelFacts
from nanovllm.memory.scaling import Cost, Link, Machine, Topology, decode_cost, prefill_cost
from nanovllm.model_config import ModelConfig

if TYPE_CHECKING:
    from nanovllm.cli.plan import PlanOptions

# What one H200 reaches: benchmarks/results/2026-11-15-h200-bench-kernels.json
H200_READ, H200_FLOPS = 4.33e12, 786e12
LARGE_CARD = 100  # GiB; larger ones are taken for an H200
# (up to GiB, TFLOP/s of 16-bit matrix products that cards of that size are sold with)
TFLOPS = ((12, 40), (24, 120), (48, 180), (LARGE_CARD, 600))
# Assumed. Bandwidth: four fifths of what is sold, in one direction, and nine tenths of a network's.
INSIDE = {
    "nvlink": (Link(360e9, 2e-6), "NVLink 4"),
    "pcie": (Link(40e9, 5e-6), "PCIe 5 x16"),
}
NETWORKS = {
    "ethernet": (Link(11e9, 25e-6), "100 Gb/s Ethernet"),
    "infiniband": (Link(45e9, 5e-6), "400 Gb/s InfiniBand"),
}
CONTEXT = 1024
PROMPTS = 16
TABLE_GPUS, TABLE_HOSTS = (1, 2, 4, 8), (1, 2, 4)
CostOf = Callable[[ModelFacts, Topology, Machine], Cost]


@dataclass(frozen=True)
class Work:
    """Something to do, with its cost on these GPUs and on a single one, large enough or not."""

    name: str
    tokens: int
    cost: Cost
    alone: Cost

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.cost.seconds

    @property
    def speedup(self) -> float:
        return self.alone.seconds / self.cost.seconds


WORKS: tuple[tuple[str, int, CostOf], ...] = (
    ("1 sequence", 1, lambda model, at, on: decode_cost(model, at, on, 1, CONTEXT)),
    ("64 sequences", 64, lambda model, at, on: decode_cost(model, at, on, 64, CONTEXT)),
    (f"{PROMPTS} prompts", PROMPTS * CONTEXT, lambda model, at, on: prefill_cost(model, at, on, PROMPTS, CONTEXT)),
)


@dataclass(frozen=True)
class Scaling:
    topology: Topology
    machine: Machine
    works: tuple[Work, ...]
    assumptions: tuple[str, ...]

    @classmethod
    def of(cls, model: ModelFacts, topology: Topology, machine: Machine, assumptions: tuple[str, ...]) -> Scaling:
        """`model`: facts of one rank."""
        whole = replace(model, num_ranks=1, expert_size=1)
        works = tuple(
            Work(name, tokens, cost(model, topology, machine), cost(whole, Topology(), machine))
            for name, tokens, cost in WORKS
        )
        return cls(topology, machine, works, assumptions)


# ---- from options --------------------------------------------------------------------------------------------------


def find_topology(options: PlanOptions) -> Topology:
    ranks, hosts = options.tensor_parallel_size, options.hosts
    if not 1 <= hosts <= 1024 or ranks % hosts:
        good = [n for n in range(1, ranks + 1) if ranks % n == 0]
        raise ConfigError(
            f"hosts={hosts}: tensor_parallel_size={ranks} counts the GPUs of all hosts together, as many on each; "
            f"possible: {good}"
        )
    return Topology(ranks, hosts, options.expert_parallel_size)


def check_divides(options: PlanOptions, model: ModelConfig) -> None:
    """As the engine: what does not divide is refused with the sizes that would."""
    if options.tensor_parallel_size > 1 or options.expert_parallel_size > 1:
        from nanovllm.ranks.several import check_sizes

        check_sizes(options.engine_config(), model)


def find_machine(options: PlanOptions, memory: Memory, reads: tuple[float, float]) -> tuple[Machine, tuple[str, ...]]:
    """`reads`: bytes per second of the GPU's memory, at least and at most; equal if somebody knows."""
    size = memory.gpu_bytes / GIB
    read, flops = sum(reads) / 2, options.gpu_tflops
    how_read, how_flops = "given" if reads[0] == reads[1] else "assumed", "given" if flops else "assumed"
    if size > LARGE_CARD and reads[0] != reads[1]:
        read, how_read = H200_READ, "measured on an H200"
    if flops is None and size > LARGE_CARD:
        flops, how_flops = H200_FLOPS / 1e12, "measured on an H200"
    flops = flops or next(tflops for most, tflops in TFLOPS if size <= most)
    _check_positive("gpu_tflops", flops)
    link, said_link = _find_link("link", options.link, INSIDE, options.link_gbs, options.link_us)
    network, said_network = _find_link("network", options.network, NETWORKS, options.network_gbs, options.network_us)
    said = (
        f"a GPU reads {read / 1e9:,.0f} GB/s ({how_read}) and computes {flops:.4g} TFLOP/s ({how_flops})",
        f"between GPUs of a host {said_link}",
        f"between hosts {said_network}",
    )
    return Machine(read, flops * 1e12, link, network), said[: 3 if options.hosts > 1 or options.table else 2]


def _find_link(
    name: str, chosen: str, known: dict[str, tuple[Link, str]], gbs: float | None, us: float | None
) -> tuple[Link, str]:
    if chosen not in known:
        raise ConfigError(f"{name}={chosen!r}: must be one of {', '.join(known)}; or give {name}_gbs and {name}_us")
    link, title = known[chosen]
    for part, value in (("gbs", gbs), ("us", us)):
        if value is not None:
            _check_positive(f"{name}_{part}", value)
    link = Link(link.bytes_per_second if gbs is None else gbs * 1e9, link.latency if us is None else us / 1e6)
    given = (gbs is not None) + (us is not None)
    how = ("assumed", "given in part", "given")[given]
    title = "" if given == 2 else f"{title}, "
    return link, f"{title}{link.bytes_per_second / 1e9:.4g} GB/s and {link.latency * 1e6:.4g} us ({how})"


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < 1e6:
        raise ConfigError(f"{name}={value}: must be a positive number below 1e6")


# ---- what the user sees --------------------------------------------------------------------------------------------


def scaling_record(scaling: Scaling) -> dict[str, Any]:
    works = {
        work.name: {
            "tokens_per_second": work.tokens_per_second,
            "speedup": work.speedup,
            **dataclasses.asdict(work.cost),
        }
        for work in scaling.works
    }
    parts = {"topology": dataclasses.asdict(scaling.topology), "machine": dataclasses.asdict(scaling.machine)}
    return {**parts, "works": works, "assumptions": list(scaling.assumptions)}


def scaling_rows(scaling: Scaling, model: ModelFacts) -> list[list[str]]:
    """The first row is the heading."""
    per_token = model.config.hidden_size * model.itemsize
    times = 2 - (scaling.topology.expert_size > 1 and bool(model.num_sparse_layers))
    names = ["", "tokens a second", "speed-up", "computing ms", "talking ms"]
    names += ["MB all-reduced a layer", "MB a GPU sends"]
    names += ["of it all-to-all"] * (times == 1) + ["MB a host sends"] * (scaling.topology.num_hosts > 1)
    found = [names]
    for work in scaling.works:
        cost = work.cost
        sizes = [times * work.tokens * per_token, cost.sent_bytes]
        sizes += [cost.exchanged_bytes] * (times == 1) + [cost.network_bytes] * (scaling.topology.num_hosts > 1)
        found.append(
            [
                work.name,
                _rate(work.tokens_per_second),
                f"{work.speedup:.2f}",
                f"{cost.computing * 1e3:.2f}",
                f"{cost.talking * 1e3:.2f}",
                *(_megabytes(size) for size in sizes),
            ]
        )
    return found


def _rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.3g}" if num_bytes < 1e9 else f"{num_bytes / 1e6:,.0f}"


FitOf = Callable[[ModelFacts, Topology], "tuple[Tiers | None, DoesNotFit | None]"]


def markdown(options: PlanOptions, model: ModelFacts, machine: Machine, fit: FitOf) -> str:
    """A row for each number of GPUs on a host and of hosts. `model`: facts of the whole."""
    head = ["GPUs", "hosts", "GiB of weights a GPU", "tokens in the KV cache"]
    for name, _, _ in WORKS:
        head += [f"{name}, tok/s", "speed-up"]
    lines = [head, ["---"] * len(head)]
    for num_hosts in TABLE_HOSTS:
        for per_host in TABLE_GPUS:
            num_ranks = per_host * num_hosts
            if num_ranks % options.expert_parallel_size == 0:
                at = replace(options, tensor_parallel_size=num_ranks, hosts=num_hosts)
                lines.append(_row(at, model, machine, fit))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(options: PlanOptions, model: ModelFacts, machine: Machine, fit: FitOf) -> list[str]:
    topology = find_topology(options)
    row = [str(topology.num_ranks), str(topology.num_hosts)]
    blank = ["-"] * (2 * len(WORKS))
    try:
        check_divides(options, model.config)
    except ConfigError:
        return [*row, "does not divide", "-", *blank]
    facts = replace(model, num_ranks=topology.num_ranks, expert_size=topology.expert_size)
    row.append(f"{(facts.dense_bytes + facts.all_experts_bytes) / GIB:.1f}")
    tiers, _ = fit(facts, topology)
    if tiers is None or tiers.placement == "offload":
        return [*row, "does not fit", *blank]
    row.append(f"{tiers.kv_tokens:,}")
    for work in Scaling.of(facts, topology, machine, ()).works:
        row += [_rate(work.tokens_per_second), f"{work.speedup:.2f}"]
    return row
