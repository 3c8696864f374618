"""SideStream: a second queue of a GPU, for work that needs little of the card and does not depend on its neighbours."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanovllm.hardware.device import Device


class SideStream:
    """`start` queues work behind all that was queued so far; what it returns makes the next work wait for that.

    A step may be captured as a graph with it: the two events become edges. Memory needs no further care, because each
    start waits for the main stream: what the last one made was read before this one can overwrite it. One for all
    layers; with one each, the allocator would keep the memory of each apart.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def start(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Returns what waits for the result and gives it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = function(x)

        def join() -> torch.Tensor:
            torch.cuda.current_stream().wait_stream(self._stream)
            return result

        return join


def side_stream(device: Device) -> SideStream | None:
    return SideStream() if device.is_gpu else None
