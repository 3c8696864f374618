"""Every draw against the definition, written again here in float64, with a stable sort and no shortcut."""

import numpy as np
import pytest
import torch
from scipy import stats

from nanovllm.ops import sampling
from nanovllm.sampling import sampler
from nanovllm.sampling.rows import SamplingRow
from nanovllm.sampling.sampler import sample
from nanovllm.sampling_params import SamplingParams

INF, NAN = float("inf"), float("nan")
MASK = np.uint64(0xFFFFFFFF)
TILE = 2048


def philox(seed, index, position, level):
    """Philox4x32-10 of Salmon et al. (2011): key seed, counter (index // 4, position, level, 0), word index % 4."""
    index = np.asarray(index, np.uint64)
    key = [np.uint64(seed % 2**32), np.uint64(seed % 2**64 >> 32)]
    c = [index // np.uint64(4), *(np.full(index.shape, n, np.uint64) for n in (position, level, 0))]
    for _ in range(10):
        low, high = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [high >> np.uint64(32) ^ c[1] ^ key[0], high & MASK, low >> np.uint64(32) ^ c[3] ^ key[1], low & MASK]
        key = [key[0] + np.uint64(0x9E3779B9) & MASK, key[1] + np.uint64(0xBB67AE85) & MASK]
    return np.choose((index % np.uint64(4)).astype(np.int64), c)


def gumbel(*counter):
    return -np.log(-np.log(((philox(*counter) >> np.uint64(9)) + 0.5) * 2.0**-23))


def expected_kept(logits, params):
    """Ids left by min_p, then top_k, then top_p, most likely first."""
    x = np.asarray(logits, np.float64)
    order = np.argsort(-x, kind="stable")
    order = order[x[order] > -INF]
    scaled = (x[order] - x[order[0]]) / params.temperature
    order = order[scaled >= np.log(np.maximum(params.min_p, 1e-300))][: params.top_k or None]
    if params.top_p < 1.0:
        weights = np.exp(scaled[: len(order)])
        before = np.cumsum(weights) - weights
        order = order[before < params.top_p * weights.sum()]
    return order


def has_filter(params):
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def expected_token(logits, params, seed, position):
    """The token, and by how much it wins."""
    x = np.asarray(logits, np.float64)
    if has_filter(params):
        ids = expected_kept(x, params)
    else:
        tiles = [x[start : start + TILE] / params.temperature for start in range(0, len(x), TILE)]
        mass = np.array([np.logaddexp.reduce(tile) for tile in tiles])
        tile, gap = best(mass + gumbel(seed, np.arange(len(tiles)), position, 0))
        ids = np.arange(tile * TILE, min((tile + 1) * TILE, len(x)))
    winner, margin = best(x[ids] / params.temperature + gumbel(seed, ids, position, 1))
    return int(ids[winner]), margin if has_filter(params) else min(margin, gap)


def best(scores):
    winner = int(np.argmax(scores))
    return winner, np.max(np.delete(scores, winner), initial=-INF) * -1 + scores[winner]


def row(seed=0, position=1, **params):
    return SamplingRow(SamplingParams(**params), seed, np.zeros(position, np.int32), 1)


def many(logits, rows):
    return sample(torch.as_tensor(np.asarray(logits, np.float32)).expand(len(rows), -1).clone(), rows).token_ids


FILTERS = {
    "none": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 7},
    "top_k of more than one pass": {"top_k": 100, "temperature": 1.5},
    "top_k of more than a few tiles": {"top_k": 700, "temperature": 3.0},
    "top_p": {"top_p": 0.9},
    "top_p flat": {"top_p": 0.97, "temperature": 5.0},
    "min_p": {"min_p": 0.05},
    "min_p flat": {"min_p": 0.01, "temperature": 5.0},
    "top_k top_p": {"top_k": 20, "top_p": 0.95, "temperature": 0.7},
    "top_k min_p": {"top_k": 9, "min_p": 0.1, "temperature": 2.0},
    "top_p min_p": {"top_p": 0.8, "min_p": 0.02, "temperature": 2.0},
    "top_p min_p flat": {"top_p": 0.9, "min_p": 0.003, "temperature": 6.0},
    "all": {"top_k": 30, "top_p": 0.9, "min_p": 0.02, "temperature": 1.7},
    "every token": {"top_k": 10**9},
}


