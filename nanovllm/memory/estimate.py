"""Estimate: what of a model goes where on given cards, how long a context fits, how fast it can be at most.

    estimate = Estimate.of(options, ModelFacts(model_config), Hardware.find(options), check_sizes)
    estimate.tiers         # None if the model cannot run there, for the reason estimate.refusal
    estimate.settings      # options of the engine
    estimate.on(Topology(8, 2))    # the same model on another number of the same cards

From config.json alone: no weights, no GPU. No torch here, and nothing is printed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.memory.budget import DoesNotFit, Memory, Tiers, Wants
from nanovllm.memory.choice import choose
from nanovllm.memory.facts import ModelFacts
from nanovllm.memory.machines import Hardware
from nanovllm.memory.options import PlanOptions
from nanovllm.memory.scaling import Scaling, Topology
from nanovllm.memory.speed import SpeedEstimate, predict
from nanovllm.model_config import ModelConfig

TABLE_GPUS, TABLE_HOSTS = (1, 2, 4, 8), (1, 2, 4)
CheckSizes = Callable[[EngineConfig, ModelConfig], None]  # refuses a number of ranks that the model does not divide by


@dataclass(frozen=True)
class Estimate:
    options: PlanOptions
    model: ModelFacts  # of one rank, as are memory, wants and tiers
    hardware: Hardware
    topology: Topology
    wants: Wants
    tiers: Tiers | None  # None: cannot run
    refusal: DoesNotFit | None
    check_sizes: CheckSizes

    @classmethod
    def of(cls, options: PlanOptions, model: ModelFacts, hardware: Hardware, check_sizes: CheckSizes) -> Estimate:
        """Raises ConfigError for GPUs that do not divide; cards that are too small are in the estimate."""
        topology = find_topology(options)
        if topology.num_ranks > 1 or topology.expert_size > 1:
            check_sizes(options.engine_config(), model.config)
        return cls._fit(options, model, hardware, topology, check_sizes)

    @classmethod
    def _fit(
        cls, options: PlanOptions, model: ModelFacts, hardware: Hardware, topology: Topology, check_sizes: CheckSizes
    ) -> Estimate:
        redundant = options.num_redundant_experts if options.enable_eplb else None
        num_ranks, expert_size = topology.num_ranks, topology.expert_size
        model = replace(model, num_ranks=num_ranks, expert_size=expert_size, num_redundant=redundant)
        wants, tiers, refusal = choose(hardware.memory.shared(topology.per_host), model, options)
        return cls(options, model, hardware, topology, wants, tiers, refusal, check_sizes)

    def divides(self, topology: Topology) -> bool:
        try:
            self.check_sizes(self._options_on(topology).engine_config(), self.model.config)
        except ConfigError:
            return False
        return True

    def on(self, topology: Topology) -> Estimate:
        """The model must divide by it."""
        return self._fit(self._options_on(topology), self.model, self.hardware, topology, self.check_sizes)

    def _options_on(self, topology: Topology) -> PlanOptions:
        options = self.options
        if topology.expert_size == 1:  # nothing moves where every rank has a share of each expert
            options = replace(options, enable_eplb=False, num_redundant_experts=0)
        return replace(
            options,
            tensor_parallel_size=topology.num_ranks,
            expert_parallel_size=topology.expert_size,
            hosts=topology.num_hosts,
        )

    @property
    def memory(self) -> Memory:
        return self.hardware.memory.shared(self.topology.per_host)

    @cached_property
    def scaling(self) -> Scaling:
        return Scaling.of(self.model, self.topology, self.hardware.machine)

    @property
    def scaling_notes(self) -> tuple[str, ...]:
        """Which of the figures behind `scaling` are measured; of the network only where it counts."""
        return self.hardware.machine_notes[: 3 if self.topology.num_hosts > 1 or self.options.table else 2]

    def speeds(self, batch: int) -> tuple[SpeedEstimate, SpeedEstimate]:
        """Of one GPU: (even routing, slow links, copying and computing in turns; skewed routing, fast links,
        overlapped)"""
        assert self.tiers is not None
        slow, fast = self.hardware.links
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
        ranks = ("tensor_parallel_size", "expert_parallel_size", "enable_eplb", "num_redundant_experts")
        for name in ("dtype", "kv_cache_dtype", *ranks):
            if getattr(options, name) != getattr(PlanOptions, name):
                chosen[name] = getattr(options, name)
        if options.hosts > 1:
            chosen["distributed_executor_backend"] = "ray"
        if self.tiers is not None and self.model.num_experts:
            chosen["expert_placement"] = self.tiers.placement
            for name in ("expert_cache_gb", "expert_host_gb"):
                if self.tiers.placement == "offload" and getattr(options, name) is not None:
                    chosen[name] = getattr(options, name)
        return chosen

    def fewest_gpus(self) -> Topology | None:
        """On one host, for a model that does not fit: on how many such cards it runs. Spread experts stay spread: over
        as many groups as before, or over all ranks."""
        groups = self.options.expert_parallel_size
        more = [num_ranks for num_ranks in (2, 4, 8, 16) if num_ranks > self.model.num_ranks]
        for num_ranks, size in ((n, size) for n in more for size in dict.fromkeys((groups, n if groups > 1 else 1))):
            topology = Topology(num_ranks, 1, size)
            if num_ranks % size:
                continue
            with contextlib.suppress(ConfigError):  # expert_cache_gb that the parts of so many ranks have no room for
                if self.divides(topology) and self.on(topology).tiers is not None:
                    return topology
        return None

    def grid(self) -> Iterator[tuple[Topology, Estimate | None]]:
        """The same model and cards in every number of `--table`; None where a size does not divide."""
        for num_hosts in TABLE_HOSTS:
            for per_host in TABLE_GPUS:
                topology = Topology(per_host * num_hosts, num_hosts, self.options.expert_parallel_size)
                if topology.num_ranks % topology.expert_size == 0:
                    yield topology, self.on(topology) if self.divides(topology) else None


def find_topology(options: PlanOptions) -> Topology:
    ranks, hosts = options.tensor_parallel_size, options.hosts
    if not 1 <= hosts <= 1024 or ranks % hosts:
        good = [n for n in range(1, ranks + 1) if ranks % n == 0]
        raise ConfigError(
            f"hosts={hosts}: tensor_parallel_size={ranks} counts the GPUs of all hosts together, as many on each; "
            f"possible: {good}"
        )
    return Topology(ranks, hosts, options.expert_parallel_size)
