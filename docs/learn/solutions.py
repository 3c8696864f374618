"""Answers to exercises.py, with the reasons.

python docs/learn/check.py --answers docs/learn/solutions.py
"""

from __future__ import annotations

from exercises import Shape

# ---- chapter 1 -------------------------------------------------------------------------------------------------------


def rows_computed(num_prompt: int, num_new: int) -> int:
    """Pass i feeds the prompt and the i tokens before it. A cache feeds num_prompt + num_new - 1 tokens in all; the
    difference is what the plain loop repeats, and it grows with the square of num_new."""
    return num_new * num_prompt + num_new * (num_new - 1) // 2


def flops(num_tokens: int, shape: Shape) -> int:
    """Two operations for each weight and token, except for the head, which sees the last token only. On top come the
    scores and the weighted sum, for every pair of tokens: masked scores are computed and thrown away."""
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = shape.hidden * (query + 2 * kv) + query * shape.hidden + 3 * shape.hidden * shape.intermediate
    pairs = 2 * num_tokens * num_tokens * query
    return shape.layers * 2 * (num_tokens * weights + pairs) + 2 * shape.hidden * shape.vocabulary


def kv_bytes(shape: Shape) -> int:
    """46,080 for SmolLM2. With 9 instead of 3 key and value heads it would be three times as many: that is what
    grouped-query attention saves."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * 4


# ---- chapter 2 -------------------------------------------------------------------------------------------------------


def owner_of(slot: int, block_tables: list[list[int]], num_tokens: list[int]) -> tuple[int, int] | None:
    """The block's place in the table gives the position, not its number: neighbours in a table need not be neighbours
    in memory. A slot behind the last token belongs to a sequence but holds nothing."""
    block, offset = divmod(slot, 16)
    for index, table in enumerate(block_tables):
        if block in table:
            position = table.index(block) * 16 + offset
            return (index, position) if position < num_tokens[index] else None
    return None


def empty_slots(num_prompt: int, num_new: int) -> int:
    """The last new token is sampled and never fed, so num_prompt + num_new - 1 tokens are stored. Fewer than 16 slots
    are empty, however long the sequence is: that is all the waste of a paged cache."""
    return -(num_prompt + num_new - 1) % 16


def num_passes(num_prompt: int, num_new: int, budget: int) -> int:
    """The step that feeds the last tokens of the prompt gives the first new token."""
    return -(-num_prompt // budget) + num_new - 1


# ---- chapter 3 -------------------------------------------------------------------------------------------------------


def findable_blocks(num_prompt: int, num_new: int, block_size: int) -> int:
    """A block can be shared when it is full and its keys and values are computed or planned. The newest token is known,
    but the step that computes its key and value has not been planned."""
    return (num_prompt + num_new - 1) // block_size


def cached_tokens(prompt: list[int], earlier: list[int], block_size: int) -> int:
    """Whole blocks from the beginning, as far as both prompts are equal. The last token is never matched, even if its
    block is there: the step computes the logits after it, and a step that feeds nothing computes nothing. So the same
    prompt of 32 tokens finds 16, not 32."""
    common = 0
    for a, b in zip(prompt[:-1], earlier):
        if a != b:
            break
        common += 1
    return common // block_size * block_size


def num_steps() -> int:
    """Steps 1 and 2 feed 16 tokens of the first prompt each. Step 3 feeds its last 5 and 11 of the second. Step 4 feeds
    1 + 9 + 5: a decode, the rest of the second prompt, the third. From there on every request gets one token a step,
    and the third, which got its first of 8 in step 4, ends in step 11."""
    return 11
