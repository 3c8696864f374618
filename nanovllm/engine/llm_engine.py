"""LLMEngine: add requests, step, collect what is new. LLM, AsyncLLMEngine and the CLI all drive this.

    engine = LLMEngine(EngineConfig(model="smollm2"))
    engine.add_request("0", "What is the capital of France?", SamplingParams(max_tokens=32))
    while engine.has_unfinished_requests():
        for delta in engine.step():
            print(delta.outputs[0].text, end="")

One thread drives one engine. Two engines in one process share nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.engine import defaults
from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.generation_config import read_sampling_defaults
from nanovllm.engine.info import describe
from nanovllm.engine.inputs import EngineInput, InputProcessor, Prompt
from nanovllm.engine.request import Completion, Request
from nanovllm.errors import EngineDeadError, RequestError
from nanovllm.hardware.device import is_out_of_memory
from nanovllm.memory.budget import refuse_without_experts
from nanovllm.model_config import ModelConfig
from nanovllm.outputs import RequestDelta, RequestMetrics, gather
from nanovllm.ranks.choose import choose_executor
from nanovllm.runner.limits import StepLimits
from nanovllm.runner.model_runner import InFlight
from nanovllm.sampling.structured import Grammars
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.block_manager import BlockManager
from nanovllm.scheduling.plan import StepPlan, StepResult
from nanovllm.scheduling.policy import make_policy
from nanovllm.scheduling.scheduler import Scheduler, SchedulerLimits
from nanovllm.scheduling.sequence import Sequence, StopRule
from nanovllm.telemetry.feed import Watcher
from nanovllm.telemetry.stats import StepStats
from nanovllm.weights.checkpoint import open_checkpoint
from nanovllm.weights.resolve import resolve_model

logger = logging.getLogger("nanovllm")


class LLMEngine:
    def __init__(self, config: EngineConfig) -> None:
        defaults.refuse_fork()
        self.config = config
        checkpoint = open_checkpoint(resolve_model(config.model))
        try:
            self.model_config = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config)
            self.sampling_defaults = read_sampling_defaults(config.generation_config, checkpoint.path)
            refuse_without_experts(self.model_config, config.expert_placement, config.expert_cache_gb)
            self.max_model_len = defaults.resolve_max_model_len(config, self.model_config)
            self.tokenizer = None if config.skip_tokenizer_init else defaults.load_tokenizer(config, checkpoint)
            make_executor, device = choose_executor(config)
            block_size = defaults.resolve_block_size(config, device)
            max_tokens = config.max_num_batched_tokens or defaults.batched_tokens(config, self.model_config, device)
            limits = StepLimits(self.max_model_len, max_tokens, block_size)
            self.executor = make_executor(config, self.model_config, checkpoint, device, limits)
        finally:
            checkpoint.close()
        defaults.warn_of_small_cache(config, self.max_model_len, self.executor.layout, device)
        steps = config.decode_steps or self.executor.decode_steps, self.executor.num_drafts
        self.scheduler = Scheduler(
            SchedulerLimits(config.max_num_seqs, max_tokens, self.max_model_len, *steps),
            BlockManager(self.executor.layout.num_blocks, block_size, config.enable_prefix_caching),
            make_policy(config.scheduling_policy, config.max_wait_steps),
            text_stop=lambda seq: self._by_seq[seq.seq_id][1].find_stop(),
        )
        vocab_size, eos = self.model_config.vocab_size, self.model_config.eos_token_ids
        special = config.special_tokens_in_text
        self.inputs = InputProcessor(self.tokenizer, vocab_size, self.max_model_len, special, eos)
        self.grammars = Grammars(self.tokenizer, vocab_size, eos)
        self.stats = StepStats()
        self.expert_stats = self.executor.expert_stats()  # as of the last begin or end of a request; for any thread
        self.watch = Watcher(self.scheduler, lambda seq_id: self._by_seq[seq_id][0].request_id)
        self._requests: dict[str, Request] = {}
        self._by_seq: dict[int, tuple[Request, Completion]] = {}
        self._flights: deque[tuple[StepPlan, InFlight, float]] = deque()  # (plan, its computation, when it began)
        self._moved: list[Sequence] = []  # since the last report
        self._made: dict[str, RequestDelta] = {}  # by the step that runs
        self.unread: dict[str, RequestDelta] = {}  # of an interrupted step, or put back: the next step returns them
        self._changing = False  # stays True if an exception interrupts a change
        self._last_landing, self._num_grammars = 0.0, 0  # the latter: running requests that have one
        self._seq_ids, self._request_count = itertools.count(), itertools.count()
        self._closed, self._process = False, os.getpid()

    # ---- requests ----------------------------------------------------------------------------------------------

    def check(self, prompt: Prompt, params: SamplingParams, priority: int = 0) -> EngineInput:
        """Refuses bad input before any state changes. Raises RequestError."""
        if self._closed:
            raise EngineDeadError("this engine was closed: create a new one")
        defaults.refuse_fork(self._process)
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params={params!r}: must be a SamplingParams")
        parsed = prompt if isinstance(prompt, EngineInput) else self.inputs.parse(prompt)
        self.scheduler.check_fits(len(parsed.token_ids))
        self.inputs.check_params(params)
        self.inputs.check_priority(priority, self.scheduler.policy.name)
        return parsed

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | EngineInput,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        final_only: bool = False,
    ) -> None:
        params = SamplingParams(**self.sampling_defaults.values) if params is None else params
        parsed = self.check(prompt, params, priority)  # type: ignore[arg-type]
        params = self.grammars.compiled(params)
        if not isinstance(request_id, str):
            raise RequestError(f"request_id={request_id!r}: must be a string")
        if request_id in self._requests:
            raise RequestError(f"request_id={request_id!r} is already running: ids must be unique")
        bad_words = self.inputs.bad_words_ids(params.bad_words or ())  # type: ignore[arg-type]
        request = Request(request_id, parsed, params, self.tokenizer, final_only, RequestMetrics(time.monotonic()))
        request.experts_before = self.expert_stats = self.executor.expert_stats()
        number = next(self._request_count)
        with self._change():
            self._requests[request_id] = request
            self._num_grammars += params.structured_outputs is not None
            for index in range(params.n):
                seq = self._sequence(parsed, params, defaults.derive_seed(self.config.seed, number, params.seed, index))
                seq.priority, seq.bad_words_ids = priority, bad_words
                decode = self.tokenizer is not None and params.detokenize
                detokenizer = Detokenizer(self.tokenizer, parsed.token_ids, params) if decode else None
                completion = Completion(index, seq, detokenizer)
                request.completions.append(completion)
                self._by_seq[seq.seq_id] = (request, completion)
                self.scheduler.add(seq)
                self.watch.added(seq, request_id)

    def _sequence(self, parsed: EngineInput, params: SamplingParams, seed: int) -> Sequence:
        room = self.max_model_len - len(parsed.token_ids)
        eos = () if params.ignore_eos else self.model_config.eos_token_ids
        ends = (frozenset(eos), frozenset(params.stop_token_ids or ()))
        return Sequence(
            seq_id=next(self._seq_ids),
            token_ids=list(parsed.token_ids),
            num_prompt=len(parsed.token_ids),
            stop=StopRule(min(params.max_tokens or room, room), params.min_tokens, *ends),
            params=params,
            seed=seed,
            cache_salt=parsed.cache_salt,
            reads_prefix_cache=params.prompt_logprobs is None,
        )

    def abort_request(self, request_id: str) -> RequestDelta | None:
        """End a request now; its blocks are free for others at once. None if it is not running."""
        with self._change():
            late, request = self.unread.pop(request_id, None), self._requests.get(request_id)
            if request is None:
                return late
            for completion in request.completions:
                self.scheduler.abort(completion.seq.seq_id)
            self.watch.left([completion.seq for completion in request.completions])
            self._drop(request)
        return request.delta() if late is None else late.merge(request.delta())

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing is forgotten, while requests run."""
        if self._closed or self._requests:
            return False
        with self._change():
            while self._flights:  # planned before the tokens were known that ended their requests
                self._land()
            self.scheduler.blocks.clear()
            self.watch.forgot_prefixes()
        return True

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests or self.unread)

    # ---- interrupts --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """Around every change of state. Ctrl-C raises between any two instructions, so an exception inside this block
        may leave counters, blocks and tables that contradict each other: all of them are emptied, now or, if a second
        interrupt prevents that, before the next change."""
        self._empty_if_torn()
        self._made, self._changing = {}, True
        try:
            yield
        except EngineDeadError:  # nothing can be computed any more, so there is nothing to save
            self._changing = False
            raise
        except BaseException as error:
            self._empty_if_torn(error)
            raise
        self._changing = False

    def _empty_if_torn(self, error: BaseException | None = None) -> None:
        """Every running request ends with an error; the next step returns that and what the interrupted one made."""
        if not self._changing or self._closed:
            return
        self.executor.reset()
        self.scheduler.clear()
        self._flights.clear()
        # Without a request whose add_request was interrupted: that call raised.
        self._requests = {key: r for key, r in self._requests.items() if len(r.completions) == r.params.n}
        for request_id in self._requests.keys() & self._made.keys():
            self._requests[request_id].mark_reported(self._made[request_id])
        self.unread, self._made = {**self.unread, **self._made}, {}
        pairs = [(request, completion) for request in self._requests.values() for completion in request.completions]
        self._by_seq = {completion.seq.seq_id: (request, completion) for request, completion in pairs}
        self._moved = [completion.seq for _, completion in pairs]
        for seq in self._moved:
            if not seq.finished:
                seq.end("error", "the engine was interrupted" if error is None else f"{type(error).__name__}: {error}")
        self._num_grammars = sum(request.params.structured_outputs is not None for request in self._requests.values())
        self.watch.failed(self.scheduler.step, "interrupted")
        self._changing = False

    # ---- one step ----------------------------------------------------------------------------------------------

    def step(self, alone: bool = False) -> list[RequestDelta]:
        """Compute one step. Returns what is new of the requests that moved (those added with final_only: that ended).
        alone: finish a step in flight or, if there is none, plan one and finish it; start no other."""
        if self._closed:
            raise EngineDeadError("this engine was closed: create a new one")
        with self._change():
            self._made, self.unread = self.unread, {}
            while len(self._flights) < self._depth(alone) and self._launch_next():
                pass
            if self._flights:
                self._land()
            moved, self._moved = self._moved, []
            self._report([self._by_seq[seq.seq_id][0] for seq in moved if seq.seq_id in self._by_seq])
            return list(self._made.values())

    def begin(self) -> None:
        """Start a step of the requests that are here, unless one that is added later may have to go first."""
        if self.scheduler.policy.name == "fcfs" and max(1, len(self._flights)) < self._depth(alone=False):
            with self._change():
                self._launch_next()

    def _depth(self, alone: bool) -> int:
        """How many plans are in flight: one if each needs the tokens of the one before, with a grammar or guesses."""
        waits = self.scheduler.drafts.need_tokens(self.scheduler.running, [flight[0] for flight in self._flights])
        return 1 if alone or self._num_grammars or waits else self.executor.overlap

    def _launch_next(self) -> bool:
        """Plan a step and start it; False if there is nothing to compute (yet)."""
        plan = self.scheduler.schedule()
        ended = self.scheduler.take_ended()
        self._moved += ended
        self.watch.planned(plan, ended)
        if not plan.entries:
            return False
        now = time.monotonic()
        for arrival in plan.arrivals:
            self._by_seq[arrival.seq_id][0].metrics.scheduled(now)
        self.stats.observe(self.scheduler)
        try:
            self._flights.append((plan, self.executor.launch(plan), now))
        except Exception as error:
            self._fail(plan, error)
        return True

    def _land(self) -> None:
        """Wait for the oldest step in flight and record its result."""
        plan, in_flight, started = self._flights.popleft()
        try:
            result = in_flight.result()
        except Exception as error:
            self._fail(plan, error)
        else:
            self._record(plan, result, max(started, self._last_landing))

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        self._flights = deque(flight for flight in self._flights if flight[0].step_id < plan.step_id)
        self._moved += self.scheduler.fail(plan, f"{type(error).__name__}: {error}", self._culprit(plan, error))
        self.watch.failed(plan.step_id, type(error).__name__)
        if isinstance(error, EngineDeadError):
            raise error
        logger.error("step %d failed: %s", plan.step_id, type(error).__name__, exc_info=error)

    def _culprit(self, plan: StepPlan, error: Exception) -> int | None:
        """Out of memory: the sequence with the most new tokens, of equals the latest, ends; the others start over. This
        terminates, since each time one sequence fewer is left. After other errors the whole step ends (None)."""
        if isinstance(error, EngineDeadError) or not is_out_of_memory(error):
            return None
        self.executor.device.release_cached()
        return max(plan.entries, key=lambda entry: (entry.num_new, entry.seq_id)).seq_id

    def _record(self, plan: StepPlan, result: StepResult, started: float) -> None:
        for entry in plan.entries:
            if entry.seq_id in result.prompt_logprobs and entry.seq_id in self._by_seq:
                request, completion = self._by_seq[entry.seq_id]
                if completion is request.completions[0]:
                    request.add_prompt_logprobs(entry.start, result.prompt_logprobs[entry.seq_id])
        now = self._last_landing = time.monotonic()
        progress = self.scheduler.commit(plan, result, now)
        for moved in progress:
            request, completion = self._by_seq[moved.seq.seq_id]
            request.metrics.first_token_time = request.metrics.first_token_time or now
            request.metrics.add_drafts(*moved.drafts[:2])
            if moved.logprobs:
                request.add_logprobs(completion, moved.logprobs)
        self.stats.count(plan, progress, now - started)
        self.watch.committed(plan, progress, now - started)
        self._moved += [moved.seq for moved in progress]

    def _report(self, moved: list[Request]) -> None:
        for request_id, request in {request.request_id: request for request in moved}.items():
            if request.finished:
                request.metrics.finished_time = time.monotonic()
                self.expert_stats = self.executor.expert_stats()
                request.note_experts(self.expert_stats)
            elif request.final_only:
                continue
            gather(self._made, request_id, request.delta())
            request.mark_reported(self._made[request_id])
            if self._made[request_id].finished:
                self._drop(request)

    def _drop(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._num_grammars -= request.params.structured_outputs is not None
        for completion in request.completions:
            del self._by_seq[completion.seq.seq_id]

    def describe(self) -> dict[str, Any]:
        """What runs: device, dtype, attention backend and the reason for it, cache size."""
        return describe(self)

    def close(self) -> None:
        """Free the model and the cache. Calling it twice is fine."""
        if self._closed:
            return
        self._closed = True
        self.watch.close()
        for table in (self._requests, self._by_seq, self.unread):
            table.clear()
        self.executor.close()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
