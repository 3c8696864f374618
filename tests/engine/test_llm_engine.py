"""LLMEngine: after requests that finish, fail or are aborted, the next answer is right and no block is lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import (
    LLM,
    EngineConfig,
    EngineDeadError,
    LLMEngine,
    RequestDelta,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from tests.tiny_models import NEW_TOKENS, TinyModel, edit_config

MakeLLM = Callable[..., LLM]
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


def drain(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """The output of each request after each of its steps."""
    seen: dict[str, list[RequestOutput]] = {}
    totals: dict[str, RequestDelta] = {}
    while engine.has_unfinished_requests():
        for delta in engine.step():
            total = totals[delta.request_id].merge(delta) if delta.request_id in totals else delta
            totals[delta.request_id] = total
            seen.setdefault(delta.request_id, []).append(total.output())
    return seen


def assert_sound(engine: LLMEngine, llama: TinyModel) -> None:
    """Nothing is left behind, and answers are right."""
    assert not engine.has_unfinished_requests()
    assert engine.scheduler.blocks.num_used == 0
    for i in (0, 4, 8):
        engine.add_request(f"sound-{i}", llama.prompts[i], GREEDY)
    final = {request_id: outputs[-1] for request_id, outputs in drain(engine).items()}
    assert [final[f"sound-{i}"]["token_ids"] for i in (0, 4, 8)] == [llama.tokens[i] for i in (0, 4, 8)]
    assert engine.scheduler.blocks.num_used == 0


# ---- streaming -------------------------------------------------------------------------------------------------------


def test_streamed_text_never_holds_half_a_character(make_llm: MakeLLM) -> None:
    """Held to the three bytes of one character, the model writes it and nothing that is not it."""
    llm = make_llm()
    snowman = llm.get_tokenizer().encode("☃", add_special_tokens=False)
    assert len(snowman) == 3
    engine = llm.engine
    engine.add_request("x", [5, *snowman[:2]], SamplingParams(allowed_token_ids=snowman[2:], max_tokens=1))
    engine.add_request("y", [5], SamplingParams(allowed_token_ids=snowman[:1], max_tokens=3))
    outputs = drain(engine)
    assert outputs["x"][-1]["text"] == "☃"
    assert [o["text"] for o in outputs["y"][:-1]] == ["", ""]


# ---- outputs ---------------------------------------------------------------------------------------------------------


def test_outputs_in_input_order_and_in_both_forms(make_llm: MakeLLM, llama: TinyModel) -> None:
    llm = make_llm(max_num_seqs=3)
    order = [8, 0, 5, 2, 10, 1, 7]
    params = [SamplingParams(temperature=0, max_tokens=1 + i, ignore_eos=True) for i in range(len(order))][::-1]
    outputs = llm.generate([llama.prompts[i] for i in order], params, use_tqdm=False)
    for i, output, one in zip(order, outputs, params):
        assert output.prompt_token_ids == llama.prompts[i]
        assert output["token_ids"] == output.outputs[0].token_ids == llama.tokens[i][: one.max_tokens]
        assert output["text"] == output.outputs[0].text
        assert output["finish_reason"] == "length"
        assert output.finished


def test_metrics_are_in_order(make_llm: MakeLLM, llama: TinyModel) -> None:
    for output in make_llm(max_num_seqs=2).generate(llama.prompts, GREEDY, use_tqdm=False):
        m = output.metrics
        assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.finished_time
        assert m.time_to_first_token == m.first_token_time - m.arrival_time
        assert m.latency == m.finished_time - m.arrival_time


def test_prompt_text_is_kept(llm: LLM) -> None:
    outputs = llm.generate(["the", {"prompt": "the town"}, {"prompt_token_ids": [5, 6]}], GREEDY, use_tqdm=False)
    assert [o.prompt for o in outputs] == ["the", "the town", None]
    assert outputs[0].prompt_token_ids[0] == 1  # bos
    assert outputs[2].prompt_token_ids == [5, 6]


@pytest.mark.parametrize(("salts", "cached"), [(("", ""), 64), (("a", "a"), 64), (("a", "b"), 0), (("", "b"), 0)])
def test_cache_salt_keeps_callers_apart(
    make_llm: MakeLLM, llama: TinyModel, salts: tuple[str, str], cached: int
) -> None:
    """A request with another salt cannot find out (by timing) that a prompt was computed before."""
    llm = make_llm()
    for salt, num_cached in zip(salts, (0, cached)):
        prompt = {"prompt_token_ids": llama.prompts[-1], "cache_salt": salt}
        output = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
        assert (output["token_ids"], output.num_cached_tokens) == (llama.tokens[-1], num_cached)


def test_no_hits_without_prefix_caching(make_llm: MakeLLM, llama: TinyModel) -> None:
    llm = make_llm(enable_prefix_caching=False)
    for _ in range(2):
        assert [o.num_cached_tokens for o in llm.generate(llama.prompts, GREEDY, use_tqdm=False)] == [0] * 11


# ---- abort -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 9, "max_num_seqs": 4}, {"num_kvcache_blocks": 6}])
def test_abort_at_any_time(make_llm: MakeLLM, llama: TinyModel, num_steps: int, options: dict[str, Any]) -> None:
    engine = make_llm(**options).engine
    for i, prompt in enumerate(llama.prompts):
        engine.add_request(str(i), prompt, SamplingParams(n=2, max_tokens=30, ignore_eos=True))
    for _ in range(num_steps):
        engine.step()
    for i in range(len(llama.prompts)):
        output = engine.abort_request(str(i))
        assert output is not None
        assert output.finished
        assert {c.finish_reason for c in output.outputs} <= {"abort", "length"}
    assert engine.abort_request("3") is None  # twice is fine
    assert engine.step() == []
    assert_sound(engine, llama)


def test_abort_of_one_leaves_the_others_right(make_llm: MakeLLM, llama: TinyModel) -> None:
    engine = make_llm(max_num_batched_tokens=32).engine
    for i, prompt in enumerate(llama.prompts):
        engine.add_request(str(i), prompt, GREEDY)
    found: dict[str, list[int]] = {str(i): [] for i in range(len(llama.prompts))}
    victims = ["10", "0", "5"]
    while engine.has_unfinished_requests():
        for delta in engine.step():
            found[delta.request_id] += delta.outputs[0].token_ids
        if victims:
            engine.abort_request(victims.pop(0))
    for i, tokens in enumerate(llama.tokens):
        if str(i) not in ("10", "0", "5"):
            assert found[str(i)] == tokens
    assert_sound(engine, llama)


# ---- failures --------------------------------------------------------------------------------------------------------


def fail_on(monkeypatch: pytest.MonkeyPatch, engine: LLMEngine, call: int, error: BaseException, after: bool) -> None:
    """The call-th step raises, before or after it was computed."""
    launch, calls = engine.executor.launch, 0

    def failing(plan: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != call:
            return launch(plan)
        if after:
            launch(plan)
        raise error

    monkeypatch.setattr(engine.executor, "launch", failing)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", [1, 2, 5])
def test_a_step_that_raises_ends_its_requests_only(
    make_llm: MakeLLM, llama: TinyModel, monkeypatch: pytest.MonkeyPatch, call: int, after: bool
) -> None:
    engine = make_llm(max_num_seqs=4).engine
    for i in reversed(range(len(llama.prompts))):  # long ones first: the failed step should have filled whole blocks
        engine.add_request(str(i), llama.prompts[i], GREEDY)
    fail_on(monkeypatch, engine, call, RuntimeError("the device caught fire"), after)
    final = {request_id: outputs[-1] for request_id, outputs in drain(engine).items()}
    assert len(final) == len(llama.prompts)
    failed = {int(r) for r, o in final.items() if o["finish_reason"] == "error"}
    assert 1 <= len(failed) <= 4
    for i, output in enumerate(final[str(i)] for i in range(len(llama.prompts))):
        if i in failed:
            assert "the device caught fire" in output.error
        else:
            assert (output["token_ids"], output.error) == (llama.tokens[i], None)
    for i in sorted(failed):  # what the failed step should have written is not found in the prefix cache
        engine.add_request(f"again-{i}", llama.prompts[i], GREEDY)
    final = {request_id: outputs[-1] for request_id, outputs in drain(engine).items()}
    assert [final[f"again-{i}"]["token_ids"] for i in sorted(failed)] == [llama.tokens[i] for i in sorted(failed)]
    assert_sound(engine, llama)


# ---- closing, several engines ----------------------------------------------------------------------------------------


def test_close_is_idempotent_and_final(llama: TinyModel) -> None:
    llm = LLM(str(llama.path), device="cpu", max_num_seqs=4)
    llm.engine.add_request("x", [5, 6], GREEDY)
    llm.engine.step()
    llm.close()
    llm.close()
    llm.engine.close()
    for use in (lambda: llm.generate("the", use_tqdm=False), llm.engine.step, lambda: llm.engine.add_request("y", [5])):
        with pytest.raises(EngineDeadError, match="closed"):
            use()
    assert not llm.engine.has_unfinished_requests()


def test_context_manager_closes_after_an_error(llama: TinyModel) -> None:
    with pytest.raises(ZeroDivisionError), LLM(str(llama.path), device="cpu", max_num_seqs=4) as llm:
        raise ZeroDivisionError
    with pytest.raises(EngineDeadError):
        llm.generate("the", use_tqdm=False)
    with LLMEngine(EngineConfig(model=str(llama.path), device="cpu", max_num_seqs=4)) as engine:
        assert_sound(engine, llama)


def test_closing_one_engine_frees_its_memory(llama: TinyModel) -> None:
    import gc
    import weakref

    llm = LLM(str(llama.path), device="cpu", max_num_seqs=4)
    model = weakref.ref(llm.engine.executor.runner.model)
    llm.generate("the", GREEDY, use_tqdm=False)
    llm.close()
    gc.collect()
    assert model() is None


def test_two_engines_in_one_process(make_llm: MakeLLM, llama: TinyModel, tiny: Any) -> None:
    """They share no state, not even through a class or a module."""
    other = tiny("qwen3")
    first = make_llm(kvcache_block_size=16).engine
    second = make_llm(other.path, kvcache_block_size=64, max_num_seqs=5, max_num_batched_tokens=21).engine
    for i in range(11):
        first.add_request(str(i), llama.prompts[i], GREEDY)
        second.add_request(str(i), other.prompts[i], GREEDY)
    done: dict[tuple[str, str], list[int]] = {}
    while first.has_unfinished_requests() or second.has_unfinished_requests():
        for name, engine in (("first", first), ("second", second)):
            for delta in engine.step():
                done.setdefault((name, delta.request_id), []).extend(delta.outputs[0].token_ids)
    assert [done["first", str(i)] for i in range(11)] == llama.tokens
    assert [done["second", str(i)] for i in range(11)] == other.tokens


def test_request_ids_are_unique_while_they_run(make_llm: MakeLLM, llama: TinyModel) -> None:
    engine = make_llm().engine
    engine.add_request("x", llama.prompts[0], GREEDY)
    with pytest.raises(RequestError, match="'x'"):
        engine.add_request("x", llama.prompts[1], GREEDY)
    with pytest.raises(RequestError, match="request_id"):
        engine.add_request(7, llama.prompts[1], GREEDY)  # type: ignore[arg-type]
    assert drain(engine)["x"][-1]["token_ids"] == llama.tokens[0]
    assert_sound(engine, llama)  # "x" may be used again


def test_requests_of_others_do_not_disturb_generate(make_llm: MakeLLM, llama: TinyModel) -> None:
    llm = make_llm()
    llm.engine.add_request("mine", llama.prompts[1], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    llm.engine.add_request("short", llama.prompts[2], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert [o["token_ids"] for o in llm.generate(llama.prompts, GREEDY, use_tqdm=False)] == llama.tokens
    outputs = drain(llm.engine)  # what was reported while generate ran, too: "short" ended then
    assert outputs["mine"][-1]["token_ids"][:12] == llama.tokens[1]
    assert outputs["short"][-1]["token_ids"] == llama.tokens[2][:2]


# ---- limits and order ------------------------------------------------------------------------------------------------


def finish_order(llm: LLM, prompts: list[list[int]], priority: list[int] | None = None) -> list[int]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, priority=priority)
    return sorted(range(len(prompts)), key=lambda i: outputs[i].metrics.first_token_time)


def test_policies(make_llm: MakeLLM, llama: TinyModel) -> None:
    long_then_short = [llama.prompts[10], llama.prompts[9], llama.prompts[0], llama.prompts[2]]
    one_at_a_time = {"max_num_seqs": 1, "max_num_batched_tokens": 256}
    assert finish_order(make_llm(**one_at_a_time), long_then_short) == [0, 1, 2, 3]
    sjf = make_llm(scheduling_policy="sjf", max_wait_steps=None, **one_at_a_time)
    assert finish_order(sjf, long_then_short) == [2, 3, 1, 0]
    aging = make_llm(scheduling_policy="sjf", max_wait_steps=15, **one_at_a_time)
    assert finish_order(aging, long_then_short) == [2, 3, 0, 1]  # after two short ones the oldest has waited enough
    by_priority = make_llm(scheduling_policy="priority", **one_at_a_time)
    assert finish_order(by_priority, long_then_short, [2, -1, 1, -1]) == [1, 3, 2, 0]


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "priority"])
def test_tokens_do_not_depend_on_the_policy(make_llm: MakeLLM, llama: TinyModel, policy: str) -> None:
    llm = make_llm(scheduling_policy=policy, num_kvcache_blocks=9, max_num_batched_tokens=40)
    assert [o["token_ids"] for o in llm.generate(llama.prompts, GREEDY, use_tqdm=False)] == llama.tokens


def test_stats_add_up(make_llm: MakeLLM, llama: TinyModel) -> None:
    llm = make_llm(enable_prefix_caching=False)
    llm.generate(llama.prompts[2:], GREEDY, use_tqdm=False)
    stats = llm.engine.stats
    assert stats.generated_tokens == 9 * NEW_TOKENS
    assert stats.prompt_tokens == sum(map(len, llama.prompts[2:]))
    assert stats.decode_seconds > 0
    assert stats.prefill_seconds > 0


def test_the_cache_holds_little_more_than_the_tokens(make_llm: MakeLLM, llama_copy: Path) -> None:
    """16 prompts of 32 to 256 tokens, 64 new ones each: at the peak within 4 % of the tokens held, never more than the
    unfilled part of each sequence's last block."""
    edit_config(llama_copy, max_position_embeddings=512)
    engine = make_llm(llama_copy, num_kvcache_blocks=400, max_num_batched_tokens=4096).engine
    for i in range(16):
        engine.add_request(str(i), [20 + i] * (32 + 15 * i - i // 15), SamplingParams(max_tokens=64, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
        held = [seq.num_computed for seq in engine.scheduler.running]
        assert engine.scheduler.blocks.num_used == sum(-(-n // 16) for n in held)
    assert engine.stats.peak_blocks > 200
    assert engine.stats.peak_waste < 1.04


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_new_engine_in_a_forked_process_is_refused(make_llm: MakeLLM, llama: TinyModel) -> None:
    """If it has threads: with one, nothing is missing in the child."""
    make_llm()
    for num_threads, wanted in ((2, "spawn"), (1, "made")):
        child = os.fork()
        if child == 0:
            said = "made"
            try:
                torch.set_num_threads(num_threads)
                LLM(str(llama.path), device="cpu", max_num_seqs=2, num_kvcache_blocks=8)
            except EngineDeadError as error:
                said = str(error)
            finally:
                os._exit(0 if wanted in said else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_is_told(make_llm: MakeLLM, llama: TinyModel) -> None:
    """It would wait for ever for threads that it does not have."""
    llm = make_llm()
    child = os.fork()
    if child == 0:
        try:
            llm.generate([llama.prompts[0]], GREEDY, use_tqdm=False)
        except EngineDeadError as error:
            os._exit(0 if "spawn" in str(error) else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert_sound(llm.engine, llama)
