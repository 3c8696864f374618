"""The uniforms are uniform, also between the neighbouring seeds and positions that users really have."""

import numpy as np
import pytest
from scipy import stats

from nanovllm.sampling.random import mix64, uniforms


def test_known_values_never_change():
    # The reference sequence of splitmix64 from state 0, and our own numbers: a change would alter every seeded output.
    golden = 0x9E3779B97F4A7C15
    states = np.array([golden, 2 * golden % 2**64, 3 * golden % 2**64], np.uint64)
    assert [hex(x) for x in mix64(states).tolist()] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]
    start = int(mix64(np.array([7 + golden], np.uint64))[0])
    bits = int(mix64(np.array([(start + golden * 13) % 2**64], np.uint64))[0])
    assert uniforms([7], [12])[0] == (bits >> 11) / 2**53


def test_range_and_extreme_seeds():
    seeds = [0, 1, -1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
    u = uniforms(seeds, [0] * len(seeds))
    assert u.dtype == np.float64
    assert ((u >= 0) & (u < 1)).all()
    assert u[2] == u[5]  # -1 and 2**64 - 1 are the same 64 bits
    assert u[4] == u[6]
    assert len(set(u.tolist())) == 5


N = 20_000
STREAMS = {
    "positions of seed 0": ([0] * N, range(N)),
    "positions of a large seed": ([2**64 - 3] * N, range(1000, 1000 + N)),
    "adjacent seeds at one position": (range(N), [17] * N),
    "seed and position together": (range(N), range(N)),
    "seed up, position down": (range(N), range(N, 0, -1)),
    "seeds far apart by powers of two": ([i << 40 for i in range(N)], [3] * N),
}


@pytest.mark.parametrize("name", STREAMS)
def test_uniform(name):
    u = uniforms(*STREAMS[name])
    assert stats.kstest(u, "uniform").pvalue > 1e-4
    # Neighbours are independent: pairs fall evenly on a 10 x 10 grid.
    grid = np.histogram2d(u[:-1:2], u[1::2], bins=10, range=[[0, 1], [0, 1]])[0]
    assert stats.chisquare(grid.ravel()).pvalue > 1e-4


def test_next_seed_is_not_the_next_position():
    a = uniforms([5] * 1000, range(1000))
    b = uniforms([6] * 1000, range(1000))
    assert not np.intersect1d(a, b).size
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.15
    assert abs(np.corrcoef(a[1:], b[:-1])[0, 1]) < 0.15


def test_bits_are_full_width():
    low = (uniforms(range(4096), [0] * 4096) * 2**53).astype(np.uint64)
    for bit in range(53):
        share = ((low >> np.uint64(bit)) & np.uint64(1)).mean()
        assert 0.45 < share < 0.55, bit
