"""Workloads: prompts of random token ids and how much to generate for each, repeatable by seed.

`main` of the family's bench is make_workload(random.Random(0), 256, Lengths(100, 1024), Lengths(100, 1024)): 142,827
prompt tokens and 133,966 output tokens. The order in which random numbers are drawn is part of the definition: for
each prompt its length, then its tokens; after all prompts, all output lengths.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from nanovllm.errors import ConfigError

LARGEST_TOKEN = 10_000  # of the family's bench; random ids far up in a vocabulary hit rarely trained rows


def parse_counts(option: str, text: str, smallest: int) -> list[int]:
    try:
        values = [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {text!r}: write numbers with commas between them, for example 1,8,64") from None
    if min(values) < smallest:
        raise ConfigError(f"{option} {text!r}: must be at least {smallest} each")
    return values


@dataclass(frozen=True)
class Lengths:
    low: int
    high: int

    @classmethod
    def parse(cls, text: str, lowest_of_max: int | None = None) -> Lengths:
        """'64' is exactly 64, '32..256' anything between. `lowest_of_max`: '1024' means up to 1024, from this on."""
        found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text.strip())
        if not found:
            raise ConfigError(f"length {text!r}: write a number (64) or a range (32..256)")
        low, high = int(found[1]), int(found[2] or found[1])
        if found[2] is None and lowest_of_max is not None:
            low = min(lowest_of_max, high)
        if not 1 <= low <= high:
            raise ConfigError(f"length {text!r}: must be at least 1, and the range must rise")
        return cls(low, high)

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"


@dataclass(frozen=True)
class Workload:
    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)


def make_workload(
    rng: random.Random, num_seqs: int, input_len: Lengths, output_len: Lengths, vocab_size: int = LARGEST_TOKEN + 1
) -> Workload:
    if num_seqs < 1:
        raise ConfigError(f"num_seqs={num_seqs}: must be at least 1")
    largest = min(LARGEST_TOKEN, vocab_size - 1)
    prompts = [[rng.randint(0, largest) for _ in range(input_len.draw(rng))] for _ in range(num_seqs)]
    return Workload(prompts, [output_len.draw(rng) for _ in range(num_seqs)])


@dataclass(frozen=True)
class WorkloadShape:
    """A workload before its random numbers are drawn."""

    num_seqs: int
    input_len: Lengths
    output_len: Lengths

    def draw(self, seed: int, vocab_size: int) -> Workload:
        return make_workload(random.Random(seed), self.num_seqs, self.input_len, self.output_len, vocab_size)
