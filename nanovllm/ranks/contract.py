"""Executor: what computes the plans of an engine. One contract, four ways (choose.py):

    local         the model in this process; one rank, no process group, no port
    multiprocess  one process per rank on this machine; rank 0 is the caller's own
    ray           one actor per rank, on the machines of a Ray cluster; the caller's process computes nothing
    torchrun      every rank runs the caller's whole script, started by torchrun on one or more machines

The engine launches plans in order and takes their results in the same order; `overlap` is the number of plans that may
be launched before the first result is taken. Tensors pass between the ranks (NCCL, gloo); plans go to them as bytes
(wire.py).

Faults. One rank (but for ray): a step that raises fails alone, unless the GPU is lost with it. Several: two ranks of
which one has missed a step wait in different collectives for ever, so a step in which any rank fails ends the engine.
`launch` and `result` then raise EngineDeadError with the rank and the cause, at most `worker_timeout` and 2 s after it
hung, and every later call raises it again. `check`, called again and again, finds a rank that died or hung while there
was nothing to compute. After `close` nothing is left: no process, no port, no memory; a new engine can be made at once.
"""

from __future__ import annotations

from typing import Any, Protocol

from nanovllm.hardware.device import Device
from nanovllm.moe.offload.cache import ExpertStats
from nanovllm.runner.kv_cache import CacheLayout
from nanovllm.runner.model_runner import InFlight
from nanovllm.runner.probe import Probe
from nanovllm.scheduling.plan import StepPlan


class Executor(Protocol):
    device: Device

    @property
    def layout(self) -> CacheLayout: ...

    @property
    def overlap(self) -> int: ...

    @property
    def decode_steps(self) -> int:
        """Decode steps per launch when EngineConfig.decode_steps is None."""
        ...

    @property
    def num_drafts(self) -> int:
        """Most tokens that may be guessed for a sequence in one step; 0: none (StepPlan.num_drafts)."""
        ...

    def launch(self, plan: StepPlan) -> InFlight: ...

    def reset(self) -> None:
        """Forget every sequence: a step was interrupted, and what it changed may be half done. The next plan has all
        sequences among its departures, for ranks that were not interrupted."""
        ...

    def check(self) -> None:
        """Raises EngineDeadError if nothing can be computed any more. Called between two steps; does not wait: it sends
        each rank a message, whose answer must be there when `check` is called `worker_timeout` later."""
        ...

    def expert_stats(self) -> ExpertStats | None: ...

    def expert_load(self) -> list[list[int]] | None:
        """Tokens that chose each expert, by sparse layer; None if the model has no experts.
        Counting begins with the first call and ends some minutes after the last (moe/load.py)."""
        ...

    def describe(self) -> dict[str, Any]: ...

    def probe(self) -> Probe:
        """For benchmarks: of the part of the model that is in this process."""
        ...

    def close(self) -> None:
        """Calling it twice is fine."""
        ...
