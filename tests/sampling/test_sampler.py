"""sample and prompt_logprobs: distributions, reproducibility, logprobs, broken rows."""

import math

import numpy as np
import pytest
import torch

from nanovllm.sampling.rows import SamplingRow
from nanovllm.sampling.sampler import PROMPT_CHUNK, prompt_logprobs, sample
from nanovllm.sampling_params import SamplingParams

INF, NAN = float("inf"), float("nan")


def row(prompt=(), output=(), stop_ids=(), bad_words_ids=(), seed=0, **params):
    ids = np.array([*prompt, *output], np.int32)
    return SamplingRow(SamplingParams(**params), seed, ids, len(prompt), tuple(stop_ids), tuple(bad_words_ids))


def greedy(**kwargs):
    return row(temperature=0.0, **kwargs)


# --- distributions ---------------------------------------------------------------------------------------------------

# --- greedy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_ties_pick_the_lowest_id(dtype):
    x = torch.full((3, 1001), -1.0, dtype=dtype)
    x[0, [400, 900]] = 2.0
    x[1, :] = 0.0
    x[2, [1000, 999]] = 1.0
    assert sample(x.clone(), [greedy()] * 3).token_ids == [400, 0, 999]
    # the same through the general path, and for top_k=1, which is greedy too
    mixed = [greedy(logit_bias={5: 0.5}), row(top_k=1, seed=3), row(top_k=1, temperature=50.0, seed=9)]
    assert sample(x.clone(), mixed).token_ids == [400, 0, 999]


def test_greedy_sees_edits_but_not_filters():
    x = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    cases = [
        (greedy(top_k=2, top_p=0.1, min_p=0.5), 0),
        (greedy(bad_words_ids=[(0,)]), 1),
        (greedy(stop_ids=(0, 1), min_tokens=1), 2),
        (greedy(allowed_token_ids=[3]), 3),
        (greedy(logit_bias={2: 10.0}), 2),
        (greedy(prompt=(0,), repetition_penalty=4.0), 1),
        (greedy(prompt=(0,), frequency_penalty=2.0), 0),
        (greedy(output=(0,), frequency_penalty=2.0), 1),
        (greedy(bad_words_ids=[(0,)], logit_bias={0: 100.0}), 1),  # a bias cannot lift a ban
    ]
    assert [sample(x.clone(), [r]).token_ids[0] for r, _ in cases] == [token for _, token in cases]
    assert sample(x.repeat(len(cases), 1), [r for r, _ in cases]).token_ids == [token for _, token in cases]


def test_no_rows():
    assert sample(torch.zeros(0, 5), []).token_ids == []


# --- reproducibility -------------------------------------------------------------------------------------------------


