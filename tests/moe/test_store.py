"""Where experts are stored: memory up to a limit, files beyond it, and refusals with figures."""

from __future__ import annotations

import logging
import os

import pytest
import torch
from safetensors.torch import save_file

from nanovllm.errors import ConfigError, ModelError
from nanovllm.hardware import pinned
from nanovllm.moe.offload import store as store_module
from nanovllm.moe.offload.offload import OffloadOptions
from nanovllm.moe.offload.shape import ExpertShape
from nanovllm.moe.offload.store import ExpertStore
from nanovllm.weights.expert_form import ExpertForm
from nanovllm.weights.safetensors_folder import SafetensorsFolder
from tests.moe.offload_rig import CPU, HIDDEN, SIZE, LazyStream, fill_places, make_rig, random_call

LAYERS, EXPERTS = 2, 3
EXPERT_BYTES = 3 * HIDDEN * SIZE * 4


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(store_module, "CHUNK_BYTES", 1000)  # 250 numbers: chunks reach over the borders of tensors


def write_model(folder, dtype=torch.float32):
    """Experts in two files, named as they are called here: `layer.expert.part`."""
    (folder / "config.json").write_text("{}")
    shapes = {"gate": (SIZE, HIDDEN), "up": (SIZE, HIDDEN), "down": (HIDDEN, SIZE)}
    generator = torch.Generator().manual_seed(0)
    for layer in range(LAYERS):
        tensors = {
            f"{layer}.{expert}.{part}": torch.randn(shape, generator=generator).to(dtype)
            for expert in range(EXPERTS)
            for part, shape in shapes.items()
        }
        save_file(tensors, folder / f"model-{layer}.safetensors")
    return SafetensorsFolder(folder)


def dense_shape(num_layers: int, num_experts: int, dtype=torch.float32) -> ExpertShape:
    forms = (ExpertForm.dense(HIDDEN, SIZE),) * num_layers
    return ExpertShape(tuple(range(num_layers)), num_experts, forms, dtype)


def make_store(
    checkpoint, num_in_memory: int, dtype=torch.float32, quotas: tuple[int, ...] = ()
) -> tuple[ExpertStore, LazyStream]:
    shape = dense_shape(LAYERS, EXPERTS, dtype)
    stream = LazyStream()
    return ExpertStore(shape, CPU, stream, checkpoint, num_in_memory * shape.num_bytes + 1, quotas), stream


