"""An engine with offloaded experts gives the output of the engine with resident experts, to the last bit of every
logprob: for every number of buffers, policy, tier, and whatever the scheduler does to a batch. Also what a miss costs,
metrics, the log, and that the plan is kept."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.cli.plan import PlanOptions, make_estimate
from nanovllm.config import EngineConfig
from nanovllm.hardware.device import Device
from nanovllm.hardware.host import resident_bytes
from nanovllm.memory.budget import GIB
from nanovllm.memory.facts import ModelFacts
from nanovllm.model_config import ModelConfig
from nanovllm.moe.offload.offload import OffloadOptions
from nanovllm.moe.offload.store import logger as store_logger
from nanovllm.runner import expert_memory
from nanovllm.runner.limits import StepLimits
from nanovllm.weights.checkpoint import open_checkpoint
from tests.moe.offload_rig import FixedIdle
from tests.tiny_models import TinyModel, random_prompts

Find = Callable[[str], "Facts"]
Tiny = Callable[[str], TinyModel]
Resident = Callable[..., list["Answer"]]
ROOT = Path(__file__).resolve().parents[2]
TRAINED = ROOT / "tests/fixtures/tiny-mixtral"
MIXTRAL_8X7B = ROOT / "benchmarks/models/mixtral-8x7b"  # config.json alone
DENSE_LAYER = "qwen3-moe-dense-layers"  # 3 layers, the second one dense; 6 experts, 2 of them chosen
MODELS = ("trained mixtral", DENSE_LAYER)


@dataclass(frozen=True)
class Facts:
    path: Path
    expert_bytes: int  # in fp32, which a CPU computes in
    num_experts: int  # in all layers
    top_k: int = 2

    def gb(self, num_experts: int) -> float:
        return num_experts * self.expert_bytes / GIB

    @property
    def most_buffers(self) -> int:
        return self.num_experts + 2 * self.top_k


@pytest.fixture(scope="module")
def facts(tiny: Tiny) -> Find:
    def get(name: str) -> Facts:
        path = TRAINED if name == "trained mixtral" else tiny(name).path
        checkpoint = open_checkpoint(path)
        model = ModelFacts(ModelConfig.from_hf(checkpoint.config, {}), 4)
        checkpoint.close()
        return Facts(path, model.expert_bytes, model.num_experts)

    return get


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_logger, "level", logging.ERROR)  # the disk tier warns each time


def make(path: Path, **options: Any) -> LLM:
    defaults = {
        "device": "cpu",
        "skip_tokenizer_init": True,
        "max_model_len": 160,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "num_kvcache_blocks": 64,
        "kvcache_block_size": 16,
    }
    return LLM(str(path), **{**defaults, **options})


PROMPTS = random_prompts((1, 15, 33, 64, 17))
# Greedy, seeded and a short one, all in one batch.
PARAMS = [
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.9, seed=7, max_tokens=6, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=1),
    SamplingParams(temperature=1.3, top_p=0.8, seed=1, n=2, max_tokens=6, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=3),
]


class Answer(NamedTuple):
    completions: list[tuple[list[int], Any]]
    prompt_logprobs: Any
    num_preemptions: int
    num_cached_tokens: int
    error: str | None


def answers(llm: LLM) -> list[Answer]:
    """Everything that is computed: tokens and every digit of the logprobs. Twice, since the prefix cache changes what
    is computed together, and so the last digits: first rounds compare with first ones."""
    return [
        Answer(
            [(c.token_ids, c.logprobs) for c in o.outputs],
            o.prompt_logprobs,
            o.metrics.num_preemptions,
            o.num_cached_tokens,
            o.error,
        )
        for _ in range(2)
        for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    ]


def first_tokens(requests: list[Answer]) -> list[list[int]]:
    return [request.completions[0][0] for request in requests[: len(PROMPTS)]]


def buffers_of(llm: LLM) -> tuple[int, int]:
    experts = llm.engine.describe()["runs_on"]["experts"]
    return experts["cached_slots"], experts["streaming_slots"]


@pytest.fixture(scope="module")
def resident(facts: Find) -> Resident:
    known: dict[str, list[Answer]] = {}

    def get(name: str, **options: Any) -> list[Answer]:
        key = f"{name} {sorted(options.items())}"
        if key not in known:
            with make(facts(name).path, **options) as llm:
                assert "experts" not in llm.engine.describe()["runs_on"]
                known[key] = answers(llm)
        return known[key]

    return get


# ---- the same answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_every_number_of_buffers(name: str, facts: Find, resident: Resident) -> None:
    """From top_k, where everything streams, to all experts and the ring; one more changes nothing."""
    model, wanted = facts(name), resident(name)
    numbers = sorted(
        {2, 3, 4, 5, 7, model.num_experts - 1, model.num_experts, model.most_buffers, model.most_buffers + 1}
    )
    rates = []
    for number in numbers:
        with make(model.path, expert_cache_gb=model.gb(number)) as llm:
            assert sum(buffers_of(llm)) == min(number, model.most_buffers)
            assert answers(llm) == wanted, number
            stats = llm.engine.executor.expert_stats()
            assert stats is not None
            rates.append(stats.hit_rate)
    assert rates[0] < rates[-1]
    assert rates[-1] > 0.5


@pytest.mark.parametrize("policy", ["lfu", "lru", "none"])
@pytest.mark.parametrize("host", ["memory", "disk", "mixed"])
@pytest.mark.parametrize("name", MODELS)
def test_policies_and_tiers(name: str, policy: str, host: str, facts: Find, resident: Resident) -> None:
    model = facts(name)
    in_host = {"memory": model.num_experts, "disk": 0, "mixed": model.num_experts // 2 + 1}[host]
    for prefetch in (True, False) if host == "memory" else (True,):
        options = {"expert_policy": policy, "expert_prefetch": prefetch, "expert_host_gb": model.gb(in_host)}
        with make(model.path, expert_cache_gb=model.gb(9), **options) as llm:
            experts = llm.engine.describe()["runs_on"]["experts"]
            kept = 0 if policy == "none" or host == "memory" else experts["cached_slots"]
            assert (experts["in_host_memory"], experts["on_disk"]) == (in_host, model.num_experts - in_host - kept)
            assert (experts["policy"], experts["prefetch"]) == (policy, prefetch)
            assert answers(llm) == resident(name)


@pytest.mark.parametrize("num_pieces", [1, 2, 7])
@pytest.mark.parametrize("host", ["memory", "mixed"])
def test_guesses_change_no_bit(
    num_pieces: int,
    host: str,
    facts: Find,
    resident: Resident,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CPU has no idle copy engine and never guesses by itself. Here it does, in thirds of an expert."""
    model = facts("trained mixtral")
    in_thirds = partial(OffloadOptions, piece_bytes=model.expert_bytes // 3)
    monkeypatch.setattr(expert_memory, "OffloadOptions", in_thirds)
    in_host = model.gb(model.num_experts if host == "memory" else 20)
    with make(model.path, expert_cache_gb=model.gb(10), expert_host_gb=in_host) as llm:
        llm.engine.executor.offload.idle = FixedIdle(num_pieces)
        assert answers(llm) == resident("trained mixtral")
        stats = llm.engine.executor.expert_stats()
        assert stats.prefetched_bytes_useful > 0 < stats.prefetched_bytes_wasted
        assert 0 < stats.prefetch_precision < 1


SCENARIOS: dict[str, dict[str, Any]] = {
    "chunked prefill": {"max_num_seqs": 3, "max_num_batched_tokens": 7},
    "preemption": {"num_kvcache_blocks": 9, "enable_prefix_caching": False},
    "preemption and prefix cache": {"num_kvcache_blocks": 6},
    "one after another": {"max_num_seqs": 1, "max_num_batched_tokens": 64},
    "several tokens between looks": {"decode_steps": 4},
    "16 bits": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("name", MODELS)
def test_whatever_happens_to_the_batch(name: str, scenario: str, facts: Find, resident: Resident) -> None:
    model, options = facts(name), SCENARIOS[scenario]
    share = 2 if scenario == "16 bits" else 1
    with make(model.path, expert_cache_gb=model.gb(6) / share, expert_host_gb=model.gb(7) / share, **options) as llm:
        assert sum(buffers_of(llm)) == 6
        found = answers(llm)
        assert found == resident(name, **options)
        assert ("preemption" in scenario) == any(request.num_preemptions for request in found)
        assert options.get("enable_prefix_caching", True) == any(request.num_cached_tokens for request in found)
        assert llm.engine.scheduler.blocks.num_used == 0


@pytest.mark.parametrize("name", MODELS)
def test_misses_on_the_cpu_are_close(name: str, facts: Find, resident: Resident) -> None:
    """Other rows share the product, so the last digits may differ; on these models the tokens do not."""
    model = facts(name)
    with make(model.path, expert_cache_gb=model.gb(6), expert_cpu_misses=True) as llm:
        got, wanted = answers(llm), resident(name)
        assert llm.engine.executor.expert_stats().computed_on_cpu > 0
    for ours, theirs in zip(got, wanted):
        for (tokens, logprobs), (wanted_tokens, wanted_logprobs) in zip(ours.completions, theirs.completions):
            assert tokens == wanted_tokens
            for a, b in zip(logprobs, wanted_logprobs):
                assert [e.logprob for e in a.values()] == pytest.approx([e.logprob for e in b.values()], abs=1e-4)


@pytest.mark.parametrize("policy", ["lfu", "lru"])
@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_read_from_disk_once_device_and_host_hold_all(
    name: str, policy: str, facts: Find, resident: Resident, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly as much room as there are experts, however it is shared out. Each expert without host memory is read at
    most until the cached buffers are full; the second round of requests reads nothing."""
    model, ring, misses = facts(name), 4, []
    for in_host in (model.num_experts - 1, 2 * model.num_experts // 3, model.num_experts // 3, 1):
        cached = model.num_experts - in_host
        room = {"expert_cache_gb": model.gb(cached + ring), "expert_host_gb": model.gb(in_host)}
        with make(model.path, expert_policy=policy, **room) as llm:
            assert buffers_of(llm) == (cached, ring)
            assert answers(llm) == resident(name)
            store, reads = llm.engine.executor.offload.store, []
            monkeypatch.setattr(store, "_read", lambda *args, reads=reads: reads.append(args))
            first = llm.engine.executor.expert_stats()
            answers(llm)
            since = llm.engine.executor.expert_stats() - first
            misses.append(since.misses)
            assert len(reads) == since.bytes_from_disk == 0, in_host
    assert misses[0] > 0


def test_experts_on_disk_that_are_misread_would_show(facts: Find, resident: Resident) -> None:
    """The proof that the tests above can fail."""
    model = facts("trained mixtral")
    with make(model.path, expert_cache_gb=model.gb(6), expert_host_gb=0) as llm:
        files = llm.engine.executor.offload.store._files
        files[1, 3]["down"], files[1, 4]["down"] = files[1, 4]["down"], files[1, 3]["down"]
        assert answers(llm) != resident("trained mixtral")


# ---- what a miss costs -----------------------------------------------------------------------------------------------


TIERS = {"memory": 32, "disk": 0, "mixed": 13}  # experts of the trained Mixtral in host memory, of 32
LAYERS, TOP_K = 4, 2


def decode(llm: LLM, num_tokens: int) -> Iterator[None]:
    """One sequence; the prompt is done before the first yield, and one token is decoded between two of them."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    llm.engine.add_request("one", [700, 12, 900, 44], params)
    llm.engine.step()
    while llm.engine.has_unfinished_requests():
        yield
        llm.engine.step()


class Allocations(TorchDispatchMode):
    """The largest tensor that was made: its memory is none of the arguments'."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.num_ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        self.num_ops += 1
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("tier", TIERS)
def test_a_miss_allocates_no_memory_for_weights(tier: str, facts: Find) -> None:
    """From disk, where bf16 is converted to fp32, neither."""
    model, matrix_bytes = facts("trained mixtral"), 128 * 256 * 2  # one matrix as it is stored
    with Allocations() as seen, torch.inference_mode():
        torch.empty(matrix_bytes, dtype=torch.uint8)[:5].view(5)
    assert (seen.largest, seen.num_ops) == (matrix_bytes, 3), "an allocation is seen, a view is not"
    with make(model.path, expert_cache_gb=model.gb(4), expert_host_gb=model.gb(TIERS[tier])) as llm:
        steps = decode(llm, 12)
        next(steps)
        before = llm.engine.executor.expert_stats()
        with Allocations() as seen:
            list(steps)
        assert (llm.engine.executor.expert_stats() - before).misses > 40
    assert seen.num_ops > 500
    assert seen.largest < matrix_bytes


@pytest.mark.parametrize("tier", TIERS)
def test_the_host_waits_once_a_layer_and_only_a_mixed_tier_copies_back(
    tier: str, facts: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expert that loses its buffer moves no bytes, but where host memory holds some experts and not others. No
    memory is given back to the driver, and the file is not written."""
    model = facts("trained mixtral")
    with make(model.path, expert_cache_gb=model.gb(5)) as llm:
        held = enumerate(llm.engine.executor.offload.store.held)
        truth = {(layer, e): block.tensor.clone() for layer, experts in held for e, block in experts.items()}
    released: list[int] = []
    monkeypatch.setattr(Device, "release_cached", lambda self: released.append(1))
    file_before = (model.path / "model.safetensors").stat()
    with make(model.path, expert_cache_gb=model.gb(5), expert_host_gb=model.gb(TIERS[tier])) as llm:
        offload = llm.engine.executor.offload
        stream, downloads, targets = offload.stream, [], []
        download, copy = stream.download, stream.copy
        monkeypatch.setattr(stream, "download", lambda t: downloads.append(t.numel()) or download(t))
        monkeypatch.setattr(stream, "copy", lambda t, s: targets.append(t.data_ptr()) or copy(t, s))
        blocks = {block.tensor.data_ptr() for held in offload.store.held for block in held.values()}
        list(decode(llm, 20))
        assert len(downloads) == 20 * LAYERS  # a prompt and 19 tokens
        assert max(downloads) <= 4 * TOP_K * 3  # the choices and the guesses of two layers: no experts
        first = offload._views[0][0].data_ptr()
        stats = llm.engine.executor.expert_stats()
        assert len(targets) >= stats.misses > 50
        back = [target for target in targets if not first <= target < first + 5 * model.expert_bytes]
        assert set(back) <= blocks, "copies go to buffers, or to host memory, and nowhere else"
        assert len(back) * model.expert_bytes == stats.bytes_saved
        assert (0 < len(back) < stats.misses / 4) == (tier == "mixed")
        held = [(layer, expert) for layer, experts in enumerate(offload.store.held) for expert in experts]
        assert len(held) == len(blocks) == TIERS[tier]
        assert all(torch.equal(offload.store.block(*key), truth[key]) for key in held)
        assert not released
    file = (model.path / "model.safetensors").stat()
    assert (file.st_mtime_ns, file.st_size) == (file_before.st_mtime_ns, file_before.st_size)


# ---- several engines -------------------------------------------------------------------------------------------------


def test_engines_side_by_side(facts: Find, resident: Resident) -> None:
    """Steps of four engines in turn: placements, tiers and models do not mix."""
    mixtral, qwen = (facts(name) for name in MODELS)
    engines = [
        make(mixtral.path),
        make(mixtral.path, expert_cache_gb=mixtral.gb(3), expert_host_gb=0),
        make(mixtral.path, expert_placement="offload", expert_policy="lru"),
        make(qwen.path, expert_cache_gb=qwen.gb(5)),
    ]
    tokens: list[dict[str, list[int]]] = [{} for _ in engines]
    for llm in engines:
        for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS)):
            llm.engine.add_request(str(i), prompt, params)
    while any(llm.engine.has_unfinished_requests() for llm in engines):
        for llm, found in zip(engines, tokens):
            for delta in llm.engine.step():
                for completion in delta.outputs:
                    if completion.index == 0:
                        found.setdefault(delta.request_id, []).extend(completion.token_ids)
    for llm, found, name in zip(engines, tokens, (MODELS[0],) * 3 + (MODELS[1],)):
        assert [found[str(i)] for i in range(len(PROMPTS))] == first_tokens(resident(name))
        llm.close()


def collected_bytes() -> int:
    gc.collect()
    return resident_bytes()


def test_opening_and_closing_leaks_nothing(facts: Find) -> None:
    """7 MB of weights, 14 MB in fp32: one that is kept in each of 20 rounds would show."""
    model = facts("trained mixtral")
    tiers = [{"expert_host_gb": 0}, {"expert_host_gb": model.gb(9)}, {}]

    def cycle(number: int) -> None:
        with make(model.path, expert_cache_gb=model.gb(8), **tiers[number % 3]) as llm:
            llm.generate(PROMPTS[1], PARAMS[4], use_tqdm=False)

    for number in range(6):
        cycle(number)
    files, before = sorted(os.listdir("/proc/self/fd")), collected_bytes()
    for number in range(20):
        cycle(number)
    gc.collect()
    assert sorted(os.listdir("/proc/self/fd")) == files
    assert collected_bytes() - before < 30 << 20


# ---- metrics and log -------------------------------------------------------------------------------------------------


def check_metrics(output: RequestOutput, model: Facts) -> dict[str, Any]:
    found = output.metrics.experts
    assert found is not None
    assert 0 <= found["hit_rate"] <= 1
    assert found["hit_rate"] == found["hits"] / (found["hits"] + found["misses"])
    assert found["bytes_per_token"] == found["bytes_copied"] / found["tokens"]
    assert found["stall_seconds"] >= 0
    assert 0 <= found["prefetch_precision"] <= 1
    # Each miss was copied whole, less what a guess brought before; guesses that were wrong come on top.
    useful, wasted = found["prefetched_bytes_useful"], found["prefetched_bytes_wasted"]
    assert found["bytes_copied"] <= found["misses"] * model.expert_bytes + wasted + useful
    return found


def test_metrics_of_a_request(facts: Find) -> None:
    model = facts("trained mixtral")
    with make(model.path) as llm:
        assert llm.generate(PROMPTS[2], PARAMS[0], use_tqdm=False)[0].metrics.experts is None
    with make(model.path, expert_cache_gb=model.gb(2), expert_policy="none") as llm:
        found = check_metrics(llm.generate(PROMPTS[2], PARAMS[0], use_tqdm=False)[0], model)
        assert found["tokens"] == 33 + 5  # the last token is not fed
        assert found["bytes_copied"] == found["misses"] * model.expert_bytes
        assert found["misses"] + found["hits"] >= 5 * 4 * 2  # each of 5 decodes: 2 experts in each of 4 layers
        again = check_metrics(llm.generate(PROMPTS[2], PARAMS[0], use_tqdm=False)[0], model)
        assert again["tokens"] == 38 - 32  # this request's own, less two blocks of the prefix cache
    with make(model.path, expert_cache_gb=model.gb(model.most_buffers)) as llm:
        llm.engine.add_request("gone", PROMPTS[2], PARAMS[0])
        llm.engine.step()
        assert llm.engine.abort_request("gone").metrics.experts is None  # it never came to its end
        check_metrics(llm.generate(PROMPTS[2], PARAMS[0], use_tqdm=False)[0], model)
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        warm = check_metrics(llm.generate(PROMPTS[2], PARAMS[0], use_tqdm=False)[0], model)
        assert (warm["hit_rate"], warm["bytes_copied"]) == (1.0, 0)


def test_the_log_says_it_too(facts: Find, caplog: pytest.LogCaptureFixture) -> None:
    model = facts("trained mixtral")
    with caplog.at_level(logging.INFO, logger="nanovllm"), make(model.path, expert_cache_gb=model.gb(8)) as llm:
        assert "experts: 8 buffers of 0.4 MiB" in caplog.text
        assert "4 of them stream" in caplog.text
        output = llm.generate(PROMPTS[2], PARAMS[0], use_tqdm=False)[0]
    lines = [record for record in caplog.records if "found on the device" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].levelno == logging.INFO
    assert f"experts: {100 * output.metrics.experts['hit_rate']:.0f} % found" in lines[0].getMessage()
    with caplog.at_level(logging.INFO, logger="nanovllm"), make(model.path) as llm:
        caplog.clear()
        llm.generate(PROMPTS[2], PARAMS[0], use_tqdm=False)
        assert "experts" not in caplog.text


# ---- the plan --------------------------------------------------------------------------------------------------------


class Card(Device):
    """A GPU as far as sizing can see: this machine has none, and the decision needs only figures."""

    is_gpu, name = True, "a card"  # type: ignore[assignment]

    def memory(self) -> tuple[int, int]:
        return 80 * GIB, 80 * GIB


@pytest.mark.parametrize("gigabytes", [5, 8, 11, 24, 48])
@pytest.mark.parametrize("host_gigabytes", [16, 64, 128])
def test_the_engine_decides_as_the_plan_says(
    gigabytes: int, host_gigabytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = PlanOptions(model=str(MIXTRAL_8X7B), gpu_memory_gb=gigabytes, host_memory_gb=host_gigabytes)
    plan = make_estimate(options)
    assert plan.tiers is not None
    assert plan.tiers.placement == "offload"
    monkeypatch.setattr(expert_memory, "available_host_bytes", lambda: plan.memory.host_bytes)
    config = EngineConfig.from_options(**plan.settings)
    limits = StepLimits(plan.wants.max_model_len, plan.wants.max_num_batched_tokens, 64)
    card = Card(torch.device("cpu"))
    tiers = expert_memory.size_experts(config, plan.model.config, card, torch.bfloat16, limits)
    # The engine's rotary table ends at max_model_len and not where the model was trained to: its step is smaller by
    # that, which is at most one buffer.
    exact = replace(plan.model, trained_len=plan.wants.max_model_len)
    planned, engines = (facts.step_bytes(limits.max_num_batched_tokens, 64) for facts in (plan.model, exact))
    shrinks = planned - engines
    assert 0 <= shrinks < plan.tiers.expert_bytes
    assert plan.tiers.num_buffers <= tiers.num_buffers <= plan.tiers.num_buffers + 1
    free = {"quotas", "kv_bytes", "kv_tokens", "longest_context", "step_bytes"}
    for fact in fields(tiers):
        if fact.name not in free:
            assert getattr(tiers, fact.name) == getattr(plan.tiers, fact.name), fact.name
    assert sum(tiers.quotas) - sum(plan.tiers.quotas) == tiers.num_buffers - plan.tiers.num_buffers


@pytest.mark.parametrize("num_buffers", [2, 4, 9, 36, 40])
def test_the_engine_has_the_buffers_that_were_planned(num_buffers: int, facts: Find) -> None:
    """A CPU has no context and no graphs, so it has more memory left than a card; a given number of buffers is kept."""
    model = facts("trained mixtral")
    cache, host = model.gb(num_buffers), model.gb(10)
    options = PlanOptions(
        model=str(model.path),
        gpu_memory_gb=2,
        host_memory_gb=8,
        dtype="float32",
        expert_placement="offload",
        expert_cache_gb=cache,
        expert_host_gb=host,
    )
    plan = make_estimate(options)
    assert plan.tiers is not None
    with LLM(**plan.settings, device="cpu", num_kvcache_blocks=16) as llm:
        experts = llm.engine.describe()["runs_on"]["experts"]
        assert buffers_of(llm) == (plan.tiers.num_cached, plan.tiers.num_streaming)
        assert (experts["in_host_memory"], experts["on_disk"]) == (plan.tiers.host_experts, plan.tiers.disk_experts)
        assert llm.generate("The public debt", PARAMS[0], use_tqdm=False)[0].error is None