def mixed_rows():
    kinds = [
        {},
        {"temperature": 0.3},
        {"temperature": 0.0},
        {"top_k": 5},
        {"top_k": 40, "top_p": 0.7, "temperature": 1.3},
        {"top_p": 0.95},
        {"top_p": 0.2, "logprobs": 3},
        {"min_p": 0.1},
        {"min_p": 0.02, "temperature": 2.0, "top_k": 700},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0.0, "frequency_penalty": 1.0},
        {"allowed_token_ids": range(3, 900, 7)},
        {"logit_bias": {7: 4.0, 900: -100.0}},
        {"temperature": 0.0, "logprobs": 0},
        {"min_tokens": 9, "logprobs": 2},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05},
    ]
    rng = np.random.default_rng(0)
    return [
        row(
            prompt=rng.integers(0, 1003, 5 + i),
            output=rng.integers(0, 1003, i),
            stop_ids=(1, 2),
            bad_words_ids=[(4,)] if i % 5 == 0 else (),
            seed=int(rng.integers(0, 2**63)),
            **params,
        )
        for i, params in enumerate(kinds)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_neighbours(dtype):
    rows = mixed_rows()
    rng = np.random.default_rng(1)
    for trial in range(5):
        x = (torch.randn(16, 1003, generator=torch.Generator().manual_seed(trial)) * 3).to(dtype)
        alone = [sample(x[i : i + 1].clone(), [r]) for i, r in enumerate(rows)]
        for _ in range(4):
            order = rng.permutation(16)[: int(rng.integers(2, 17))].tolist()
            together = sample(x[order].clone(), [rows[i] for i in order])
            assert together.token_ids == [alone[i].token_ids[0] for i in order]
            for report, i in zip(together.logprobs, order):
                single = alone[i].logprobs[0]
                assert (report is None) == (single is None)
                if report is not None:
                    assert (report.token_ids, report.positions) == (single.token_ids, single.positions)


def test_seed_and_position_decide():
    x = torch.zeros(1, 5000)
    draw = lambda seed, length: sample(x.clone(), [row(prompt=(0,) * length, seed=seed)]).token_ids[0]  # noqa: E731
    assert draw(1, 3) == draw(1, 3)
    assert len({draw(1, n) for n in range(50)}) > 45
    assert len({draw(s, 3) for s in range(50)}) > 45
    # prompt or output makes no difference: a preempted sequence that comes back as a longer prompt goes on as before
    assert draw(1, 3) == sample(x.clone(), [row(prompt=(0,), output=(0, 0), seed=1)]).token_ids[0]


# --- logprobs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_unedited_logits(dtype):
    x = (torch.randn(4, 301, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)
    reference = x.float().log_softmax(-1)
    rows = [
        greedy(logprobs=4),
        row(seed=5, logprobs=0, temperature=2.0),
        row(seed=6),
        row(seed=7, logprobs=3, top_k=40, temperature=1.5, logit_bias={int(x[3].argmin()): 100.0}),
    ]
    out = sample(x.clone(), rows)
    assert out.logprobs[2] is None
    for i, num in ((0, 4), (1, 0), (3, 3)):
        report, token = out.logprobs[i], out.token_ids[i]
        assert report.token_ids[0] == token
        assert report.positions[0] == int((reference[i] > reference[i, token]).sum()) + 1
        assert report.logprobs == pytest.approx(reference[i, report.token_ids].tolist(), abs=1e-6)
        best = reference[i].sort(descending=True, stable=True).indices[:num].tolist()
        assert report.token_ids[1:] == [t for t in best if t != token]
        assert report.positions[1:] == [best.index(t) + 1 for t in report.token_ids[1:]]
    assert len(out.logprobs[0].token_ids) == 4  # the greedy token is one of the four
    assert out.token_ids[3] == int(x[3].argmin())  # bias made the least likely token certain
    assert out.logprobs[3].positions[0] > 290
    assert len(out.logprobs[3].token_ids) == 4


def test_more_logprobs_than_tokens():
    out = sample(torch.tensor([[0.0, 1.0, 0.5]]), [greedy(logprobs=20)])
    assert (out.logprobs[0].token_ids, out.logprobs[0].positions) == ([1, 2, 0], [1, 2, 3])


@pytest.mark.parametrize("num", [1, PROMPT_CHUNK - 1, PROMPT_CHUNK, PROMPT_CHUNK + 1, 2 * PROMPT_CHUNK + 3])
def test_prompt_logprobs(num):
    generator = torch.Generator().manual_seed(num)
    x = torch.randn(num, 77, generator=generator)
    ids = torch.randint(0, 77, (num,), generator=generator, dtype=torch.int32)
    before = x.clone()
    reports = prompt_logprobs(x, ids, 2)
    reference = x.log_softmax(-1)
    assert torch.equal(x, before)
    assert len(reports) == num
    for i, report in enumerate(reports):
        best = reference[i].topk(2).indices.tolist()
        assert report.token_ids == [int(ids[i]), *(t for t in best if t != int(ids[i]))]
        assert report.logprobs == pytest.approx(reference[i, report.token_ids].tolist(), abs=1e-6)
        assert report.positions[0] == int((reference[i] > reference[i, ids[i]]).sum()) + 1


def test_prompt_logprobs_of_broken_positions():
    x = torch.randn(3, 9, generator=torch.Generator().manual_seed(1))
    x[1, 4] = NAN
    before = x.clone()
    reports = prompt_logprobs(x, torch.tensor([0, 4, 2]), 1)
    assert x.nan_to_num(7.0).equal(before.nan_to_num(7.0))  # the caller's tensor is not mended in place
    assert reports[1].logprobs[0] == -INF
    assert not any(math.isnan(value) for report in reports for value in report.logprobs)


# --- broken and impossible rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.5, "temperature": 0.7}, {"logprobs": 2}])
def test_a_broken_row_changes_no_other(params):
    x = torch.randn(5, 50, generator=torch.Generator().manual_seed(2))
    rows = [row(seed=i, **params) for i in range(5)]
    sound = sample(x.clone(), rows)
    broken = x.clone()
    broken[1, 10:] = NAN
    broken[2, 7] = INF
    broken[3] = NAN
    out = sample(broken, rows)
    assert [out.token_ids[i] for i in (0, 4)] == [sound.token_ids[i] for i in (0, 4)]
    assert out.token_ids[1] < 10  # NaN is never drawn
    assert out.token_ids[2] == 7  # +inf always
    assert out.token_ids[3] == 0  # nothing left
    for report in out.logprobs:
        assert report is None or not any(map(math.isnan, report.logprobs))
    if params == {"temperature": 0.0}:
        assert out.token_ids[1] == int(x[1, :10].argmax())


def test_minus_inf_from_the_model_is_a_plain_ban():
    x = torch.tensor([[-INF, 1.0, -INF, 1.0]])
    assert {sample(x.clone(), [row(seed=s)]).token_ids[0] for s in range(50)} == {1, 3}
    assert sample(x.clone(), [greedy()]).token_ids == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_everything_banned_takes_the_lowest_allowed_id(temperature):
    x = torch.zeros(2, 8)
    stuck = row(temperature=temperature, allowed_token_ids=[99, 5, 3], stop_ids=(3, 5), min_tokens=1)
    assert sample(x.clone(), [stuck, row(seed=1)]).token_ids[0] == 3
    outside = row(temperature=temperature, allowed_token_ids=[99])
    assert sample(x.clone(), [outside, row(seed=1)]).token_ids[0] == 0


def test_extremes():
    x = torch.tensor([[0.0, 5.0, 5.0, -3.0, 1.0]])
    single = sample(x.clone(), [row(allowed_token_ids=[3], top_k=3, top_p=0.1)])
    assert single.token_ids == [3]
    assert {sample(x.clone(), [row(min_p=1.0, seed=s)]).token_ids[0] for s in range(40)} == {1, 2}
    assert {sample(x.clone(), [row(top_p=1e-12, seed=s)]).token_ids[0] for s in range(40)} == {1}
    assert len({sample(x.clone(), [row(top_k=10**9, temperature=100.0, seed=s)]).token_ids[0] for s in range(90)}) == 5
    huge = torch.tensor([[3e38, -3e38, 2.9e38]])
    for params in ({"temperature": 1e-5}, {"repetition_penalty": 1e-300}, {"repetition_penalty": 100.0, "min_p": 0.9}):
        token = sample(huge.clone(), [row(prompt=(0, 1, 2), **params)]).token_ids[0]
        assert 0 <= token < 3


def test_logits_beyond_1e30_are_the_same_alone_and_in_company():
    x = torch.tensor([[2e38, 3e38, 0.0], [-3e38, -2e38, -3e38], [0.0, 0.0, 9.0]])
    for params in ({"temperature": 0.0}, {"temperature": 1e-5}, {"temperature": 1e-5, "top_p": 0.9, "min_p": 0.1}):
        rows = [row(seed=i, **params) for i in range(2)]
        alone = [sample(x[i : i + 1].clone(), [rows[i]]).token_ids[0] for i in range(2)]
        assert sample(x.clone(), [*rows, row(logprobs=1)]).token_ids[:2] == alone
        assert alone[0] in (0, 1)
        assert alone[1] == 0


def test_non_contiguous_logits():
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(4))
    rows = [row(seed=i, bad_words_ids=[(i,)], logit_bias={20: 1.0}) for i in range(6)]
    wide = x.t().contiguous().t()
    assert not wide.is_contiguous()
    assert sample(wide, rows).token_ids == sample(x, rows).token_ids