@pytest.mark.parametrize("vocab", [5, 64, 1003, 2048, 5001])
@pytest.mark.parametrize("name", FILTERS)
def test_the_draw_is_the_one_of_the_definition(name, vocab):
    """Logits are multiples of 1/8: ties in plenty, and no draw that two roundings could see differently is counted."""
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((24, vocab)) * 16).round() / 8
    logits[3, ::2] = -INF
    logits[5] = logits[5].round()
    seeds = [int(seed) for seed in rng.integers(-(2**63), 2**63, 24)]
    positions = [int(position) for position in rng.integers(1, 5000, 24)]
    rows = [row(seed % 2**64, position, **FILTERS[name]) for seed, position in zip(seeds, positions)]
    got = sample(torch.tensor(logits, dtype=torch.float32), rows).token_ids
    compared = 0
    for i in range(24):
        token, margin = expected_token(logits[i], rows[i].params, seeds[i], positions[i])
        if margin > 1e-4:
            assert got[i] == token, i
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("params", [{"top_p": 0.3001}, {"top_p": 0.9001, "min_p": 0.5}])
@pytest.mark.parametrize("shape", ["all equal", "two values", "signed zeros"])
def test_more_tokens_than_candidates_and_all_of_them_ties(shape, params):
    logits = SHAPES[shape](np.random.default_rng(0), 4001)
    rows = [row(seed, 3, **params) for seed in range(40)]
    drawn = [expected_token(logits, r.params, r.seed, 3) for r in rows]
    clear = [i for i, (_, margin) in enumerate(drawn) if margin > 1e-4]
    got = many(logits, rows)
    assert [got[i] for i in clear] == [drawn[i][0] for i in clear]
    assert len(clear) > 35


def test_a_few_draws_never_change():
    """Another constant, word or level would change every seeded output. The closest of these is won by 0.004."""
    logits = (np.arange(5000) * 7919 % 5000) / 800
    rows = [row(seed, 40, **params) for seed in (0, 7, 2**64 - 3) for params in ({}, {"top_k": 50}, {"top_p": 0.5})]
    assert many(logits, rows) == [1694, 1766, 2302, 2266, 3025, 2266, 3215, 346, 3215]


# --- the noise --------------------------------------------------------------------------------------------------------

N = 20_000
STREAMS = {
    "tokens": (0, np.arange(N), 5),
    "positions": (0, 3, np.arange(N)),
    "positions of a large seed": (-3, 3, np.arange(1000, 1000 + N)),
    "adjacent seeds": (np.arange(N), 2, 17),
    "seed and position together": (np.arange(N), 1, np.arange(N)),
    "seed up, position down": (np.arange(N), 0, np.arange(N, 0, -1)),
    "seeds far apart by powers of two": (np.arange(N) << 40, 7, 3),
}


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("name", STREAMS)
def test_noise_is_uniform_between_neighbours(name, level):
    arguments = torch.broadcast_tensors(*(torch.as_tensor(part) for part in STREAMS[name]))
    u = (sampling.philox(*arguments, level).numpy() + 0.5) / 2**32
    assert stats.kstest(u, "uniform").pvalue > 1e-4
    grid = np.histogram2d(u[:-1:2], u[1::2], bins=10, range=[[0, 1], [0, 1]])[0]
    assert stats.chisquare(grid.ravel()).pvalue > 1e-4


def test_noise_is_finite_at_the_ends():
    ends = sampling.gumbel(torch.tensor([0, 2**32 - 1]))
    assert ends.tolist() == pytest.approx([-np.log(24 * np.log(2)), 24 * np.log(2)], rel=1e-5)


# --- what filters leave ----------------------------------------------------------------------------------------------