@pytest.mark.parametrize("num_in_memory", [0, 1, 5, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_tiers_give_the_same_bytes(tmp_path, small_chunks, num_in_memory: int, dtype) -> None:
    """The files are in float32: bf16 is converted on the way, in memory by the loader, from disk by the store."""
    checkpoint = write_model(tmp_path)
    store, stream = make_store(checkpoint, num_in_memory, dtype)
    fill_places(store, checkpoint)
    assert sum(store.in_memory(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)) == num_in_memory
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            memory = torch.full((store.shape.numel,), float("nan"), dtype=dtype)
            third = store.shape.numel // 3 + 5
            for start, stop in ((0, third), (third, third), (third, store.shape.numel)):
                store.send(layer, expert, start, stop, memory)
            stream.synchronize()
            parts = [checkpoint.read(f"{layer}.{expert}.{part}").flatten() for part in ("gate", "up", "down")]
            assert torch.equal(memory, torch.cat(parts).to(dtype))
    store.close()
    store.close()


def test_every_layer_has_the_same_share_on_disk(tmp_path) -> None:
    store, _ = make_store(write_model(tmp_path), 4)
    assert [[store.in_memory(layer, expert) for expert in range(EXPERTS)] for layer in range(LAYERS)] == [
        [True, True, False],
        [True, True, False],
    ]
    uneven, _ = make_store(
        write_model(tmp_path), 3
    )  # the first layers may have one more buffer: the last get the block
    assert [list(held) for held in uneven.held] == [[0], [0, 1]]
    assert [uneven.num_on_disk(quotas) for quotas in ((0, 0), (1, 0), (2, 1), (0, 3), (3, 3))] == [3, 2, 0, 2, 0]


def test_a_block_is_given_to_another_expert_behind_the_copies_that_read_it(tmp_path, small_chunks) -> None:
    checkpoint = write_model(tmp_path)
    store, stream = make_store(checkpoint, 4)
    fill_places(store, checkpoint)
    wanted = [
        torch.cat([checkpoint.read(f"1.{e}.{part}").flatten() for part in ("gate", "up", "down")]) for e in range(3)
    ]
    buffers, num_bytes = torch.full((3, store.shape.numel), float("nan")), store.shape.numel
    for expert in (2, 1):
        store.send(1, expert, 0, num_bytes, buffers[expert])
    store.save(1, 2, 1, buffers[2])  # queued behind the copy that reads the block and the one that fills the buffer
    store.send(1, 0, 0, num_bytes, buffers[2])  # overwrites the buffer behind that
    assert (store.in_memory(1, 1), store.in_memory(1, 2)) == (False, True)
    assert torch.equal(store.block(1, 2), wanted[2])  # the CPU waits for it
    store.send(1, 1, 0, num_bytes, buffers[0])  # from its file now
    stream.synchronize()
    assert all(torch.equal(buffers[i], wanted[e]) for i, e in ((0, 1), (1, 1), (2, 0)))
    store.close()


def test_a_block_that_an_interrupt_left_empty_is_used_next(tmp_path, small_chunks, monkeypatch) -> None:
    checkpoint = write_model(tmp_path)
    store, stream = make_store(checkpoint, 4)
    fill_places(store, checkpoint)
    buffer = torch.arange(float(store.shape.numel))

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stream, "copy", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.save(0, 2, 1, buffer)
    assert list(store.held[0]) == [0]
    store.save(0, 2, None, buffer)
    assert sorted(store.held[0]) == [0, 2]
    assert torch.equal(store.block(0, 2), buffer)
    store.close()


def test_one_warning_with_figures(tmp_path, caplog) -> None:
    checkpoint = write_model(tmp_path)
    with caplog.at_level(logging.WARNING, logger="nanovllm"):
        make_store(checkpoint, 4)
        make_store(checkpoint, 4, quotas=(1, 1))  # the device holds the other two: nothing to warn of
        assert len(caplog.records) == 1
        assert "the other 2 of 6 are read from disk" in caplog.text
        assert "expert_host_gb" in caplog.text
        make_store(checkpoint, 6)
        assert len(caplog.records) == 1


def test_a_system_that_refuses_to_lock_memory_gets_the_disk(tmp_path, caplog, monkeypatch) -> None:
    locked = []

    class Stingy(pinned.HostBlock):
        def __init__(self, num_elements, dtype, device):
            if num_elements == 3 * HIDDEN * SIZE and len(locked) == 2:
                raise MemoryError("no more")
            locked.append(num_elements)
            super().__init__(num_elements, dtype, device)

    monkeypatch.setattr(store_module, "HostBlock", Stingy)
    monkeypatch.setattr(store_module, "CHUNK_BYTES", 1000)
    checkpoint = write_model(tmp_path)
    with caplog.at_level(logging.WARNING, logger="nanovllm"):
        store, _ = make_store(checkpoint, 6)
    assert "no more" in caplog.text
    assert "the other 4 of 6" in caplog.text
    fill_places(store, checkpoint)
    locked.clear()
    locked += [1, 1]
    with pytest.raises(ConfigError, match=r"0\.0 MiB of 0\.1 MiB.*dummy weights have no files.*expert_host_gb"):
        make_store(None, 6)


def test_dummy_weights_and_gguf_have_no_disk_tier(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"dummy weights"):
        make_store(None, 5)
    make_store(None, 6)

    class Gguf:
        def names(self):
            return ["a"]

        def location(self, name):
            return None

    with pytest.raises(ConfigError, match=r"GGUF.*safetensors"):
        make_store(Gguf(), 5)


def test_no_limit_means_most_of_what_is_available(monkeypatch) -> None:
    shape = dense_shape(1, 4)
    monkeypatch.setattr(store_module, "available_host_bytes", lambda: 5 * EXPERT_BYTES)
    ExpertStore(shape, CPU, LazyStream(), None)
    monkeypatch.setattr(store_module, "available_host_bytes", lambda: 4 * EXPERT_BYTES)
    with pytest.raises(ConfigError):
        ExpertStore(shape, CPU, LazyStream(), None)
    assert pinned.available_host_bytes() > 2**20


def test_a_file_that_shrinks_is_an_error_with_its_name(tmp_path, small_chunks) -> None:
    checkpoint = write_model(tmp_path)
    store, stream = make_store(checkpoint, 0)
    fill_places(store, checkpoint)
    memory = torch.empty(store.shape.numel)
    store.send(1, 2, 0, store.shape.numel, memory)
    stream.synchronize()
    whole = (tmp_path / "model-1.safetensors").read_bytes()
    os.truncate(tmp_path / "model-1.safetensors", len(whole) // 3)
    cut = next(e for e in range(EXPERTS) if checkpoint.location(f"1.{e}.gate").offset > len(whole) // 3)
    with pytest.raises(ModelError, match=r"model-1\.safetensors: ends before byte \d+.*restore it"):
        store.send(1, cut, 0, store.shape.numel, memory)
    store.send(0, 0, 0, store.shape.numel, memory)  # the other file still serves
    store.close()


def test_a_file_that_is_gone_is_an_error_with_its_name(tmp_path) -> None:
    checkpoint = write_model(tmp_path)
    store, _ = make_store(checkpoint, 0)
    for name in ("0.0.gate", "1.0.gate"):
        checkpoint.location(name)  # the headers are known
    (tmp_path / "model-0.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-0\.safetensors: cannot be opened \(No such file"):
        fill_places(store, checkpoint)
    store.close()


@pytest.mark.parametrize("replaced", [True, False])
def test_a_file_that_is_replaced_or_removed_later_still_serves_what_was_loaded(tmp_path, replaced: bool) -> None:
    """A new version of a model arrives under the old names: its numbers must not mix with those in memory."""
    checkpoint = write_model(tmp_path)
    store, stream = make_store(checkpoint, 2)
    fill_places(store, checkpoint)
    wanted = torch.cat([checkpoint.read(f"1.2.{part}").flatten() for part in ("gate", "up", "down")])
    path = tmp_path / "model-1.safetensors"
    other = path.read_bytes()
    path.unlink()
    if replaced:
        path.write_bytes(other[:2000] + bytes(len(other) - 2000))
    memory = torch.empty(store.shape.numel)
    store.send(1, 2, 0, store.shape.numel, memory)
    stream.synchronize()
    assert torch.equal(memory, wanted)
    store.close()


def test_an_expert_whose_place_was_not_recorded_is_an_error_and_not_zeros(tmp_path) -> None:
    store, _ = make_store(write_model(tmp_path), 0)
    with pytest.raises(AssertionError, match="the loader recorded where each part is"):
        store.send(0, 0, 0, store.shape.numel, torch.zeros(store.shape.numel))


def test_locations_are_checked(tmp_path) -> None:
    checkpoint = write_model(tmp_path)
    found = checkpoint.location("0.1.up")
    raw = bytearray(found.path.read_bytes()[found.offset : found.offset + found.num_bytes])
    assert torch.equal(torch.frombuffer(raw, dtype=found.dtype).view(SIZE, HIDDEN), checkpoint.read("0.1.up"))
    with pytest.raises(ModelError, match="no tensor"):
        checkpoint.location("nothing")
    os.truncate(tmp_path / "model-1.safetensors", 2000)  # after it was opened
    with pytest.raises(ModelError, match="model-1"):
        checkpoint.location("1.0.up")


def test_integers_are_no_experts(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"x": torch.zeros(4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="plain numbers"):
        SafetensorsFolder(tmp_path).location("x")


def test_offload_from_disk_has_the_bits_of_resident(tmp_path, small_chunks) -> None:
    checkpoint = write_model(tmp_path)
    options = OffloadOptions(2, 2, host_bytes=2 * EXPERT_BYTES, piece_bytes=EXPERT_BYTES // 4)
    rig = make_rig(LAYERS, EXPERTS, 2, options, num_pieces=3, checkpoint=checkpoint)
    fill_places(rig.offload.store, checkpoint)
    for layer in range(LAYERS):
        rows = [[checkpoint.read(f"{layer}.{e}.{part}") for part in ("gate", "up", "down")] for e in range(EXPERTS)]
        gate_up = torch.stack([torch.cat(row[:2]) for row in rows])
        rig.reference[layer] = gate_up, torch.stack([row[2] for row in rows])
    generator = torch.Generator().manual_seed(0)
    for num_tokens in (9, 1, 1, 2, 1, 1):
        for layer in range(LAYERS):
            x, ids, weights = random_call(rig, num_tokens, generator)
            assert torch.equal(rig.layer(layer)(x, ids, weights), rig.resident(layer, x, ids, weights))
    num_open = len(os.listdir("/proc/self/fd"))
    rig.offload.close()
    assert len(os.listdir("/proc/self/fd")) == num_open - LAYERS
