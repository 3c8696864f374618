"""Deltas: added up they are the whole output, for all parameters; a reader that stalls has one delta to read; and the
cost of a step does not depend on how much was written before."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import nanovllm
from nanovllm import LLM, AsyncLLMEngine, RequestDelta, RequestOutput, SamplingParams
from nanovllm.engine import async_engine
from nanovllm.engine.async_engine import Mailbox
from nanovllm.outputs import CompletionDelta, Logprob, RequestMetrics
from tests.engine.test_interrupts import PACKAGE, Place, Tracer
from tests.tiny_models import TinyModel, edit_config

MakeLLM = Callable[..., LLM]
# Where deltas are made.
FILES = tuple(str(PACKAGE / name) for name in ("engine/llm_engine.py", "engine/request.py", "outputs.py"))


def total_of(deltas: Iterable[RequestDelta]) -> RequestOutput:
    """Added up by hand, not by `merge`."""
    found: dict[int, dict[str, Any]] = {}
    last = None
    for last in deltas:
        for new in last.outputs:
            mine = found.setdefault(new.index, {"text": "", "token_ids": [], "logprobs": None})
            assert new.start == len(mine["token_ids"])
            mine["text"] += new.text
            mine["token_ids"] += new.token_ids
            if new.logprobs is not None:
                mine["logprobs"] = (mine["logprobs"] or []) + new.logprobs
            assert mine.get("finish_reason") is None, "nothing comes after the end"
            mine |= {"finish_reason": new.finish_reason, "stop_reason": new.stop_reason}
            mine["cumulative_logprob"] = new.cumulative_logprob
    assert last is not None
    outputs = [nanovllm.CompletionOutput(index=index, **values) for index, values in sorted(found.items())]
    return RequestOutput(**{**{f.name: getattr(last, f.name) for f in fields(last)}, "outputs": outputs})


def copy_of(delta: RequestDelta) -> RequestDelta:
    """Merging changes deltas."""
    lists = [
        {"token_ids": [*c.token_ids], "texts": [*c.texts], "logprobs": c.logprobs and [*c.logprobs]}
        for c in delta.outputs
    ]
    return replace(delta, outputs=[replace(c, **mine) for c, mine in zip(delta.outputs, lists)])


def merged_in_groups(deltas: list[RequestDelta], pick: random.Random) -> RequestOutput:
    """As a slow reader sees them: neighbours are merged first, then all."""
    groups: list[RequestDelta] = []
    for number, delta in enumerate(map(copy_of, deltas)):
        if number and pick.random() < 0.6:
            groups[-1].merge(delta)
        else:
            groups.append(delta)
    total = groups[0]
    for group in groups[1:]:
        total.merge(group)
    return total.output()


# ---- what deltas add up to -------------------------------------------------------------------------------------------


def random_params(pick: random.Random) -> SamplingParams:
    letters = "abcdefghijklmnopqrstuvwxyz \n"
    stops = ["".join(pick.choices(letters, k=pick.randint(1, 2))) for _ in range(pick.choice([0, 0, 2]))]
    return SamplingParams(
        n=pick.choice([1, 1, 2, 3]),
        temperature=pick.choice([0.7, 1.0, 2.0]),
        seed=pick.randint(0, 99),
        max_tokens=pick.choice([1, 2, 9, 30, 60]),
        min_tokens=pick.choice([0, 0, 1]),
        stop=stops or None,
        include_stop_str_in_output=pick.random() < 0.4,
        ignore_eos=pick.random() < 0.5,
        stop_token_ids=pick.choice([None, [pick.randint(3, 299) for _ in range(8)]]),
        logprobs=pick.choice([None, None, 0, 2]),
        prompt_logprobs=pick.choice([None, None, 1]),
        detokenize=bool(stops) or pick.random() < 0.9,
        skip_special_tokens=pick.random() < 0.5,
    )


def essence(output: RequestOutput) -> Any:
    """Without names and times."""
    return output.outputs, output.prompt_logprobs, output.num_cached_tokens, output.error


@pytest.mark.parametrize("seed", range(6))
def test_deltas_add_up_to_the_output_of_generate(make_llm: MakeLLM, llama: TinyModel, seed: int) -> None:
    pick = random.Random(seed)
    prompts: list[Any] = [pick.choice([*llama.prompts, "the town é", "in the rain ☔"]) for _ in range(12)]
    params = [random_params(pick) for _ in prompts]
    prompts[0], params[0] = (
        llama.prompts[7],
        SamplingParams(n=3, seed=seed, max_tokens=60, ignore_eos=True, logprobs=1, prompt_logprobs=1),
    )
    # Few blocks: sequences are preempted. The same options, so that both compute the same batches to the last digit.
    options = {"max_num_batched_tokens": 24, "decode_steps": pick.choice([1, 3]), "num_kvcache_blocks": 12}
    wanted = make_llm(**options).generate(prompts, params, use_tqdm=False)
    engine = make_llm(**options).engine
    for number, (prompt, one) in enumerate(zip(prompts, params)):
        engine.add_request(str(number), prompt, one, final_only=number % 4 == 3)
    seen: dict[str, list[RequestDelta]] = {}
    while engine.has_unfinished_requests():
        for delta in engine.step():
            seen.setdefault(delta.request_id, []).append(delta)
    assert engine.scheduler.num_preemptions > 0
    for number, output in enumerate(wanted):
        deltas = seen[str(number)]
        assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        assert [c.index for c in deltas[0].outputs] == list(range(params[number].n))
        by_merging = merged_in_groups(deltas, pick)
        assert by_merging == total_of(deltas)
        assert essence(by_merging) == essence(output)
        assert len(deltas) == 1 or number % 4 != 3


@pytest.mark.parametrize("num_steps", [1, 4, 11])
def test_deltas_of_a_request_that_is_cut(make_llm: MakeLLM, llama: TinyModel, num_steps: int) -> None:
    """Aborted, or ended by an error: what was reported before, and the rest with the end, each token once."""
    params = [
        SamplingParams(n=2, temperature=1.0, seed=i, max_tokens=40, ignore_eos=True, logprobs=1, stop=["\x01xyz"])
        for i in range(4)
    ]
    wanted = make_llm().generate(llama.prompts[:4], params, use_tqdm=False)
    engine = make_llm().engine
    seen: dict[str, list[RequestDelta]] = {str(i): [] for i in range(4)}
    for i in range(4):
        engine.add_request(str(i), llama.prompts[i], params[i], final_only=i == 3)
    for _ in range(num_steps):
        for delta in engine.step():
            seen[delta.request_id].append(delta)
    cut = engine.abort_request("0")
    assert cut is not None
    seen["0"].append(cut)
    launch = engine.executor.launch
    engine.executor.launch = lambda plan: 1 / 0  # type: ignore[method-assign]
    while engine.has_unfinished_requests():
        for delta in engine.step():
            seen[delta.request_id].append(delta)
    engine.executor.launch = launch  # type: ignore[method-assign]
    for i, output in enumerate(wanted):
        total = total_of(seen[str(i)])
        assert total.finished
        assert total == merged_in_groups(seen[str(i)], random.Random(i))
        assert (total.error is None) == (i == 0)
        assert {c.finish_reason for c in total.outputs} == {"abort" if i == 0 else "error"}
        for got, whole in zip(total.outputs, output.outputs, strict=True):
            assert len(got.token_ids) in (num_steps, num_steps - 1)
            assert got.token_ids == whole.token_ids[: len(got.token_ids)]
            assert len(got.logprobs or ()) == len(got.token_ids)
            assert whole.text.startswith(got.text.rstrip("\ufffd"))


# ---- interrupts ------------------------------------------------------------------------------------------------------


def test_an_interrupt_loses_no_delta_that_was_made(make_llm: MakeLLM, llama: TinyModel) -> None:
    """A caller continues after Ctrl-C inside a step: every request ends once, and every token that was known comes
    once."""
    engine = make_llm().engine
    kinds = [{"max_tokens": 4}, {"max_tokens": 9, "n": 2, "logprobs": 0}, {"max_tokens": 9}]
    params = [SamplingParams(temperature=0, ignore_eos=True, **kind) for kind in kinds]

    def run(place: Place | None = None, hit: int = 1) -> tuple[Tracer, dict[str, list[RequestDelta]], list[list[int]]]:
        """The fourth step, in which one request ends, is interrupted. Lines, deltas, and the tokens known then."""
        seen: dict[str, list[RequestDelta]] = {str(i): [] for i in range(3)}
        for i in range(3):
            engine.add_request(str(i), llama.prompts[i], params[i], final_only=i == 2)
        seqs = [completion.seq for request in engine._requests.values() for completion in request.completions]
        tracer = Tracer(place, hit, FILES)

        def step() -> None:
            for delta in engine.step():
                seen[delta.request_id].append(delta)

        for number in range(99):
            if not engine.has_unfinished_requests():
                break
            if number == 3:
                tracer.run(step)
            else:
                step()
        return tracer, seen, [seq.token_ids[seq.num_prompt :] for seq in seqs]

    tracer, whole, _ = run()
    assert tracer.hits.total() > 100
    texts = [completion.text for deltas in whole.values() for completion in total_of(deltas).outputs]
    for place, hit in ((place, hit + 1) for place, count in tracer.hits.items() for hit in range(count)):
        _, seen, known = run(place, hit)
        totals = [total_of(deltas) for deltas in seen.values()]
        assert all(total.finished for total in totals)
        completions = [completion for total in totals for completion in total.outputs]
        assert [completion.token_ids for completion in completions] == known
        assert {completion.finish_reason for completion in completions} <= {"error", "length"}
        for completion, text in zip(completions, texts):
            assert text.startswith(completion.text.rstrip("\ufffd"))
        assert {len(c.token_ids) - len(c.logprobs) for c in totals[1].outputs} <= {0, 1}  # scores come after tokens
    assert [len(token_ids) for token_ids in known] == [4, 4, 4, 4]
    assert engine.scheduler.blocks.num_used == 0


# ---- cost ------------------------------------------------------------------------------------------------------------


class Counted(list):  # type: ignore[type-arg]
    """Counts the elements that are copied out of it."""

    copied = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.copied += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self) -> Any:
        self.copied += len(self)
        return super().__iter__()


def test_the_cost_of_a_step_does_not_grow(make_llm: MakeLLM, llama_copy: Path) -> None:
    edit_config(llama_copy, max_position_embeddings=2048)
    engine = make_llm(llama_copy).engine
    engine.add_request("x", [5, 6, 7], SamplingParams(max_tokens=500, ignore_eos=True, logprobs=1, stop=["☃☃"]))
    completion = engine._requests["x"].completions[0]
    ids = completion.seq.token_ids = Counted(completion.seq.token_ids)
    decode, decoded = completion.detokenizer._decode, []
    completion.detokenizer._decode = lambda window: decoded.append(len(window)) or decode(window)
    engine.step()
    costs, chars = [], 0
    while engine.has_unfinished_requests():
        ids.copied = 0
        decoded.clear()
        (delta,) = engine.step()
        chars += len(delta.outputs[0].text)
        assert len(delta.outputs[0].token_ids) == len(delta.outputs[0].logprobs) == 1
        assert (completion.detokenizer._ready, completion.detokenizer._tail) in (([], ""), ([], "☃"))
        assert completion.logprobs is None
        costs.append(ids.copied + sum(decoded))
    assert len(costs) == 499
    assert chars > 500
    assert max(costs) < 100  # a window of the detokenizer and a block of 16, not the 500 tokens


def a_delta(token: int, text: str) -> RequestDelta:
    new = CompletionDelta(0, token, [token], [text], [{token: Logprob(-1.0, 1, text)}])
    return RequestDelta("x", None, [5], [new], False, None, 0, RequestMetrics())


def test_merging_copies_only_what_is_new_and_outputs_share_no_list_that_grows() -> None:
    total = a_delta(0, "a")
    first, mine = total.output(), total.outputs[0]
    lists = mine.token_ids, mine.texts, mine.logprobs
    for token in range(1, 5000):
        total.merge(a_delta(token, "bc"))
        assert (mine.token_ids, mine.texts, mine.logprobs) == lists if token == 1 else True
    assert all(now is before for now, before in zip((mine.token_ids, mine.texts, mine.logprobs), lists))
    assert mine.text == "a" + "bc" * 4999
    assert total.output()["token_ids"] == list(range(5000))
    assert (first["text"], first["token_ids"], len(first["logprobs"])) == ("a", [0], 1)


# ---- readers ---------------------------------------------------------------------------------------------------------


def run(work: Awaitable[Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 120))  # a test that hangs must fail


@pytest.fixture
def long_model(llama_copy: Path) -> Path:
    edit_config(llama_copy, max_position_embeddings=4096)
    return llama_copy


LONG = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=1000, ignore_eos=True, logprobs=1)


def test_a_stalled_reader_has_one_delta_to_read(long_model: Path, make_llm: MakeLLM) -> None:
    """It reads once and then nothing for 2,000 tokens, of two completions: in its mailbox they are one delta, whose
    lists hold the tokens and nothing besides."""
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_kvcache_blocks": 300}
    (wanted,) = make_llm(long_model, **options).generate([[5, 6]], LONG, use_tqdm=False)
    engine = AsyncLLMEngine(model=str(long_model), device="cpu", **options)

    async def work() -> list[RequestDelta]:
        deltas = []
        async for delta in engine.stream([5, 6], LONG, "x"):
            deltas.append(delta)
            if delta.finished:
                break
            stream = engine._streams["x"]
            while stream._unread is None or not stream._unread.finished:
                await asyncio.sleep(0.01)
            assert [new.index for new in stream._unread.outputs] == [0, 1]
            for new, read in zip(stream._unread.outputs, delta.outputs):
                assert len(new.token_ids) == len(new.logprobs) == LONG.max_tokens - len(read.token_ids)
                assert len(new.texts) <= len(new.token_ids)
        return deltas

    try:
        deltas = run(work())
    finally:
        engine.close()
    assert len(deltas) == 2
    assert essence(total_of(deltas)) == essence(wanted)


def test_one_wake_up_a_step_for_all_streams(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AsyncLLMEngine(model=str(llama.path), device="cpu", max_num_seqs=32)
    step, deliver = engine.engine.step, async_engine.deliver
    sizes: list[int] = []
    steps: list[int] = []
    monkeypatch.setattr(engine.engine, "step", lambda: steps.append(1) or step())
    monkeypatch.setattr(async_engine, "deliver", lambda mail: sizes.append(len(mail)) or deliver(mail))
    params = SamplingParams(max_tokens=30, ignore_eos=True)

    async def read(number: int) -> int:
        return sum([len(delta.outputs[0].token_ids) async for delta in engine.stream([5 + number], params)])

    async def work() -> list[int]:
        return await asyncio.gather(*map(read, range(32)))

    try:
        assert run(work()) == [30] * 32
    finally:
        engine.close()
    assert len(sizes) <= len(steps)
    assert max(sizes) == 32


def test_what_came_before_a_failure_is_read_first() -> None:
    async def work() -> None:
        stream = Mailbox()
        stream.put(a_delta(1, "a"))
        stream.put(a_delta(2, "b"))
        stream.fail(ZeroDivisionError())
        assert (await stream.take()).outputs[0].text == "ab"
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await stream.take()

    run(work())


def test_generate_gives_everything_so_far(long_model: Path) -> None:
    """The public output accumulates, and one that was handed out stays as it was."""
    engine = AsyncLLMEngine(model=str(long_model), device="cpu")
    params = SamplingParams(n=2, max_tokens=40, ignore_eos=True, logprobs=0)

    async def work() -> list[tuple[RequestOutput, list[int]]]:
        return [(output, [len(c.token_ids) for c in output.outputs]) async for output in engine.generate([5], params)]

    try:
        found = run(work())
    finally:
        engine.close()
    assert found[-1][1] == [40, 40]
    for output, lens in found:
        assert [len(c.token_ids) for c in output.outputs] == [len(c.logprobs) for c in output.outputs] == lens
        for completion, last in zip(output.outputs, found[-1][0].outputs):
            assert last.text.startswith(completion.text)
