"""Your answers: replace each `raise NotImplementedError`. README.md asks the questions; solutions.py has ours.

    python docs/learn/check.py 1

Blocks have 16 slots unless `block_size` is given. No torch is needed: all answers are integers.
"""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """The sizes of a model. Those of SmolLM2 are the defaults."""

    layers: int = 30
    hidden: int = 576
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    intermediate: int = 1536
    vocabulary: int = 49152


# ---- chapter 1 -------------------------------------------------------------------------------------------------------


def rows_computed(num_prompt: int, num_new: int) -> int:
    """1.1 How many tokens the plain loop sends through the layers for one request, summed over all passes."""
    raise NotImplementedError


def flops(num_tokens: int, shape: Shape) -> int:
    """1.2 Floating-point operations of all matrix products in one call of engine1_plain.forward: 2 * a * b * c for
    [a, b] @ [b, c]."""
    raise NotImplementedError


def kv_bytes(shape: Shape) -> int:
    """1.3 Bytes of the keys and values of one token in all layers, with 4 bytes for a number."""
    raise NotImplementedError


# ---- chapter 2 -------------------------------------------------------------------------------------------------------


def owner_of(slot: int, block_tables: list[list[int]], num_tokens: list[int]) -> tuple[int, int] | None:
    """2.1 (index of the sequence, position of its token) that is stored in this slot; None if the slot holds no token.
    Sequence i has stored num_tokens[i] tokens and has the block table block_tables[i]."""
    raise NotImplementedError


def empty_slots(num_prompt: int, num_new: int) -> int:
    """2.2 Slots in the blocks of a sequence that hold no token, after the step that gave its last new token."""
    raise NotImplementedError


def num_passes(num_prompt: int, num_new: int, budget: int) -> int:
    """2.3 Steps that engine 2 takes for one request that is alone, with at most `budget` tokens a step."""
    raise NotImplementedError


# ---- chapter 3 -------------------------------------------------------------------------------------------------------


def findable_blocks(num_prompt: int, num_new: int, block_size: int) -> int:
    """3.1 How many blocks of a sequence another one can find in the prefix cache, when num_new >= 1 new tokens are
    known and the next step has not been planned."""
    raise NotImplementedError


def cached_tokens(prompt: list[int], earlier: list[int], block_size: int) -> int:
    """3.2 How many tokens of `prompt` are found in the prefix cache, if the prompt `earlier` was computed before."""
    raise NotImplementedError


def num_steps() -> int:
    """3.3 Three requests arrive together: prompts of 37, 20 and 5 tokens that have nothing in common, 4, 6 and 8 new
    tokens. How many steps does nano-vLLM's scheduler take with max_num_batched_tokens=16 until all have ended?"""
    raise NotImplementedError
