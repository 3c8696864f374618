"""RayExecutor: one actor per rank on the machines of a Ray cluster, for models that outgrow one machine.

The cluster is the one that this process has joined (`ray.init`), or else the one of RAY_ADDRESS, or else one of this
machine alone that is started here and stopped by `close`. A placement group keeps the ranks on as few machines as it
can; neighbours in rank are on one machine. The caller's process computes nothing: plans go out as bytes in actor calls,
results come back from rank 0 (both through Ray's own channel). The ranks find each other in a store on rank 0's
machine, on a free port, of the loopback interface if all ranks are on that machine.

    actor   place -> where it is      open_store -> port      start -> facts      launch(plan)...  result...  ping
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError, EngineDeadError
from nanovllm.hardware.device import Device
from nanovllm.hardware.parallel import LOOPBACK, connect, limit_waiting, open_store
from nanovllm.model_config import ModelConfig
from nanovllm.moe.offload.cache import ExpertStats
from nanovllm.ranks.faults import FAILED, GRACE_SECONDS, LOST, STARTUP_SECONDS, Report, collect_reports, name_cause
from nanovllm.ranks.local import ALONE
from nanovllm.ranks.several import check_sizes, options_for
from nanovllm.ranks.wire import encode_plan
from nanovllm.ranks.worker import Follower, open_executor
from nanovllm.runner.kv_cache import CacheLayout
from nanovllm.runner.limits import StepLimits
from nanovllm.runner.model_runner import InFlight
from nanovllm.runner.probe import Probe
from nanovllm.scheduling.plan import StepPlan, StepResult
from nanovllm.weights.checkpoint import Checkpoint

RESERVE_SECONDS = 120.0  # for the cluster to find room
DEATH_SECONDS = 5.0  # for Ray to notice that a process is gone
T = TypeVar("T")


def import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError("distributed_executor_backend='ray' needs Ray: pip install 'nano-vllm[ray]'") from None
    return ray


def join_ray(ray: Any, **own: Any) -> None:
    """The Ray of RAY_ADDRESS, or a new one with these options that no other machine can reach."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # read by the processes that Ray starts
    if address := os.environ.get("RAY_ADDRESS"):
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
        return
    from ray._private import ray_constants

    # A Ray runs the code that any connection sends. On Linux it listens on all interfaces, and replaces an address
    # given as loopback by the machine's outer one, unless this switch (meant for other systems) is off.
    kept, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        ray.init(
            address="local", include_dashboard=False, _node_ip_address=LOOPBACK, logging_level=logging.WARNING, **own
        )
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = kept


@dataclass(frozen=True)
class Facts:
    """Properties of rank 0's executor that the engine reads."""

    layout: CacheLayout
    overlap: int
    decode_steps: int
    num_drafts: int
    has_offload: bool
    described: dict[str, Any]


class RayRank:
    """The actor. It returns its faults as Reports: Ray would wrap an exception in its own."""

    def __init__(self) -> None:
        self._store: Any = None
        self._rank = 0
        self._follower: Follower  # made by start
        self._fault: Report | None = None  # the first one; later ones follow from it

    def place(self) -> tuple[str, str, int]:
        """(machine, address, process)"""
        ray = import_ray()
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid()

    def open_store(self, size: int, host: str) -> int:
        self._store = open_store(0, size, is_master=True, timeout=STARTUP_SECONDS, host=host)
        return int(self._store.port)

    def start(self, options: dict[str, Any]) -> Facts | Report:
        rank, size, host, port = (options[name] for name in ("rank", "size", "host", "port"))
        self._rank = rank
        try:
            device = Device.choose(options["config"]["device"])  # Ray shows an actor its own GPU only
            parallel = ALONE
            if size > 1:
                store = self._store or open_store(port, size, is_master=False, timeout=STARTUP_SECONDS, host=host)
                where = (options["address"], options["config"]["enable_eplb"])
                parallel = connect(store, rank, size, device.torch_device, STARTUP_SECONDS, *where)
            executor = open_executor(options["config"], options["limits"], device, parallel)
            parallel.gather_numbers(0)  # all are ready
            limit_waiting(parallel, options["config"]["worker_timeout"])
        except Exception as error:
            return Report.of(rank, error)
        self._follower = Follower(executor, options["config"])
        return Facts(
            executor.layout,
            executor.overlap,
            executor.decode_steps,
            executor.num_drafts,
            executor.expert_stats() is not None,
            executor.describe(),
        )

    def launch(self, data: bytes) -> Report | None:
        return self._try(lambda: self._follower.launch(data))

    def result(self) -> StepResult | Report:
        return self._try(self._follower.result)

    def _try(self, function: Callable[[], T]) -> T | Report:
        if self._fault is None:
            try:
                return function()
            except Exception as error:
                self._fault = Report.of(self._rank, error)
        return self._fault

    def ping(self) -> Report | None:
        """Returns after all calls before it."""
        return self._fault

    def expert_stats(self) -> ExpertStats | None:
        return self._follower.executor.expert_stats()

    def expert_load(self) -> list[list[int]] | None:
        return self._follower.executor.expert_load()


