"""SeveralRanks: this process is one rank of several. What the executors of that kind share: a step in which any rank
fails ends the engine, and every later call raises EngineDeadError with the cause (contract.py)."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from nanovllm.attention.sdpa import SdpaBackend
from nanovllm.config import EngineConfig
from nanovllm.errors import EngineDeadError, NanoVLLMError
from nanovllm.hardware.device import Device
from nanovllm.hardware.parallel import Parallel, disconnect, give_up, limit_waiting
from nanovllm.layers.build import Build
from nanovllm.model_config import ModelConfig
from nanovllm.models.registry import find_family
from nanovllm.models.transformer import Parts
from nanovllm.ops.opset import PLAIN
from nanovllm.ranks.faults import Alarm, Report, collect_reports, name_cause
from nanovllm.ranks.local import ALONE, LocalExecutor
from nanovllm.runner.expert_memory import check_expert_ranks
from nanovllm.runner.limits import StepLimits
from nanovllm.runner.model_runner import InFlight
from nanovllm.scheduling.plan import StepPlan, StepResult
from nanovllm.weights.checkpoint import Checkpoint

T = TypeVar("T")


def check_sizes(config: EngineConfig, model_config: ModelConfig) -> None:
    """A model that does not divide by so many ranks is refused before any of them is started."""
    parallel = Parallel(0, config.tensor_parallel_size, expert_size=config.expert_parallel_size)
    check_expert_ranks(model_config, parallel)
    build = Build(torch.float32, torch.device("meta"), PLAIN, parallel)
    find_family(model_config)(model_config, Parts(build, SdpaBackend(), 2))


class SeveralRanks:
    _rank = 0

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        checkpoint: Checkpoint,
        device: Device,
        limits: StepLimits,
    ) -> None:
        self._config, self._device, self._limits = config, device, limits
        self._size, self._timeout = config.tensor_parallel_size, config.worker_timeout
        self._dead: str | None = None  # the cause
        self._parallel = ALONE  # as connect() made it; the model may have a copy
        self._inner: LocalExecutor | None = None
        self._alarm: Alarm | None = None
        check_sizes(config, model_config)
        try:
            self._connect()
            self._inner = LocalExecutor(config, model_config, checkpoint, device, limits, self._parallel)
            self._await_ready()
            limit_waiting(self._parallel, self._timeout)
            if device.is_gpu and self._size > 1:
                self._alarm = Alarm(self._timeout, lambda: bool(self._find_dead()), lambda: give_up(self._parallel))
        except BaseException as error:
            own = Report.of(self._rank, error)
            if isinstance(error, Exception):
                self._publish(own)
            if isinstance(error, NanoVLLMError) or not isinstance(error, Exception):  # it is the cause itself
                self._dead = own.text
                self.close()
                raise
            self._dead = self._cause(own)
            self.close()
            raise EngineDeadError(f"starting {self._size} ranks failed: {self._dead}") from error

    # ---- what differs ------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Start the other ranks, if this process does, and connect all of them: sets `_parallel`."""
        raise NotImplementedError

    def _await_ready(self) -> None:
        """Return when all ranks have built their part of the model."""
        raise NotImplementedError

    def _send_plan(self, plan: StepPlan) -> None:
        """To the other ranks, if they do not make the plan themselves."""

    def _reports(self) -> list[Report]:
        """The faults that the other ranks have reported so far. Never waits."""
        return []

    def _find_dead(self) -> list[Report]:
        """Before a step: faults of other ranks, as far as they are found without waiting."""
        return []

    def _ping(self) -> None:
        """Between two steps: request an answer from each of the other ranks, if they answer."""

    def _publish(self, report: Report) -> None:
        """Make this rank's fault readable by the other ranks, if they read it."""

    def _abandon(self) -> None:
        """The engine is dead: end what this executor started."""

    # ---- what does not -----------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Device, cache layout, selection, overlap and the like are those of the part of the model that is here."""
        inner = self.__dict__.get("_inner")
        if inner is None:
            raise AttributeError(name)
        return getattr(inner, name)

    def check(self) -> None:
        self._raise_if_dead()
        self._ping()

    def _raise_if_dead(self) -> None:
        if self._dead is None and (found := self._find_dead()):
            self._end(name_cause(found, self._size, self._timeout))
        if self._dead is not None:
            raise EngineDeadError(f"{self._dead}; create a new engine")

    def launch(self, plan: StepPlan) -> InFlight:
        self._raise_if_dead()
        assert self._inner is not None
        if self._size == 1:
            return self._inner.launch(plan)  # a step that raises fails alone
        try:
            self._send_plan(plan)
            flight = self._watch(partial(self._inner.launch, plan))
        except BaseException as error:
            raise self._died(error) from error
        return InFlight(lambda: self._wait(flight))

    def reset(self) -> None:
        if self._inner is not None and self._dead is None:
            self._inner.reset()

    def _wait(self, flight: InFlight) -> StepResult:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        try:
            return self._watch(flight.result)
        except BaseException as error:
            raise self._died(error) from error

    def _watch(self, function: Callable[[], T]) -> T:
        return function() if self._alarm is None else self._alarm.watch(function)

    def _died(self, error: BaseException) -> BaseException:
        own = Report.of(self._rank, error)
        if not isinstance(error, Exception):  # Ctrl-C must be quick: the reports of other ranks are not awaited
            self._end(f"rank {self._rank}: {own.text}")
            return error
        self._publish(own)
        self._end(self._cause(own))
        return EngineDeadError(str(self._dead))

    def _cause(self, own: Report) -> str:
        return name_cause(collect_reports(lambda: [own, *self._reports()], self._size), self._size, self._timeout)

    def _end(self, cause: str) -> None:
        self._dead = cause
        self._abandon()

    def close(self) -> None:
        self._abandon()
        if self._alarm is not None:
            self._alarm.close()
            if self._dead is not None:  # kernels that wait for ranks that are gone would make freeing memory wait, too
                with contextlib.suppress(RuntimeError):
                    give_up(self._parallel)
        if self._inner is not None:
            self._inner.close()
            disconnect(self._inner.parallel)
        disconnect(self._parallel)


def kill_at_exit(owner: object, processes: list[Any]) -> weakref.finalize[Any, Any]:
    """A script that ends without closing its engine leaves no process behind."""
    return weakref.finalize(owner, lambda: [process.kill() for process in processes if process.poll() is None])


def options_for(config: EngineConfig, limits: StepLimits) -> dict[str, Any]:
    """Config and limits as plain values, for a rank in another process."""
    return {"config": dataclasses.asdict(config), "limits": list(dataclasses.astuple(limits))}
