"""The order between copying and computing, on a stream that is as lazy as it may be; and page-locked memory."""

from __future__ import annotations

import pytest
import torch

from nanovllm.hardware.copies import CopyStream, ExpertBuffer, StallClock, open_copy_stream, reading
from nanovllm.hardware.device import Device
from nanovllm.hardware.pinned import HostBlock
from tests.moe.offload_rig import LazyStream

CPU = Device(torch.device("cpu"))


class CallStream(CopyStream):
    """Records the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def copy(self, target, source) -> None:
        self.calls.append("copy")

    def _make_copies_wait(self, point) -> None:
        self.calls.append("copies wait")

    def _make_compute_wait(self, point) -> None:
        self.calls.append("compute waits")


def test_a_buffer_is_read_after_its_copy_and_filled_after_its_use() -> None:
    stream = CallStream()
    buffer, other = ExpertBuffer(torch.zeros(4), stream), ExpertBuffer(torch.zeros(4), stream)
    write = lambda memory: stream.copy(memory, memory)  # noqa: E731
    buffer.fill(write)
    assert stream.calls == ["copy"]  # never used: nothing to wait for
    with reading([buffer]):
        assert stream.calls == ["copy", "compute waits"]
    with reading([buffer]):
        pass
    assert stream.calls == ["copy", "compute waits"]  # once is enough
    buffer.fill(write)
    assert stream.calls[2:] == ["copies wait", "copy"]
    other.fill(write)
    with reading([buffer, other]):  # one wait, for the later of the two copies
        pass
    assert stream.calls[4:] == ["copy", "compute waits"]
    buffer.fill(write)
    other.fill(write)  # its use was marked together with the other's: known to have passed
    assert stream.calls[6:] == ["copies wait", "copy", "copy"]


def test_lazy_copies_arrive_when_they_are_read() -> None:
    stream = LazyStream()
    memory = torch.zeros(4)
    buffer = ExpertBuffer(memory, stream)
    buffer.fill(lambda target: stream.copy(target, torch.arange(4.0)))
    assert memory.sum() == 0
    with reading([buffer]):
        assert memory.sum() == 6


def test_a_failed_fill_is_still_waited_for() -> None:
    stream = CallStream()
    buffer = ExpertBuffer(torch.zeros(4), stream)

    def write(memory: torch.Tensor) -> None:
        stream.copy(memory, memory)
        raise OSError

    with pytest.raises(OSError):
        buffer.fill(write)
    with reading([buffer]):
        assert stream.calls == ["copy", "compute waits"]


def test_stalls_are_read_only_when_they_are_over() -> None:
    class Slow(CallStream):
        over = False

        def seconds(self, earlier, later):
            return 0.5 if self.over else None

    stream = Slow()
    clock = StallClock(stream)
    buffer = ExpertBuffer(torch.zeros(4), stream)
    buffer.fill(lambda memory: stream.copy(memory, memory))
    with reading([buffer], clock):
        pass
    with reading([buffer], clock):  # already here: no stall
        pass
    assert clock.seconds() == 0.0
    stream.over = True
    assert clock.seconds() == clock.seconds() == 0.5


def test_the_stream_of_a_cpu_copies_at_once() -> None:
    stream = open_copy_stream(CPU)
    memory = torch.zeros(4)
    stream.copy(memory, torch.ones(4))
    assert memory.sum() == 4
    assert stream.download(torch.arange(3)).tolist() == [0, 1, 2]
    first = stream.mark_copies(timed=True)
    assert stream.seconds(first, stream.mark_compute(timed=True)) >= 0.0


def test_a_host_block_has_the_size_asked_for() -> None:
    block = HostBlock(1000, torch.bfloat16, CPU)
    assert block.tensor.shape == (1000,)
    assert block.tensor.untyped_storage().nbytes() == 2000
    block.close()
    block.close()
