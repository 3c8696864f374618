"""Drawing one token a row from temperature-scaled logits, with noise that depends on nothing but the row.

Each function takes logits [rows, vocab] and, for each row, its parameters, int64 seed and the integer position of the
token being drawn, and gives int64 tokens [rows]:

    gumbel_argmax_reference(logits, temperatures, seeds, positions): rows without filters; temperature 0 is greedy
    filtered_reference(logits, temperatures, top_ks, top_ps, min_ps, seeds, positions): rows with any of the filters

The Gumbel trick: with g = -log(-log(u)), u uniform, argmax(x + g) is distributed as softmax(x). Rows with filters do
just that, over the tokens that the filters leave. Without filters, noise for every column costs more than reading the
logits (about 100 integer operations and two logarithms a column, V = 151,936), so the draw is made in two levels, which
gives the same distribution: P(column) = P(tile) * P(column | tile).

    1. a tile of TILE columns: argmax over tiles of logsumexp(x of the tile) + g, one draw a tile;
    2. a column of that tile:  argmax over its columns of x + g, one draw a column.

Greedy rows take the maximum instead of the logsumexp and no noise; ties go to the lowest column, as in torch.argmax.
The noise is a counter-based generator, Philox4x32-10 with the row's seed as key and (index // 4, position, level, 0) as
counter: of its four words the one of number index % 4, so that four neighbours cost one call. The index is the tile's
on level 0, the token id on level 1. So a row draws the same token whatever batch it is in and however often it is
recomputed. A column at -inf is never drawn as long as one is finite; without filters, a row of NaN or -inf only gives
some column in range, never an invalid index; with filters, the maximum of a row must be finite.
Triton twin: `ops/triton/sampling.py`, equal except where two candidates lie within rounding.
"""

from __future__ import annotations

import torch

TILE = 2048  # part of the definition: another tile size draws other tokens
LEVEL_TILE, LEVEL_COLUMN = 0, 1
_MASK = 0xFFFFFFFF
_NEG_INF = float("-inf")
SPAN = 32  # columns whose maximum is taken when looking for the largest: any size gives the same tokens
# Candidates looked at first for a row without top_k, then 8 times as many. In 192 rows of SmolLM2's logits, top_p=0.95
# leaves more than 64 tokens in 10 % at temperature 0.7 and in 51 % at 1, more than 512 in 2 % and 22 %.
FIRST_WIDTH = 64


