"""Expert parallelism: experts are spread over the ranks, and tokens travel to them and back.

Every rank takes a slice of the step's tokens. There are n ranks, e groups of them (`expert_size`, mostly n) that own a
layer's experts in order, and k choices a token:

    1. counts       each rank sends each other how many rows will follow. The host reads these counts, as a receive
                    needs its size first: a step with spread experts is not captured as a graph
    2. there        a row per pair (token, expert), sorted by owner: what the expert reads, its number, its weight
    3. compute      the owner's experts, each over the rows of all ranks at once
    4. back         the same way; each row lands beside the others of its token
    5. sum          of a token's rows, in the order of its choices: the same numbers whichever rank computed them
    6. gather       of the slices: attention, which is tensor-parallel, needs all tokens on all ranks

Some experts may have several copies (rebalance.py): then a table on the device says in which places an expert is, and a
hash of the token's index chooses one of them. A place is a number as an expert's is without copies: group 0 has the
first ones, and so on.

With more ranks than groups, an expert is cut over the n / e ranks of its group (weights/expert_form.py). A row is
then sent to each of them, and their parts are added in step 5: no second kind of group, no other sum.

What it moves, in numbers a rank sends, T tokens of size H: 2 and 4 together 2 T k H (n - 1) / n^2 (times n / e), 6
T H (n - 1) / n. Cutting every expert over all ranks instead takes one all-reduce, 2 T H (n - 1) / n: less, until n
exceeds 2 k. What is gained before that is whole matrices (an expert of Qwen3-30B-A3B cut in eight has 96 columns) and
fewer experts to read for each rank. After tensor-parallel attention every rank has every token, so step 2 sends what
its receiver has too; nothing here relies on that, and the ranks need not even have routed alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nanovllm.hardware.parallel import Parallel
from nanovllm.moe.balance import GOLDEN, Arrangement

if TYPE_CHECKING:
    from nanovllm.moe.resident import ResidentExperts

EXTRA = 8  # bytes of a row besides the numbers: the expert's, int32, and its weight, float32


class Spread:
    arrangement: Arrangement  # set with the table
    _places: torch.Tensor  # int32 [experts, most copies]
    _counts: torch.Tensor  # int64 [experts]: how many of those are in use

    def __init__(self, num_here: int, parallel: Parallel) -> None:
        """`num_here`: experts of a layer that each rank has."""
        self._num_here, self.parallel, self._has_copies = num_here, parallel, False

    def make_table(self, arrangement: Arrangement, device: torch.device) -> None:
        most = len(arrangement.experts) - arrangement.num_experts + 1
        self._num_here, self._has_copies = len(arrangement.experts) // self.parallel.expert_size, True
        self._places = torch.zeros(arrangement.num_experts, most, dtype=torch.int32, device=device)
        self._counts = torch.ones(arrangement.num_experts, dtype=torch.int64, device=device)
        self.set_arrangement(arrangement)

    def set_arrangement(self, arrangement: Arrangement) -> None:
        """In place, behind the steps that were queued: what was captured reads the new table."""
        most = self._places.shape[1]
        places = [[*copies, *[0] * (most - len(copies))] for copies in arrangement.copies]
        self._places.copy_(torch.tensor(places, dtype=torch.int32))
        self._counts.copy_(torch.tensor(arrangement.counts))
        self.arrangement = arrangement

    def places_of(self, ids: torch.Tensor, first_token: int) -> torch.Tensor:
        """Of each choice [tokens, top_k]; `choose_copy` of balance.py in torch."""
        if not self._has_copies:
            return ids
        ids = ids.long()
        tokens = torch.arange(first_token, first_token + len(ids), device=ids.device)[:, None]
        copies = (tokens * GOLDEN % 2**32) * self._counts[ids] >> 32
        return self._places[ids, copies]

    def __call__(
        self, experts: ResidentExperts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        ranks, num_tokens = self.parallel, len(x)
        each = -(-num_tokens // ranks.size)  # the last slices may be shorter, or empty
        mine = slice(min(ranks.rank * each, num_tokens), min((ranks.rank + 1) * each, num_tokens))
        out = x.new_zeros(each, x.shape[1])
        x, ids, weights = x[mine], self.places_of(ids[mine], mine.start), weights[mine]
        # Kernels are not launched for zero rows; but a rank without tokens has experts that other ranks wait for.
        z = experts.enter(x) if len(x) else x.new_empty(0, experts.form.in_size)
        rows = self._visit(experts, z, ids, weights)
        if len(x):
            out[: len(x)] = experts.leave(experts.ops.sum_pairs(rows))
        return ranks.gather_rows(out)[:num_tokens]

    def _visit(
        self, experts: ResidentExperts, z: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """What the experts of this rank's tokens give, weighted: [tokens, top_k * shares, out_size]."""
        ranks, (num_tokens, top_k), shares = self.parallel, ids.shape, self.parallel.ranks_per_expert
        first = (ids // self._num_here).view(-1, 1) * shares  # the first rank that has (a share of) the expert
        owners = (first + torch.arange(shares, device=ids.device)).flatten()  # of each row: [token, choice, share]
        order = owners.sort(stable=True).indices
        pairs = order // shares
        counts = torch.bincount(owners, minlength=ranks.size)
        sent, received = torch.stack([counts, ranks.exchange_counts(counts)]).tolist()
        local, share = (ids % self._num_here).flatten()[pairs], weights.flatten()[pairs]
        came = ranks.exchange_rows(_pack(z[pairs // top_k], local, share), sent, received)
        found, out_size = z.new_empty(0, experts.form.out_size), experts.form.out_size
        if len(came):
            theirs, local, share = _unpack(came, z.dtype)
            found = experts.pairs(theirs, local[:, None], share[:, None])[:, 0]
        back = ranks.exchange_rows(found, received, sent)
        rows = torch.empty_like(back)
        rows[order] = back
        return rows.view(num_tokens, top_k * shares, out_size)


def _pack(z: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """One message instead of three: [rows, bytes]."""
    parts = (z, ids.int()[:, None], weights.float()[:, None])
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)


def _unpack(packed: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    z = packed[:, :-EXTRA].contiguous().view(dtype)
    ids, weights = (part.contiguous() for part in packed[:, -EXTRA:].split(EXTRA // 2, 1))
    return z, ids.view(torch.int32)[:, 0], weights.view(torch.float32)[:, 0]
