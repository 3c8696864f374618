"""Each logits step against cases worked out by hand."""

import math

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


def test_temperature():
    rows = [row(temperature=2.0), row(temperature=1.0), row(temperature=1e-5)]
    out = steps.temperature(logits([0, -4, -INF], [0, -4, -1], [0, -1e38, -1e-5]), rows)
    assert out.tolist() == [[0, -2, -INF], [0, -4, -1], [0, -INF, pytest.approx(-1, rel=1e-5)]]


def test_min_p():
    half, tenth = math.log(0.5), math.log(0.1)
    x = logits([0, half, tenth, half], [0, half, tenth, half], [0, half, tenth, 0], [0, half, tenth, half])
    rows = [row(min_p=0.4), row(min_p=0.05), row(min_p=1.0), row()]
    assert kept(steps.min_p(x, rows)) == [[0, 1, 3], [0, 1, 2, 3], [0, 3], [0, 1, 2, 3]]


def shifted(probs):
    x = torch.tensor(probs, dtype=torch.float64).log()
    return (x - x.max()).float().unsqueeze(0)


PROBS = [0.1, 0.4, 0.05, 0.25, 0.2]  # by probability: ids 1, 3, 4, 0, 2


@pytest.mark.parametrize(
    ("params", "ids"),
    [
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_k": 6}, [0, 1, 2, 3, 4]),
        ({"top_k": 10**9}, [0, 1, 2, 3, 4]),
        ({"top_p": 1e-9}, [1]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.64}, [1, 3]),
        ({"top_p": 0.66}, [1, 3, 4]),
        ({"top_p": 0.94}, [0, 1, 3, 4]),
        ({"top_p": 0.96}, [0, 1, 2, 3, 4]),
        # after top_k=3 the shares are 0.4, 0.25, 0.2 of 0.85 = 0.47, 0.29, 0.24
        ({"top_k": 3, "top_p": 0.46}, [1]),
        ({"top_k": 3, "top_p": 0.75}, [1, 3]),
        ({"top_k": 3, "top_p": 0.78}, [1, 3, 4]),
    ],
)
def test_top_k_top_p(params, ids):
    assert kept(steps.top_k_top_p(shifted(PROBS), [row(**params)])) == [ids]
    among = torch.cat([shifted(PROBS)] * 3)
    out = steps.top_k_top_p(among, [row(), row(**params), row(top_k=2)])
    assert kept(out) == [[0, 1, 2, 3, 4], ids, [1, 3]]


def test_top_ties_keep_the_lowest_ids():
    even = torch.zeros(1, 10)
    assert kept(steps.top_k_top_p(even.clone(), [row(top_k=4)])) == [[0, 1, 2, 3]]
    assert kept(steps.top_k_top_p(even.clone(), [row(top_p=0.5)])) == [[0, 1, 2, 3, 4]]  # exactly 0.5 is enough
    assert kept(steps.top_k_top_p(even.clone(), [row(top_p=0.51)])) == [[0, 1, 2, 3, 4, 5]]
    signed_zeros = logits([-0.0, 0.0, -1, -0.0])
    assert kept(steps.top_k_top_p(signed_zeros, [row(top_k=2)])) == [[0, 1]]


def test_top_p_after_a_filter_sees_only_what_is_left():
    x = shifted(PROBS)
    x[0, 3] = -INF  # left: 0.4, 0.2, 0.1, 0.05 of 0.75
    assert kept(steps.top_k_top_p(x, [row(top_p=0.7)])) == [[1, 4]]  # 0.53, then 0.8
    single = logits([-INF, -INF, 0, -INF])
    assert kept(steps.top_k_top_p(single, [row(top_p=0.999, top_k=3)])) == [[2]]


@pytest.mark.parametrize("vocab", [steps.FIRST_WIDTH - 1, steps.FIRST_WIDTH, steps.FIRST_WIDTH + 1, 5000])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.9, 0.999])
def test_top_p_equals_a_full_sort_however_flat(vocab, share):
    generator = torch.Generator().manual_seed(vocab)
    x = torch.randn(4, vocab, generator=generator) * torch.tensor([[0.0], [0.1], [1.0], [5.0]])
    x = x - x.amax(-1, keepdim=True)
    out = steps.top_k_top_p(x.clone(), [row(top_p=share)] * 4)
    order = x.sort(dim=-1, descending=True, stable=True).indices
    probs = x.double().softmax(-1)
    for i in range(4):
        mass = probs[i, order[i]].cumsum(0)
        # double sums and our integers may differ by one token at the border, not more
        expected = int((mass < share - 1e-6).sum()) + 1, int((mass < share + 1e-6).sum()) + 1
        ids = kept(out)[i]
        assert expected[0] <= len(ids) <= expected[1]
        assert ids == sorted(order[i, : len(ids)].tolist())


def test_order_keys_sort_like_floats():
    values = torch.tensor([[0.0, -0.0, 1e-45, -1e-45, 3.5, -3.5, INF, -INF, 3.5, 1e38, -1e38, -3.5]])
    ids = steps.ids_of_keys(steps.order_keys(values).topk(12).values, 12)
    assert ids.tolist() == values.sort(dim=-1, descending=True, stable=True).indices.tolist()


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
    for r, step in zip([row(temperature=0.5), row(min_p=0.1), row(top_p=0.9)], steps.FILTERS):
        assert steps.in_use(steps.FILTERS, [r, row()]) == [step]
