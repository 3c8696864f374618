"""What guessing tokens gains: edits of a given text, which an answer mostly repeats, and random text, where there is
nothing to guess. The same engine with and without guesses, in turn."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.bench.throughput import run_workload
from nanovllm.bench.workload import Lengths, Workload, WorkloadShape
from nanovllm.errors import ConfigError
from nanovllm.scheduling.drafts import Drafts

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine

TEXT = """The harbour of the town has three walls. The first wall was built by fishermen, who brought the stones from
the hill in carts. It is low, and in winter the sea comes over it. The second wall was built a hundred years later, when
the town had a mill and the mill had a road. It is higher than the first wall, and it has a lamp at its end. The third
wall was never finished. It begins at the old gate, follows the road to the mill, and ends in the sand. Every spring
the children of the town walk along all three walls, from the hill to the lamp and from the lamp to the sand, and the
one who comes back with dry shoes gets a cake from the baker. Nobody remembers who baked the first cake, but the baker
says that it was a woman who lived in the house beside the gate, and that she had seen the sea come over the wall."""
EDITS = ("harbour", "town", "wall", "hill", "mill", "lamp", "gate", "baker")  # a word that is to be written in capitals


@dataclass(frozen=True)
class SpeculationCase:
    title: str
    num_seqs: int
    is_edit: bool

    def workload(self, engine: LLMEngine, seed: int, length: int) -> Workload:
        if not self.is_edit:
            shape = WorkloadShape(self.num_seqs, Lengths(64, 64), Lengths(length, length))
            return shape.draw(seed, engine.model_config.vocab_size)
        words = [EDITS[(seed + i) % len(EDITS)] for i in range(self.num_seqs)]
        return Workload([edit_prompt(engine, word) for word in words], [length] * self.num_seqs)


def edit_prompt(engine: LLMEngine, word: str) -> list[int]:
    text = f"Write this text again, and write {word} as {word.upper()}:\n\n{TEXT}"
    tokenizer: Any = engine.tokenizer
    messages = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))


CASES = {
    "1-edit": SpeculationCase("1 edit of a text", 1, True),
    "8-edits": SpeculationCase("8 edits of a text", 8, True),
    "1-random": SpeculationCase("1 random text", 1, False),
    "8-random": SpeculationCase("8 random texts", 8, False),
}


def check_length(engine: LLMEngine, case: SpeculationCase, length: int) -> None:
    limit = engine.scheduler.limits.max_model_len
    longest = max(map(len, case.workload(engine, 0, length).prompts))
    if longest + length > limit:
        raise ConfigError(
            f"--output-len {length}: {case.title} has prompts of {longest} tokens, and both together must be at most "
            f"max_model_len={limit}; --output-len {limit - longest} fits"
            if longest < limit
            else f"max_model_len={limit}: {case.title} has prompts of {longest} tokens; raise it"
        )


def measure_case(engine: LLMEngine, case: SpeculationCase, length: int, repeat: int) -> dict[str, Any]:
    """Without and with guesses in turn, after one of each to warm up; medians, also of the ratios of pairs."""
    drafts, none = engine.scheduler.drafts, Drafts(replace(engine.scheduler.limits, num_drafts=0))
    rates: dict[str, list[float]] = {"plain": [], "guessing": []}
    before, accepted = 0, 0
    same: list[bool] = []
    for turn in range(repeat + 1):
        workload = case.workload(engine, turn, length)
        if turn == 1:
            before, accepted, same = engine.stats.num_drafted, engine.stats.num_accepted, []
        runs = {}
        for kind, used in (("plain", none), ("guessing", drafts)):
            engine.scheduler.drafts = used
            engine.reset_prefix_cache()
            title = f"{case.title}, {kind}, run {turn} of {repeat}" if turn else "warming up"
            runs[kind] = run_workload(engine, workload, 0.0 if case.is_edit else 1.0, title, lambda i: {"seed": i})
            if turn:
                rates[kind].append(runs[kind].output_rate)
        same.append(runs["plain"].token_ids == runs["guessing"].token_ids)
    engine.scheduler.drafts = drafts
    ratios = [guessing / plain for plain, guessing in zip(rates["plain"], rates["guessing"])]
    drafted = engine.stats.num_drafted - before
    return {
        "case": case.title,
        "tokens_per_second": statistics.median(rates["guessing"]),
        "plain": statistics.median(rates["plain"]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "num_drafted": drafted,
        "num_accepted": engine.stats.num_accepted - accepted,
        "acceptance": (engine.stats.num_accepted - accepted) / drafted if drafted else None,
        "same_tokens": f"{sum(same)} of {len(same)}",
    }