class RayExecutor:
    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        checkpoint: Checkpoint,
        device: Device,
        limits: StepLimits,
    ) -> None:
        self._ray = import_ray()
        self.device = device
        self._size, self._timeout = config.tensor_parallel_size, config.worker_timeout
        self._has_experts = model_config.moe is not None
        check_sizes(config, model_config)
        self._dead: str | None = None
        self._actors: list[Any] = []
        self._places: list[tuple[str, str, int]] = []
        self._calls: list[Any] = []  # the last one of each rank
        self._called = time.monotonic()  # when these calls were made
        self._num_uncollected = 0  # plans whose result was not fetched yet
        self._group: Any = None
        self._owns_cluster = not self._ray.is_initialized()
        try:
            if self._owns_cluster:
                least = 80 * 2**20  # what Ray accepts: nothing large is kept there
                cores = max(self._size, os.cpu_count() or 1)
                join_ray(self._ray, num_cpus=cores, object_store_memory=least, log_to_driver=False)
            self._reserve(config.device)
            self._facts = facts = self._start({**options_for(config, limits), "size": self._size})
            self.layout, self.overlap = facts.layout, facts.overlap
            self.decode_steps, self.num_drafts = facts.decode_steps, facts.num_drafts
        except BaseException as error:
            self._dead = str(error)
            self.close()
            raise

    def _reserve(self, wanted: str) -> None:
        ray = self._ray
        gpus, here = ray.cluster_resources().get("GPU", 0), self.device.is_gpu
        if gpus and not here and wanted == "auto":
            raise ConfigError(
                f"device='auto': the Ray cluster has {gpus:.0f} GPUs, this machine none, and sizes are chosen here: "
                f"start the engine on a machine like those of the ranks, or set device='cpu'"
            )
        if here and gpus < self._size:
            raise ConfigError(f"tensor_parallel_size={self._size}: the Ray cluster has {gpus:.0f} GPUs; use fewer")
        bundle = {"CPU": 1, "GPU": 1} if here else {"CPU": 1}
        self._group = ray.util.placement_group([bundle] * self._size, strategy="PACK")
        if not self._group.wait(RESERVE_SECONDS):
            raise ConfigError(
                f"tensor_parallel_size={self._size}: the Ray cluster had no room for {self._size} times {bundle} for "
                f"{RESERVE_SECONDS:.0f} s; free now: {ray.available_resources()}"
            )
        self._place_actors()

    def _place_actors(self) -> None:
        ray = self._ray
        here_path = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [here_path, os.environ.get("PYTHONPATH", "")]))
        make = ray.remote(RayRank)
        actors = []
        for index in range(self._size):
            where = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=index
            )
            actors.append(
                make.options(
                    num_cpus=1,
                    num_gpus=int(self.device.is_gpu),
                    max_restarts=0,
                    max_task_retries=0,
                    scheduling_strategy=where,
                    runtime_env={"env_vars": {"PYTHONPATH": path}},
                ).remote()
            )
        self._actors = actors
        places = ray.get([actor.place.remote() for actor in actors], timeout=STARTUP_SECONDS)
        machines = [place[0] for place in places]
        order = sorted(range(self._size), key=lambda i: machines.index(machines[i]))
        self._actors, self._places = [actors[i] for i in order], [places[i] for i in order]

    def _start(self, options: dict[str, Any]) -> Facts:
        ray = self._ray
        spread = len({machine for machine, _, _ in self._places}) > 1
        host = self._places[0][1] if spread else LOOPBACK
        port = ray.get(self._actors[0].open_store.remote(self._size, host)) if self._size > 1 else 0
        if os.path.exists(options["config"]["model"]):
            options["config"]["model"] = os.path.abspath(options["config"]["model"])
        self._calls = [
            actor.start.remote(
                {**options, "rank": rank, "host": host, "port": port, "address": place[1] if spread else LOOPBACK}
            )
            for rank, (actor, place) in enumerate(zip(self._actors, self._places))
        ]
        facts, deadline = list(self._calls), time.monotonic() + STARTUP_SECONDS
        while facts:
            done, facts = ray.wait(facts, timeout=1.0)
            if self._reports() or (not done and time.monotonic() > deadline):
                raise EngineDeadError(f"starting {self._size} ranks failed: {self._cause()}")
        found: Facts = ray.get(self._calls[0])
        return found

    # ---- the contract ------------------------------------------------------------------------------------------

    def probe(self) -> Probe:
        return Probe(self.device, self.layout)

    def describe(self) -> dict[str, Any]:
        return {**self._facts.described, "hosts": sorted({address for _, address, _ in self._places})}

    def expert_stats(self) -> ExpertStats | None:
        found: ExpertStats | None = self._read("expert_stats") if self._facts.has_offload else None
        return found

    def expert_load(self) -> list[list[int]] | None:
        found: list[list[int]] | None = self._read("expert_load") if self._has_experts else None
        return found

    def _read(self, method: str) -> Any:
        """Of rank 0; None if it is lost."""
        if self._dead is not None:
            return None
        with self._ending_on_interrupt():
            self._keep_calls([getattr(self._actors[0], method).remote(), *self._calls[1:]])
            with contextlib.suppress(self._ray.exceptions.RayError):
                return self._ray.get(self._calls[0], timeout=self._timeout)
            self._end(self._cause())  # the next launch raises
        return None

    def launch(self, plan: StepPlan) -> InFlight:
        self._raise_if_dead(any(report.kind == FAILED for report in self._reports()))
        with self._ending_on_interrupt():
            data = encode_plan(plan)
            self._keep_calls([actor.launch.remote(data) for actor in self._actors])
            self._num_uncollected += 1
        return InFlight(self._collect)

    def check(self) -> None:
        done = all(map(self._is_done, range(len(self._calls))))
        self._raise_if_dead(bool(self._reports()) or (not done and time.monotonic() - self._called > self._timeout))
        if done:
            self._keep_calls([actor.ping.remote() for actor in self._actors])

    def _keep_calls(self, calls: list[Any]) -> None:
        self._calls, self._called = calls, time.monotonic()

    def _raise_if_dead(self, has_died: bool) -> None:
        if self._dead is None and has_died:
            self._end(self._cause())
        if self._dead is not None:
            raise EngineDeadError(f"{self._dead}; create a new engine")

    def reset(self) -> None:
        while self._num_uncollected and self._dead is None:  # else the next step would get the result of these
            self._collect()

    def _collect(self) -> StepResult:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        ray = self._ray
        with self._ending_on_interrupt():
            self._keep_calls([self._actors[0].result.remote(), *self._calls[1:]])
            with contextlib.suppress(ray.exceptions.RayError):
                found = ray.get(self._calls[0], timeout=self._timeout)
                if isinstance(found, StepResult):
                    self._num_uncollected -= 1
                    return found
            self._end(self._cause())
        raise EngineDeadError(str(self._dead))

    @contextlib.contextmanager
    def _ending_on_interrupt(self) -> Iterator[None]:
        """Ctrl-C leaves the ranks with a step whose result was not taken: they are ended."""
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            self._end(f"interrupted: {type(error).__name__}")
            raise

    # ---- faults ------------------------------------------------------------------------------------------------

    def _reports(self) -> list[Report]:
        """The faults that the ranks' last calls have returned or raised so far. Never waits."""
        ray, found = self._ray, []
        done, _ = ray.wait(self._calls, num_returns=len(self._calls), timeout=0) if self._calls else ([], [])
        for rank, call in enumerate(self._calls):
            if call in done:
                try:
                    answer = ray.get(call)
                except ray.exceptions.RayError as error:
                    text = " ".join(str(error).strip().splitlines())
                    answer = Report(rank, FAILED, f"its process is gone: {text[:500]}")
                if isinstance(answer, Report):
                    found.append(answer)
        return found

    def _cause(self) -> str:
        # A rank that hangs must be reported within worker_timeout; Ray reports a killed process only after a while.
        left = self._called + self._timeout - time.monotonic()
        reports = collect_reports(self._reports, self._size, GRACE_SECONDS + min(DEATH_SECONDS, max(0.0, left)))
        well = {rank for rank in range(self._size) if self._is_done(rank)} - {report.rank for report in reports}
        reports += [Report(rank, LOST, "it had finished the step") for rank in well]
        return name_cause(reports, self._size, self._timeout)

    def _is_done(self, rank: int) -> bool:
        return bool(self._ray.wait([self._calls[rank]], timeout=0)[0])

    def _end(self, cause: str) -> None:
        self._dead = cause
        self._kill()

    def _kill(self) -> None:
        ray, here = self._ray, None
        with contextlib.suppress(Exception):
            here = ray.get_runtime_context().get_node_id()
        for actor, (machine, _, process) in zip(self._actors, self._places or [("", "", 0)] * len(self._actors)):
            with contextlib.suppress(Exception):
                ray.kill(actor)
            if process and machine == here:  # a stopped process does not act on Ray's signal
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
        self._actors, self._calls = [], []
        if self._group is not None:
            with contextlib.suppress(Exception):
                ray.util.remove_placement_group(self._group)
            self._group = None

    def close(self) -> None:
        self._dead = self._dead or "this engine was closed"
        if self._ray.is_initialized():
            self._kill()
            if self._owns_cluster:
                self._ray.shutdown()
        self._owns_cluster = False
