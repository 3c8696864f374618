"""A decode step with offloaded experts: captured pieces, and the host between them.

Which experts a layer wants is known in the middle of the step, and only the host can bring those that are missing, so
the step cannot be one graph. Kernel by kernel it takes a slow host 0.6 ms a layer, six times what the GPU needs. But
between two such questions everything is fixed:

    ask      sum of the last layer's experts, attention, norms, router, guesses for the layers to come; the answer
             (what was chosen) goes to page-locked memory
    start    the experts that are on the device, by a table that lies there too
    ...      meanwhile the host reads the answer; what is missing it queues copies of, and kernels that wait for them
    ask      of the next layer

`ask` and `start` of every sparse layer are graphs; the last piece ends with sampling. A layer whose experts are all
there costs the host two replays and a look at a few numbers, while the GPU is busy with `start`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanovllm.hardware.graphs import Capture
from nanovllm.layers.attention import KVCache, Step
from nanovllm.models.transformer import Transformer
from nanovllm.moe.layer import MoeLayer
from nanovllm.moe.offload.experts import OffloadedExperts
from nanovllm.moe.offload.offload import Offload

RELAY_SIZES = (1, 2, 4)  # with more sequences nearly every layer misses something, and copies take all the time


def relays(model: Transformer, num_tokens: int) -> bool:
    """Whether a step of so many tokens runs this way. Not with experts that are spread over ranks: there the host reads
    how many rows travel, in the middle of the experts."""
    sparse = [layer.mlp.experts for layer in model.layers if isinstance(layer.mlp, MoeLayer)]
    return num_tokens in RELAY_SIZES and bool(sparse) and all(isinstance(e, OffloadedExperts) for e in sparse)


class RoutingResult:
    """What a piece leaves behind for the host and the next piece. The tensors are those of its last call: once it is
    captured there are no calls any more, and their addresses stay."""

    z: torch.Tensor  # what the experts read
    residual: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    answer: torch.Tensor | None = None  # int32, on the host


@dataclass(frozen=True)
class LayerSegment:
    layer: int  # among the sparse ones
    ask: Callable[[], None]
    start: Callable[[], None]
    said: RoutingResult


class Relay:
    def __init__(
        self,
        model: Transformer,
        caches: list[KVCache],
        step: Step,
        sample: Callable[[torch.Tensor], None],
        capture: Capture,
        pin: bool,
    ) -> None:
        """`sample(hidden)` takes the last hidden states to tokens and advances the state. `pin`: lock host memory."""
        self._model, self._step, self._ops, self._pin = model, step, model.ops, pin
        self._caches = caches
        ends = [i for i, layer in enumerate(model.layers) if isinstance(layer.mlp, MoeLayer)]
        first = model.layers[ends[0]].mlp
        self._offload: Offload = first.experts.offload
        self._experts = [model.layers[end].mlp.experts for end in ends]
        sizes, rows = [form.out_size for form in self._offload.shape.forms], len(step.token_ids) * first.top_k
        memory = torch.zeros(rows * max(sizes), dtype=model.embed.weight.dtype, device=model.embed.weight.device)
        self._pairs = [memory[: rows * size].view(-1, first.top_k, size) for size in sizes]  # of each sparse layer
        self._pieces: list[LayerSegment] = []
        begin = 0
        for end in ends:
            self._pieces.append(self._make_piece(range(begin, end), end, capture))
            begin = end + 1
        self._finish_step = capture(lambda: self._last(range(begin, len(caches)), sample))

    def run(self) -> None:
        """One token for each sequence. Where a layer missed nothing, the next is asked first, and what there is to note
        and to guess is done while the GPU works on it."""
        offload, stream = self._offload, self._offload.stream
        complete: LayerSegment | None = None
        for piece in self._pieces:
            piece.ask()
            idle = offload.idle.ask(piece.layer)
            asked = idle or stream.mark_compute()
            piece.start()
            self._note(complete)
            stream.wait(asked)
            offload.idle.answered(idle)
            said = piece.said
            assert said.answer is not None
            answer = said.answer.numpy()
            complete = piece if offload.has_all(piece.layer, said.ids.numel(), answer) else None
            if complete is None:
                offload.finish(piece.layer, said.z, said.ids, said.weights, self._pairs[piece.layer], answer)
        self._finish_step()
        self._note(complete)

    def _note(self, piece: LayerSegment | None) -> None:
        if piece is not None and piece.said.answer is not None:
            self._offload.take_note(piece.layer, piece.said.z, piece.said.ids, piece.said.answer.numpy())

    def _make_piece(self, dense: range, end: int, capture: Capture) -> LayerSegment:
        """Dense layers, and the sparse one at `end` up to its experts."""
        number, offload, said = len(self._pieces), self._offload, RoutingResult()
        sparse = self._model.layers[end]

        def ask() -> None:
            x, residual = self._enter(number)
            x, residual = self._model.through(dense, x, residual, self._step, self._caches)
            x, said.residual = sparse.attend(x, residual, self._model.rope(self._step), self._step, self._caches[end])
            said.ids, said.weights = sparse.mlp.route(x)
            said.z = sparse.mlp.experts.enter(x)
            question = offload.question(number, x, said.ids, said.weights, said.z)
            if said.answer is None:  # at the trial run, before anything is captured
                said.answer = torch.empty(question.shape, dtype=question.dtype, pin_memory=self._pin)
            said.answer.copy_(question, non_blocking=True)

        def start() -> None:
            offload.start(number, said.z, said.ids, said.weights, self._pairs[number])

        return LayerSegment(number, capture(ask), capture(start), said)

    def _enter(self, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Input and residual stream of piece `number` (the last: as many as there are sparse layers)."""
        if number == 0:
            return self._model.embed(self._step.token_ids), None
        last = number - 1
        x = self._experts[last].leave(self._ops.sum_pairs(self._pairs[last]))
        return x, self._pieces[last].said.residual

    def _last(self, dense: range, sample: Callable[[torch.Tensor], None]) -> None:
        x, residual = self._enter(len(self._pieces))
        x, residual = self._model.through(dense, x, residual, self._step, self._caches)
        sample(self._model.last_norm(x, residual, self._step))