def kept(logits, params, width=None):
    """The ids that are left, most likely first; None for rows that `width` candidates do not settle."""
    x = torch.as_tensor(np.asarray(logits), dtype=torch.float32)
    vocab = x.shape[1]
    column = lambda values, dtype: torch.tensor(list(values), dtype=dtype).unsqueeze(1)  # noqa: E731
    scales = 1.0 / column((p.temperature for p in params), torch.float32)
    limits = column((min(p.top_k or vocab, vocab) for p in params), torch.int64)
    top_ps, min_ps = column((p.top_p for p in params), torch.float64), column((p.min_p for p in params), torch.float32)
    weights = sampling.integer_weights((x - x.amax(-1, keepdim=True)) * scales).double()
    totals = torch.where(limits == vocab, weights.sum(-1, keepdim=True), INF)
    ids, counts, settled = sampling.kept_ids(x, scales, limits, top_ps, min_ps, totals, width or vocab)
    lists = zip(ids.tolist(), counts.squeeze(1).tolist(), settled.tolist())
    return [row[:count] if complete else None for row, count, complete in lists]


def settled_by_rounding(logits, params):
    """Whether two roundings could cut this row in two places."""
    x = np.asarray(logits, np.float64)
    x = np.sort(x[x > -INF])[::-1]
    scaled = (x - x[0]) / params.temperature
    if params.min_p > 0 and np.abs(scaled - np.log(params.min_p)).min() < 1e-5:
        return True
    scaled = scaled[scaled >= np.log(max(params.min_p, 1e-300))][: params.top_k or None]
    before = np.cumsum(np.exp(scaled)) / np.exp(scaled).sum()
    return params.top_p < 1 and np.abs(before - params.top_p).min() < 1e-6


SHAPES = {
    "random": lambda rng, n: rng.standard_normal(n) * 3,
    "ties": lambda rng, n: rng.integers(-4, 5, n) / 2,
    "two values": lambda rng, n: rng.integers(0, 2, n) * 1.0,
    "all equal": lambda rng, n: np.zeros(n),
    "signed zeros": lambda rng, n: np.where(rng.random(n) < 0.5, -0.0, 0.0),
    "one token holds 0.999": lambda rng, n: np.where(np.arange(n) == rng.integers(n), np.log(999.0 * n), 0.0),
    "-inf": lambda rng, n: np.where(rng.random(n) < 0.7, -INF, rng.integers(0, 9, n)),
    "almost flat": lambda rng, n: rng.standard_normal(n) * 0.01,
}


@pytest.mark.parametrize("vocab", [1, 31, 64, 700, 2500])
@pytest.mark.parametrize("shape", SHAPES)
def test_kept_sets_are_those_of_a_stable_sort(shape, vocab):
    rng = np.random.default_rng(vocab)
    logits = np.stack([SHAPES[shape](rng, vocab) for _ in range(60)]).astype(np.float32)
    logits[:, 0] = np.where(np.isneginf(logits).all(-1), 0.0, logits[:, 0])
    ks = [0, 0, 0, 1, 2, 5, 20, 64, 100, max(vocab - 1, 1), vocab, vocab + 1]
    params = [
        SamplingParams(
            top_k=int(rng.choice(ks)),
            top_p=float(rng.choice([1e-6, 0.1, 0.51237, 0.9123, 0.99917, 1.0, 1.0])),
            min_p=float(rng.choice([0.0, 0.0, 0.0, 1e-5, 0.1234, 1.0])),
            temperature=float(rng.choice([0.3, 1.0, 2.5])),
        )
        for _ in range(60)
    ]
    everything = kept(logits, params)
    few = {width: kept(logits, params, width) for width in (1, 20, 64, 512) if width <= vocab}
    compared = 0
    for i, (x, p) in enumerate(zip(logits, params)):
        assert everything[i] is not None
        assert p.top_k == 0 or len(everything[i]) <= p.top_k
        for width, rows in few.items():  # fewer candidates give the same, or none: min_p is not in these totals
            if p.min_p == 0.0 or p.top_p == 1.0:
                assert rows[i] in (None, everything[i]), (width, p)
                assert rows[i] is not None or len(everything[i]) >= width or p.top_k > width
        if not settled_by_rounding(x, p):
            assert everything[i] == expected_kept(x, p).tolist(), p
            compared += 1
    assert compared >= 30


PROBS = [0.1, 0.4, 0.05, 0.25, 0.2]  # by probability: ids 1, 3, 4, 0, 2