def philox_words(
    key: torch.Tensor, group: torch.Tensor, position: torch.Tensor, level: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32-10 of the counter (group, position, level, 0): four words, int64 in [0, 2**32). Arguments broadcast.

    The products of two 32-bit numbers wrap in int64, but their 64 bits are all there: `>> 32` then the mask is umulhi.
    """
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    c0, c1, c2, c3 = group & _MASK, position & _MASK, torch.full_like(group, level), torch.zeros_like(group)
    for _ in range(10):
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (high >> 32) & _MASK ^ c1 ^ k0, high & _MASK
        c2, c3 = (low >> 32) & _MASK ^ c3 ^ k1, low & _MASK
        k0, k1 = k0 + 0x9E3779B9 & _MASK, k1 + 0xBB67AE85 & _MASK
    return c0, c1, c2, c3


def philox(key: torch.Tensor, index: torch.Tensor, position: torch.Tensor, level: int) -> torch.Tensor:
    """Word index % 4 of Philox4x32-10 of the counter (index // 4, position, level, 0), as int64 in [0, 2**32).

    The arguments broadcast; an index is not negative.
    """
    c0, c1, c2, c3 = philox_words(key, index >> 2, position, level)
    upper = index & 2 != 0
    return torch.where(index & 1 != 0, torch.where(upper, c3, c1), torch.where(upper, c2, c0))


def gumbel(bits: torch.Tensor) -> torch.Tensor:
    """23 random bits to the middle of their interval: u is exact in fp32 and neither 0 nor 1, so g is finite."""
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def gumbel_argmax_reference(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    rows, vocab = logits.shape
    greedy = (temperatures == 0).unsqueeze(1)
    scale = torch.where(greedy, 1.0, 1.0 / temperatures.float().unsqueeze(1))
    num_tiles = -(-vocab // TILE)
    scaled = logits.float() * scale
    if vocab % TILE:
        scaled = torch.nn.functional.pad(scaled, (0, num_tiles * TILE - vocab), value=_NEG_INF)
    tiles = scaled.view(rows, num_tiles, TILE)
    key, position = seeds.long().unsqueeze(1), positions.long().unsqueeze(1)

    tile_index = torch.arange(num_tiles, device=logits.device).expand(rows, -1)
    noise = gumbel(philox(key, tile_index, position, LEVEL_TILE))
    peak = tiles.amax(-1)
    finite = peak.clamp(-1e38, 1e38)
    # logsumexp, except that -80 is as good as -inf: the CPU's exp is 15 times slower where its result is denormal.
    total = (tiles - finite.unsqueeze(-1)).clamp_(min=-80.0).exp_().sum(-1)
    mass = torch.where(greedy, peak, finite + total.log() + noise)
    tile = mass.nan_to_num(nan=_NEG_INF).argmax(-1, keepdim=True)  # [rows, 1]

    group = tile * (TILE // 4) + torch.arange(TILE // 4, device=logits.device)  # [rows, TILE / 4]
    words = torch.stack(philox_words(key, group, position, LEVEL_COLUMN), -1).flatten(1)  # [rows, TILE]
    noise = gumbel(words).masked_fill(greedy, 0.0)
    candidates = tiles[torch.arange(rows, device=logits.device), tile.squeeze(1)] + noise
    best = candidates.nan_to_num(nan=_NEG_INF).argmax(-1)
    return (tile.squeeze(1) * TILE + best).clamp_max(vocab - 1)


def order_keys(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 keys, all different, that sort like the fp32 values with ties broken by the lower id.

    torch.topk and sort leave the order of equal values open, and bf16 logits are full of them. The bits of a float
    sort like an integer once those of negative numbers are flipped; the low half of the key holds the id, reversed.
    """
    bits = (values + 0.0).view(torch.int32)  # + 0.0 turns -0.0, equal to 0.0 but with other bits, into 0.0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.long().mul_(2**32).add_(_MASK - ids)


def top_ids(values: torch.Tensor, k: int) -> torch.Tensor:
    """int64 [rows, k]: columns of the k largest fp32 values, largest first, equal ones by the lower column. No NaN.

    All k lie in the k tiles of SPAN columns with the largest maxima (of equal maxima the first), because a value of
    another tile comes after those k maxima. So a small k needs no sort of all columns.
    """
    rows, num_columns = values.shape
    ids = torch.arange(num_columns, device=values.device)
    candidates = values
    if 2 * k * SPAN < num_columns:
        whole = num_columns // SPAN
        tiles, rest = ids[: whole * SPAN].view(whole, SPAN), ids[whole * SPAN :]  # the rest is always looked at
        best = top_ids(values[:, : whole * SPAN].unflatten(1, (whole, SPAN)).amax(-1), k)
        ids = torch.cat((tiles[best].flatten(1), rest.expand(rows, -1)), 1)
        candidates = values.gather(1, ids)
    return _MASK - (order_keys(candidates, ids).topk(k).values & _MASK)


def integer_weights(logits: torch.Tensor) -> torch.Tensor:
    """Unnormalised probabilities as whole numbers: floor(2**35 * exp(logit)), fp32; the peak of the logits is 0.

    Even 2**18 tokens as likely as the peak sum to 2**53, up to which float64 holds every integer. So sums have no
    rounding, and those of a row cannot depend on how many rows or candidates they were computed with. Tokens under
    2**-35 of the peak get 0, so -30 is as good as -inf here; the CPU's exp is 15 times slower where its result is 0 or
    denormal.
    """
    return logits.clamp(min=-30.0).exp_().mul_(2.0**35).floor_()


def filtered_reference(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """The argmax of x + g over the tokens that `kept_ids` leaves.

    Few candidates are looked at first, more of them only for the rows that these do not settle. Rows without top_k that
    keep 8 * FIRST_WIDTH tokens or more go to `draw_flat`; a larger top_k is a sort of the row.
    """
    logits, vocab = logits.float(), logits.shape[1]
    limits = torch.where(top_ks > 0, top_ks, vocab).clamp(max=vocab).unsqueeze(1)
    scales, min_ps, top_ps = (1.0 / temperatures.float()).unsqueeze(1), min_ps.unsqueeze(1), top_ps.unsqueeze(1)
    seeds, positions = seeds.unsqueeze(1), positions.unsqueeze(1)
    unlimited = (limits == vocab).squeeze(1)
    totals = torch.full_like(top_ps, float("inf"), dtype=torch.float64)
    shared = unlimited & (top_ps < 1.0).squeeze(1)
    if bool(shared.any()):
        x = logits[shared]
        x = (x - x.amax(-1, keepdim=True)) * scales[shared]
        if bool((min_ps > 0.0).any()):
            x.masked_fill_(x < min_ps[shared].log(), _NEG_INF)
        totals[shared] = integer_weights(x).double().sum(-1, keepdim=True)

    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    waiting = torch.arange(len(logits), device=logits.device)
    first, second = int(torch.where(top_ks > 0, top_ks, FIRST_WIDTH).max()), 8 * FIRST_WIDTH
    for width in sorted({min(first, second), second, max(vocab, second)}):
        if width > second:
            for i in waiting[unlimited[waiting]].tolist():
                filters = (part[i] for part in (scales, top_ps, min_ps, totals, seeds, positions))
                tokens[i] = draw_flat(logits[i], *filters)
            waiting = waiting[~unlimited[waiting]]
        if not len(waiting):
            break
        width = min(width, int(limits[waiting].max()))
        x = logits if len(waiting) == len(logits) else logits[waiting]
        s, n, p, m, mass = (part[waiting] for part in (scales, limits, top_ps, min_ps, totals))
        ids, counts, settled = kept_ids(x, s, n, p, m, mass, width)
        done, ids, counts = waiting[settled], ids[settled], counts[settled]
        noise = gumbel(philox(seeds[done], ids, positions[done], LEVEL_COLUMN))
        scores = logits[done.unsqueeze(1), ids] * scales[done] + noise
        scores.masked_fill_(torch.arange(width, device=ids.device) >= counts, _NEG_INF)
        tokens[done] = ids.gather(1, scores.argmax(-1, keepdim=True)).squeeze(1)
        waiting = waiting[~settled]
    return tokens


def draw_flat(
    logits: torch.Tensor,
    scale: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    total: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    """The same for one row [vocab] without top_k, without a sort, however many tokens are left.

    The argmax over all tokens is the answer if top_p keeps it, that is, if the tokens before it (likelier ones, or
    equal ones with a lower id) have less than the share. Else top_p keeps no token after it either, and the search goes
    on among those before it. The first try succeeds with a probability of at least top_p.
    """
    vocab = logits.shape[0]
    ids = torch.arange(vocab, device=logits.device)
    groups = torch.arange(-(-vocab // 4), device=logits.device)
    noise = gumbel(torch.stack(philox_words(seed, groups, position, LEVEL_COLUMN), -1).flatten()[:vocab])
    x = (logits - logits.amax()) * scale
    weights = integer_weights(x)
    scores = (logits * scale + noise).masked_fill_(x < min_p.log(), _NEG_INF)
    while True:
        token = scores.argmax()
        before = (logits > logits[token]) | ((logits == logits[token]) & (ids < token))
        if bool((weights * before).double().sum() < top_p * total):
            return token
        scores.masked_fill_(~before, _NEG_INF)


def kept_ids(
    logits: torch.Tensor,
    scales: torch.Tensor,
    limits: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    totals: torch.Tensor,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What min_p, top_k and top_p leave, in this order: (ids [rows, width], counts [rows, 1], settled [rows]).

    Each filter keeps a prefix of the tokens ordered by (logit, lower id), so a row's share is the first `count` of its
    ids. min_p: tokens at least min_p times as likely as the most likely one. top_k: `limits` of those, as many as there
    are columns without it. top_p: of those the shortest prefix that has the share top_p of their mass. `totals` is that
    mass where more than `width` may be left, inf if not known. A row is not settled if more than `width` may be left.
    """
    ids = top_ids(logits, width)
    values = logits.gather(1, ids)
    x = (values - values[:, :1]) * scales  # none above 0, so no temperature, however small, overflows
    likely = (x >= min_ps.log().clamp(min=-1e38)).sum(-1, keepdim=True)  # none at -inf
    more = (likely == width) & (limits > width)
    counts = likely.minimum(limits)
    weights = integer_weights(x).double()
    mass = weights.cumsum(-1)
    # A token stays while those before it have less than the share; top_p = 1 keeps also what has no weight.
    share = top_ps * torch.where(more, totals, mass.gather(1, counts - 1))
    counts = (mass - weights < share.masked_fill_(top_ps >= 1.0, float("inf"))).sum(-1, keepdim=True).minimum(counts)
    return ids, counts, (~more | (counts < width)).squeeze(1)
