"""A decode step with offloaded experts: captured segments, between which the host brings what is missing.

Which experts a layer wants is known in the middle of the step, and only the host can bring those that are missing, so
the step cannot be one graph. Kernel by kernel it takes a slow host 0.6 ms a layer, six times what the GPU needs. But
between two downloads everything is fixed. For every sparse layer two segments are captured:

    route_segment              sum of the last layer's experts, attention, norms, router, guesses for later layers;
                               the routing report (what was chosen) is copied to page-locked memory
    present_experts_segment    the experts that are on the device, by a table that lies there too
    (host, not captured)       reads the report; queues copies of what is missing, and kernels that wait for them

The last segment ends with sampling. A layer whose experts are all there costs the host two replays and a look at a few
numbers, while the GPU computes the present experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.hardware.graphs import Capture
from nanovllm.layers.attention import KVCache, Step
from nanovllm.models.transformer import Transformer
from nanovllm.moe.layer import MoeLayer
from nanovllm.moe.offload.offload import OffloadedExperts
from nanovllm.moe.offload.report import ExpertCall

RELAY_SIZES = (1, 2, 4)  # with more sequences nearly every layer misses something, and copies take all the time


def relays(model: Transformer, num_tokens: int) -> bool:
    """Whether a step of so many tokens runs this way. Not with experts that are spread over ranks: there the host reads
    how many rows travel, in the middle of the experts."""
    sparse = [layer.mlp.experts for layer in model.layers if isinstance(layer.mlp, MoeLayer)]
    return num_tokens in RELAY_SIZES and bool(sparse) and all(isinstance(e, OffloadedExperts) for e in sparse)


class RoutingResult:
    """What a route segment leaves behind for the host and the next segments. Each call makes new tensors; a replay
    writes those of the captured call again, at the same addresses."""

    call: ExpertCall
    x: torch.Tensor  # what the layer read
    residual: torch.Tensor
    report: torch.Tensor | None = None  # int32, on the host


@dataclass(frozen=True)
class LayerSegment:
    """Replays of the two segments of a sparse layer; the first includes the dense layers before it."""

    route: Callable[[], None]
    present_experts: Callable[[], None]
    result: RoutingResult


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
        self._model, self._caches, self._step, self._pin = model, caches, step, pin
        self._ends = ends = [i for i, layer in enumerate(model.layers) if isinstance(layer.mlp, MoeLayer)]
        self._experts: list[OffloadedExperts] = [model.layers[end].mlp.experts for end in ends]
        top_k: int = model.layers[ends[0]].mlp.top_k
        self._offload = self._experts[0].offload
        sizes, rows = [form.out_size for form in self._offload.shape.forms], len(step.token_ids) * top_k
        memory = torch.zeros(rows * max(sizes), dtype=model.embed.weight.dtype, device=model.embed.weight.device)
        self._pairs = [memory[: rows * size].view(-1, top_k, size) for size in sizes]  # of each sparse layer
        self._segments: list[LayerSegment] = []
        begin = 0
        for end in ends:
            self._segments.append(self._make_segment(range(begin, end), end, capture))
            begin = end + 1
        self._finish_step = capture(lambda: self._last_segment(range(begin, len(caches)), sample))

    def run(self) -> None:
        """One token for each sequence. After a layer that missed nothing, the next one is replayed at once; counting
        the hits and guessing are done while the GPU computes that one."""
        offload, stream = self._offload, self._offload.stream
        complete: LayerSegment | None = None  # the layer before, if it missed nothing
        for segment in self._segments:
            segment.route()
            call = segment.result.call
            idle = offload.idle.before_download(call.layer)
            routed = idle or stream.mark_compute()
            segment.present_experts()
            self._note_hits(complete)
            stream.wait(routed)
            offload.idle.after_download(idle)
            report = _on_host(segment.result)
            complete = segment if offload.has_all(call, report) else None
            if complete is None:
                offload.compute_missing(call, report)
        self._finish_step()
        self._note_hits(complete)

    def _note_hits(self, segment: LayerSegment | None) -> None:
        if segment is not None:
            self._offload.note_hits(segment.result.call, _on_host(segment.result))

    def _make_segment(self, dense: range, end: int, capture: Capture) -> LayerSegment:
        """Dense layers, and the sparse one at `end` up to the sum of its experts."""
        number, offload, result = len(self._segments), self._offload, RoutingResult()
        sparse = self._model.layers[end]

        def route_segment() -> None:
            x, residual = self._enter(number, dense)
            rope = self._model.rope(self._step)
            x, result.residual = sparse.attend(x, residual, rope, self._step, self._caches[end])
            result.x = x
            ids, weights = sparse.mlp.route(x)
            result.call = ExpertCall(number, self._experts[number].enter(x), ids, weights, self._pairs[number])
            packed = offload.report.pack(result.call, x)
            if result.report is None:  # at the trial run, before anything is captured
                result.report = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=self._pin)
            result.report.copy_(packed, non_blocking=True)

        def present_experts_segment() -> None:
            offload.compute_present(result.call)

        return LayerSegment(capture(route_segment), capture(present_experts_segment), result)

    def _enter(self, number: int, dense: range) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Input and residual stream of segment `number` (the last: as many as there are sparse layers) behind these
        dense layers."""
        if number == 0:
            x, residual = self._model.embed(self._step.token_ids), None
        else:
            x = self._experts[number - 1].leave(self._model.ops.sum_pairs(self._pairs[number - 1]))
            residual = self._segments[number - 1].result.residual
            x = self._model.layers[self._ends[number - 1]].mlp.add_shared(x, self._segments[number - 1].result.x)
        return self._model.through(dense, x, residual, self._step, self._caches)

    def _last_segment(self, dense: range, sample: Callable[[torch.Tensor], None]) -> None:
        x, residual = self._enter(len(self._segments), dense)
        sample(self._model.last_norm(x, residual, self._step))


def _on_host(result: RoutingResult) -> np.ndarray:
    assert result.report is not None
    return result.report.numpy()
