"""Each logits step against cases worked out by hand."""

import numpy as np
import pytest
import torch

from nanovllm.sampling import steps
from nanovllm.sampling.rows import SamplingRow
from nanovllm.sampling_params import SamplingParams

INF = float("inf")


def row(prompt=(), output=(), stop_ids=(), bad_words_ids=(), seed=0, **params):
    ids = np.array([*prompt, *output], np.int32)
    return SamplingRow(SamplingParams(**params), seed, ids, len(prompt), tuple(stop_ids), tuple(bad_words_ids))


def logits(*rows):
    return torch.tensor(rows, dtype=torch.float32)


def kept(out):
    """Ids left in each row."""
    return [torch.nonzero(r > -INF).flatten().tolist() for r in out]


def test_allowed_tokens():
    x = logits([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4])
    rows = [row(allowed_token_ids=[2, 0, 2]), row(), row(allowed_token_ids=[3, 4, 10**9])]
    out = steps.allowed_tokens(x, rows)
    assert out.tolist() == [[1, -INF, 3, -INF], [1, 2, 3, 4], [-INF, -INF, -INF, 4]]


@pytest.mark.parametrize(
    ("word", "prompt", "output", "banned"),
    [
        ((2,), (), (), True),  # one token: always
        ((1, 2), (), (1,), True),
        ((1, 2), (), (0, 1), True),
        ((1, 2), (), (1, 0), False),
        ((1, 2), (1,), (), False),  # the prompt does not count
        ((1, 2), (), (), False),
        ((0, 1, 2), (0,), (1,), False),  # nor half of the prefix in it
        ((0, 1, 2), (), (0, 1), True),
        ((0, 1, 2), (), (3, 0, 1), True),
        ((0, 1, 2), (), (0, 3, 1), False),
        ((0, 1, 99), (), (0, 1), False),  # last token outside the vocabulary
    ],
)
def test_bad_words(word, prompt, output, banned):
    rows = [row(), row(prompt, output, bad_words_ids=[(3, 3, 3, 3, 0), word])]
    out = steps.bad_words(torch.zeros(2, 4), rows)
    assert kept(out) == [[0, 1, 2, 3], [0, 1, 3] if banned else [0, 1, 2, 3]]


def test_min_tokens_bans_stops_until_reached():
    rows = [row((9, 9), (1,) * n, stop_ids=(0, 3, 99), min_tokens=2) for n in (0, 1, 2, 3)]
    out = steps.min_tokens(torch.zeros(4, 4), rows)
    assert kept(out) == [[1, 2], [1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_logit_bias():
    rows = [row(logit_bias={1: 2.5, 99: 1.0}), row(), row(logit_bias={"0": -100})]
    out = steps.logit_bias(logits([0, 1, 2], [0, 1, 2], [0, 1, 2]), rows)
    assert out.tolist() == [[0, 3.5, 2], [0, 1, 2], [-100, 1, 2]]


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output():
    rows = [row(prompt=(0, 0), output=(1, 77), repetition_penalty=2.0), row(prompt=(0,), output=(1,))]
    out = steps.penalties(logits([4, -4, 4, -4], [4, -4, 4, -4]), rows)
    assert out.tolist() == [[2, -8, 4, -4], [4, -4, 4, -4]]


def test_frequency_and_presence_count_output_only():
    both = row(prompt=(0, 1, 99), output=(1, 2, 2, 2, 77), frequency_penalty=0.5, presence_penalty=1.0)
    negative = row(prompt=(0,), output=(1,), presence_penalty=-2.0)
    no_output = row(prompt=(0,), presence_penalty=2.0)
    out = steps.penalties(torch.zeros(3, 4), [both, negative, no_output])
    assert out.tolist() == [[0, -1.5, -2.5, 0], [0, 2, 0, 0], [0, 0, 0, 0]]


def test_penalties_together_repetition_first():
    r = row(prompt=(0,), output=(1, 1), repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5)
    assert steps.penalties(logits([4, 4, 4]), [r]).tolist() == [[2, 2 - 0.5 - 0.5, 4]]


def test_steps_run_only_when_used():
    assert steps.in_use(steps.EDITS, [row(), row(temperature=0.5, top_k=3)]) == []
    used = [
        row(allowed_token_ids=[1]),
        row(bad_words_ids=[(1,)]),
        row(min_tokens=1),
        row(logit_bias={1: 1.0}),
        row(presence_penalty=0.1),
        row(structured_outputs={"regex": "a"}),
    ]
    assert [steps.in_use(steps.EDITS, [row(), r]) for r in used] == [[step] for step in steps.EDITS]
    assert steps.in_use(steps.EDITS, [row(output=(1,), min_tokens=1)]) == []