@pytest.mark.parametrize(
    ("params", "ids"),
    [
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_k": 5}, [1, 3, 4, 0, 2]),
        ({"top_k": 10**9}, [1, 3, 4, 0, 2]),
        ({"top_p": 1e-9}, [1]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.66}, [1, 3, 4]),
        ({"top_p": 0.94}, [1, 3, 4, 0]),
        ({"top_p": 0.96}, [1, 3, 4, 0, 2]),
        ({"min_p": 0.49}, [1, 3, 4]),
        ({"min_p": 0.6}, [1, 3]),
        ({"min_p": 1.0}, [1]),
        # after top_k=3 the shares are 0.4, 0.25, 0.2 of 0.85 = 0.47, 0.29, 0.24
        ({"top_k": 3, "top_p": 0.46}, [1]),
        ({"top_k": 3, "top_p": 0.75}, [1, 3]),
        ({"top_k": 3, "top_p": 0.78}, [1, 3, 4]),
        # after min_p the same three are left; after both, two: 0.62 and 0.38 of 0.65
        ({"min_p": 0.4, "top_p": 0.75}, [1, 3]),
        ({"min_p": 0.4, "top_k": 2, "top_p": 0.6}, [1]),
    ],
)
def test_filters_by_hand(params, ids):
    params = SamplingParams(**params)
    assert expected_kept(np.log(PROBS), params).tolist() == ids
    rows = [SamplingParams(), params, SamplingParams(top_k=2)]
    assert kept([np.log(PROBS)] * 3, rows) == [[1, 3, 4, 0, 2], ids, [1, 3]]
    drawn = set(many(np.log(PROBS), [SamplingRow(params, seed, np.zeros(4, np.int32), 1) for seed in range(400)]))
    assert drawn == set(ids)


def test_an_exact_share_is_enough():
    params = [SamplingParams(top_p=0.5), SamplingParams(top_p=0.51)]
    assert kept([np.zeros(10)] * 2, params) == [[*range(5)], [*range(6)]]


@pytest.mark.parametrize("vocab", [1, 40, 2049, 9000])
@pytest.mark.parametrize("shape", SHAPES)
def test_top_ids_are_those_of_a_stable_sort(shape, vocab):
    rng = np.random.default_rng(vocab)
    x = torch.tensor(np.stack([SHAPES[shape](rng, vocab) for _ in range(3)]), dtype=torch.float32)
    order = x.sort(dim=-1, descending=True, stable=True).indices
    for k in {1, 2, 20, 64, vocab // 2, vocab}:
        if 0 < k <= vocab:
            assert torch.equal(sampling.top_ids(x, k), order[:, :k]), k


# --- in C as in PyTorch -----------------------------------------------------------------------------------------------

WIDE_SHAPES = {
    **SHAPES,
    "so large that noise is rounded away": lambda rng, n: rng.integers(-2, 3, n) * 1e4,
    "as large as logits may be": lambda rng, n: rng.choice([-3e38, -1e30, 0.0, 1e30], n),
}


def any_row(rng, vocab):
    """Parameters at both ends of what is allowed, and between."""
    pick = lambda *choices: choices[rng.integers(len(choices))]  # noqa: E731
    params = SamplingParams(
        temperature=pick(0.0, 1e-5, 0.3, 1.0, 1.0, 2.5, 100.0),
        top_k=pick(0, 0, 0, 1, 20, 700, vocab, vocab + 1, 2**31 - 1),
        top_p=pick(1.0, 1.0, 1e-9, 0.51237, 0.9123, 0.999999),
        min_p=pick(0.0, 0.0, 0.0, 1e-9, 0.0567, 1.0),
    )
    seed = pick(-(2**63), -1, 0, 2**63, 2**64 - 1, int(rng.integers(2**62)))
    return SamplingRow(params, seed, np.broadcast_to(np.int32(0), pick(1, 77, 2**31 + 5, 2**32 + 1)), 1)


@pytest.mark.skipif(sampler._kernels() is None, reason="no C compiler")
@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 65, 2047, 2048, 2049, 49_152, 151_936])
def test_c_draws_what_pytorch_draws(vocab, monkeypatch):
    rng = np.random.default_rng(vocab)
    shapes = [*WIDE_SHAPES.values()] * 4
    logits = torch.tensor(np.stack([shape(rng, vocab) for shape in shapes]), dtype=torch.float32)
    rows = [any_row(rng, vocab) for _ in shapes]
    in_c = sample(logits.clone(), rows).token_ids
    monkeypatch.setattr(sampler, "_kernels", lambda: None)
    other = [i for i, token in enumerate(sample(logits.clone(), rows).token_ids) if token != in_c[i]]
    for i in other:
        x, params = logits[i].numpy(), rows[i].params
        _, margin = expected_token(x, params, rows[i].seed, len(rows[i].token_ids))
        assert margin < 1e-4 or settled_by_rounding(x, params), (i, params)
    assert len(other) <= 1


