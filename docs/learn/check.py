"""Check the exercises: what is expected comes from running the engines, not from a list of answers.

python docs/learn/check.py            all chapters
python docs/learn/check.py 1          chapter 1
python docs/learn/check.py 2 --answers docs/learn/solutions.py
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import engine1_plain
import engine2_paged
import torch
from engine1_plain import Layer, Model, Request
from exercises import Shape
from torch.utils.flop_counter import FlopCounterMode

from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.block_manager import BlockManager
from nanovllm.scheduling.plan import StepResult
from nanovllm.scheduling.policy import make_policy
from nanovllm.scheduling.scheduler import Scheduler, SchedulerLimits
from nanovllm.scheduling.sequence import Sequence, StopRule

FOLDER = Path(__file__).resolve().parent
Cases = Iterator[tuple[tuple[Any, ...], Any]]  # (arguments, what is expected)
SMALL = Shape(layers=2, hidden=12, heads=4, kv_heads=2, head_dim=6, intermediate=20, vocabulary=30)
SHAPES = [SMALL, Shape(layers=3, hidden=16, heads=2, kv_heads=1, head_dim=8, intermediate=24, vocabulary=40)]
SIZES = [(1, 1), (15, 1), (15, 2), (16, 2), (37, 8), (40, 25), (5, 12)]  # (num_prompt, num_new): both sides of a block


class RandomModel(Model):
    """Random weights; a question is the length of its prompt."""

    def encode(self, question: str) -> list[int]:
        return [1] * int(question)


def random_model(shape: Shape) -> RandomModel:
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    hidden, wide = shape.hidden, shape.intermediate
    sizes = [(hidden,), (query, hidden), (kv, hidden), (kv, hidden), (hidden, query)]
    sizes += [(hidden,), (wide, hidden), (wide, hidden), (hidden, wide)]
    layers = [Layer(*(torch.randn(size) for size in sizes)) for _ in range(shape.layers)]
    embedding = torch.randn(shape.vocabulary, hidden)
    return RandomModel(embedding, layers, torch.ones(hidden), shape.head_dim, 1e4, 1e-5, end_token=-1, tokenizer=None)


# ---- what is expected ------------------------------------------------------------------------------------------------


def rows_computed() -> Cases:
    model = random_model(SMALL)
    for num_prompt, num_new in SIZES:
        yield (num_prompt, num_new), engine1_plain.run(model, [Request(str(num_prompt), num_new)]).num_rows


def flops() -> Cases:
    for shape in SHAPES:
        for num_tokens in (1, 7, 16):
            with FlopCounterMode(display=False) as counter:
                engine1_plain.forward(random_model(shape), [1] * num_tokens)
            yield (num_tokens, shape), counter.get_total_flops()


def kv_bytes() -> Cases:
    for shape in SHAPES:
        kv = engine2_paged.Cache(random_model(shape), num_blocks=1).kv
        yield (shape,), kv.nbytes // engine2_paged.BLOCK_SIZE
    yield (Shape(),), 46080


def owner_of() -> Cases:
    tables, num_tokens = [[4, 1], [0], [6, 2, 3]], [20, 16, 47]
    owners = {table[i // 16] * 16 + i % 16: (index, i)
              for index, table in enumerate(tables) for i in range(num_tokens[index])}  # fmt: skip
    for slot in range(8 * 16):
        yield (slot, tables, num_tokens), owners.get(slot)


def play(num_prompt: int, num_new: int, budget: int) -> tuple[int, int]:
    """One request through the scheduler of engine 2: (steps, slots without a token in the last one)."""
    scheduler = engine2_paged.Scheduler(num_blocks=64, budget=budget, max_num_seqs=1)
    seq = engine2_paged.Sequence(0, [1] * num_prompt, num_prompt, num_new)
    scheduler.add(seq)
    steps = empty = 0
    while plan := scheduler.schedule():
        steps += 1
        empty = len(seq.block_table) * engine2_paged.BLOCK_SIZE - (seq.num_computed + plan[0][1])
        scheduler.commit(plan, [1], end_token=-1)
    return steps, empty


def empty_slots() -> Cases:
    for num_prompt, num_new in SIZES:
        yield (num_prompt, num_new), play(num_prompt, num_new, budget=64)[1]


def num_passes() -> Cases:
    for num_prompt, num_new in SIZES:
        for budget in (1, 16, 20, 64):
            yield (num_prompt, num_new, budget), play(num_prompt, num_new, budget)[0]


def sequence(number: int, token_ids: list[int], num_new: int) -> Sequence:
    return Sequence(number, list(token_ids), len(token_ids), StopRule(max_tokens=num_new), SamplingParams())


def real_scheduler(block_size: int, budget: int) -> Scheduler:
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=1000)
    return Scheduler(limits, BlockManager(100, block_size), make_policy("fcfs"))


def step(scheduler: Scheduler) -> None:
    plan = scheduler.schedule()
    scheduler.commit(plan, StepResult([[1] for entry in plan.entries if entry.samples]))


def findable_blocks() -> Cases:
    for num_prompt, num_new in SIZES:
        for block_size in (4, 16):
            scheduler = real_scheduler(block_size, budget=100)
            scheduler.add(sequence(0, [1] * num_prompt, num_new))
            for _ in range(num_new):
                step(scheduler)
            yield (num_prompt, num_new, block_size), sum(map(len, scheduler.blocks.findable()))


def cached_tokens() -> Cases:
    earlier = random.Random(0).sample(range(1000), 40)
    prompts = [earlier[:n] for n in (1, 16, 17, 31, 32, 33, 40)] + [[*earlier[:n], 1001, 1002] for n in (0, 15, 16, 32)]
    for prompt in prompts:
        scheduler = real_scheduler(block_size=16, budget=100)
        scheduler.add(sequence(0, earlier, 1))
        step(scheduler)
        yield (prompt, earlier, 16), 16 * len(scheduler.blocks.match(sequence(1, prompt, 1)))


def num_steps() -> Cases:
    scheduler = real_scheduler(block_size=16, budget=16)
    for number, (num_prompt, num_new) in enumerate([(37, 4), (20, 6), (5, 8)]):
        scheduler.add(sequence(number, [number] * num_prompt, num_new))
    while scheduler.has_work:
        step(scheduler)
    yield (), scheduler.step


CHAPTERS: dict[int, list[Callable[[], Cases]]] = {
    1: [rows_computed, flops, kv_bytes],
    2: [owner_of, empty_slots, num_passes],
    3: [findable_blocks, cached_tokens, num_steps],
}

# ---- the comparison --------------------------------------------------------------------------------------------------


def verdict(answer: Callable[..., Any], cases: Cases) -> tuple[bool, str]:
    count = 0
    for arguments, expected in cases:
        call = f"({', '.join(map(repr, arguments))})"
        try:
            given = answer(*arguments)
        except NotImplementedError:
            return False, "not done yet"
        except Exception as error:
            return False, f"{call} raised {type(error).__name__}: {error}"
        if given != expected:
            return False, f"wrong: {call} gave {given!r}, expected {expected!r}"
        count += 1
    return True, f"right ({count} cases)"


def load_answers(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("answers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(chapters: list[int], answers: Any) -> bool:
    results = []
    for chapter in chapters:
        for number, cases in enumerate(CHAPTERS[chapter], 1):
            name = cases.__name__
            right, text = verdict(getattr(answers, name), cases())
            results.append(right)
            print(f"{chapter}.{number} {name}: {text}")
    print(f"{sum(results)} of {len(results)} right")
    return all(results)


def main() -> None:
    parser = argparse.ArgumentParser(description="Check the exercises of docs/learn.")
    parser.add_argument("chapters", nargs="*", type=int, metavar="chapter", help="1, 2 or 3; all if none is given")
    parser.add_argument("--answers", type=Path, default=FOLDER / "exercises.py", help="the file with the answers")
    arguments = parser.parse_args()
    if unknown := [chapter for chapter in arguments.chapters if chapter not in CHAPTERS]:
        parser.error(f"chapter {unknown[0]}: there are chapters 1, 2 and 3")
    if not arguments.answers.is_file() or arguments.answers.suffix != ".py":
        parser.error(f"--answers {arguments.answers}: no such Python file")
    sys.exit(0 if check(arguments.chapters or list(CHAPTERS), load_answers(arguments.answers)) else 1)


if __name__ == "__main__":
    main()