@pytest.mark.skipif(sampler._kernels() is None, reason="no C compiler")
def test_c_loses_no_token_at_the_end_of_what_is_kept(monkeypatch):
    """Of a row with many likely tokens, each share ends elsewhere; unlikely tokens are drawn too."""
    rng = np.random.default_rng(0)
    logits, count = np.sort(rng.standard_normal(3000) * 3), 600  # whole blocks of 64 columns are not kept
    rows = [row(i, top_p=float(rng.uniform(0.1, 0.999)), temperature=2.0) for i in range(count)]
    rows += [row(i, min_p=1e-9) for i in range(count)]
    in_c = many(logits, rows)
    monkeypatch.setattr(sampler, "_kernels", lambda: None)
    assert sum(a != b for a, b in zip(in_c, many(logits, rows))) <= 2  # two candidates may lie within rounding


# --- distributions ---------------------------------------------------------------------------------------------------

SPREAD = np.concatenate((np.linspace(3.0, -3.0, 40), np.full(2100, -9.0), np.linspace(2.0, 0.0, 9)))


@pytest.mark.parametrize("name", FILTERS)
def test_distribution(name):
    params, num = FILTERS[name], 2400
    x = np.asarray(SPREAD, np.float32).astype(np.float64)
    left = np.zeros(len(x), bool)
    left[expected_kept(x, SamplingParams(**params))] = True
    probs = np.where(left, np.exp((x - x.max()) / params.get("temperature", 1.0)), 0.0)
    probs /= probs.sum()
    rows = [row(seed, 1 + position, **params) for seed in range(num // 40) for position in range(40)]
    tokens = np.concatenate([many(SPREAD, rows[i : i + 500]) for i in range(0, num, 500)])
    assert left[tokens].all()
    groups = np.minimum(np.arange(len(x)), 40) + np.where(np.arange(len(x)) >= 2140, np.arange(len(x)) - 2139, 0)
    expected, counts = np.bincount(groups, probs), np.bincount(groups[tokens], minlength=groups.max() + 1)
    common = expected * num > 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum()) * num
    assert stats.chisquare(observed[wanted > 0], wanted[wanted > 0]).pvalue > 1e-4


def test_every_part_of_a_large_vocabulary_is_reached():
    vocab, num = 50_001, 600
    for params in ({}, {"top_p": 0.999}):
        ids = np.concatenate(
            [many(np.zeros(vocab), [row(i, **params) for i in range(s, s + 60)]) for s in range(0, num, 60)]
        )
        assert stats.kstest(ids / vocab, "uniform").pvalue > 1e-4


def test_noise_in_the_logits_changes_almost_no_draw():
    """Another batch size changes logits in the last bits. A search in cumulative sums turned 5e-5 into other tokens."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((64, 20_000)).astype(np.float32)
    near = logits + rng.uniform(-5e-5, 5e-5, logits.shape).astype(np.float32)
    changed = 0
    for name in ("none", "temperature", "top_k", "top_k top_p", "top_p min_p"):
        rows = [row(seed, 9, **{"temperature": 1.3, **FILTERS[name]}) for seed in range(64)]
        a, b = (sample(torch.tensor(x), rows).token_ids for x in (logits, near))
        changed += int((np.array(a) != np.array(b)).sum())
    assert changed <= 1  # of 320
