"""The GGUF parser on good files, on files that break one rule each, and on damaged ones."""

import contextlib
import random
import struct
import tracemalloc

import gguf
import numpy as np
import pytest
import torch
from gguf_samples import ARRAY, BOOL, F32, STRING, U32, U64, entry, info, raw_gguf, text, tiny_state, write_model

from nanovllm.errors import ModelError
from nanovllm.weights.gguf_checkpoint import GGUFCheckpoint
from nanovllm.weights.gguf_file import GGUFFile


def parse(tmp_path, data: bytes) -> GGUFFile:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    return GGUFFile(path)


def array(kind: int, length: int, payload: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, length) + payload


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def test_reads_what_the_gguf_package_writes(tmp_path):
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_string("s", "grüße")
    writer.add_bool("b", True)
    writer.add_float32("f", 0.5)
    writer.add_int64("i", -(2**40))
    writer.add_array("strings", ["a", "", "ż"])
    writer.add_array("ints", [1, -2, 3])
    plain = np.arange(12, dtype=np.float32).reshape(3, 4)
    half = np.arange(6, dtype=np.float16)
    quantised = gguf.quants.quantize(
        np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("plain", plain)
    writer.add_tensor("half", half)
    writer.add_tensor("q", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = GGUFFile(path)
    meta = file.metadata
    assert (meta["s"], meta["b"], meta["f"], meta["i"]) == ("grüße", True, 0.5, -(2**40))
    assert meta["strings"] == ["a", "", "ż"]
    assert meta["ints"].tolist() == [1, -2, 3]
    assert file.tensors["plain"].shape == (3, 4)
    assert file.tensors["q"].shape == (4, 64)
    read = {name: file.read(name) for name in file.tensors}
    file.close()  # tensors must outlive the file
    assert torch.equal(read["plain"], torch.from_numpy(plain))
    assert torch.equal(read["half"], torch.from_numpy(half))
    expected = gguf.quants.dequantize(quantised, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(read["q"].numpy(), expected)


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_and_alignment(tmp_path, version):
    alignment = entry("general.alignment", U32, u32(64))
    data = raw_gguf(
        [alignment], [info("t", [2], 0, 64)], b"\0" * 64 + struct.pack("<ff", 1, 2), version=version, alignment=64
    )
    assert parse(tmp_path, data).read("t").tolist() == [1.0, 2.0]


FLOATS = struct.pack("<8f", *range(8))
BROKEN = {
    "empty": (b"", "0 bytes"),
    "header cut": (raw_gguf()[:23], "23 bytes"),
    "magic": (b"GGML" + raw_gguf()[4:], "magic is b'GGML'"),
    "version 1": (raw_gguf(version=1), "version is 1"),
    "version 4": (raw_gguf(version=4), "version is 4"),
    "big endian": (raw_gguf(version=0x03000000), "big endian"),
    "tensor count": (raw_gguf(num_tensors=2**63), "tensor count is 9223372036854775808"),
    "one tensor too many": (raw_gguf([], [info("t", [8])], FLOATS, num_tensors=3), "tensor"),
    "metadata count": (raw_gguf(num_entries=2**40), "metadata count is 1099511627776"),
    "key length": (raw_gguf([struct.pack("<Q", 2**62) + b"x" * 40]), "metadata key 0.*only"),
    "key not UTF-8": (raw_gguf([entry(b"\xff\xfe", U32, u32(1))]), "not UTF-8"),
    "key twice": (raw_gguf([entry("k", U32, u32(1))] * 2), "'k': occurs twice"),
    "value type": (raw_gguf([entry("k", 13, u32(1))]), "the type of k is 13"),
    "bool 2": (raw_gguf([entry("k", BOOL, b"\2")]), "k is 2: a bool"),
    "string length": (raw_gguf([entry("k", STRING, struct.pack("<Q", 2**64 - 1))]), "length of k"),
    "array length": (raw_gguf([entry("k", ARRAY, array(F32, 2**61))]), "the length of k is 2305843009213693952"),
    "array bytes": (raw_gguf([entry("k", ARRAY, array(U64, 9, b"\0" * 40))], alignment=1), "length of k is 72"),
    "string array": (raw_gguf([entry("k", ARRAY, array(STRING, 10**6))]), "the length of k is 1000000"),
    "string in an array": (
        raw_gguf([entry("k", ARRAY, array(STRING, 3, text("a") + struct.pack("<Q", 10**6) + b"\0" * 40))]),
        "the length of k is 1000000 bytes: only",
    ),
    "array of strings cut": (
        raw_gguf([entry("k", ARRAY, array(STRING, 2, text("abcdefghi")))], alignment=1),
        "length of k is 8",
    ),
    "array not UTF-8": (
        raw_gguf([entry("k", ARRAY, array(STRING, 2, text("a") + text(b"\xff")))]),
        "k is bytes .* UTF-8",
    ),
    "nested array": (raw_gguf([entry("k", ARRAY, array(ARRAY, 1, array(U32, 0)))]), "item type of k is 9"),
    "array type": (raw_gguf([entry("k", ARRAY, array(99, 1, b"\0" * 8))]), "item type of k is 99"),
    "alignment 24": (raw_gguf([entry("general.alignment", U32, u32(24))]), "general.alignment is 24"),
    "alignment 0": (raw_gguf([entry("general.alignment", U32, u32(0))]), "general.alignment is 0"),
    "alignment 4": (raw_gguf([entry("general.alignment", U32, u32(4))]), "general.alignment is 4"),
    "alignment text": (raw_gguf([entry("general.alignment", STRING, text("32"))]), "general.alignment is 32"),
    "no dimensions": (raw_gguf([], [info("t", [8], num_dims=0)], FLOATS), "dimension count of t is 0"),
    "five dimensions": (raw_gguf([], [info("t", [1] * 5)], FLOATS), "dimension count of t is 5"),
    "zero dimension": (raw_gguf([], [info("t", [8, 0])], FLOATS), "no dimension may be 0"),
    "product overflow": (raw_gguf([], [info("t", [2**33, 2**31])], FLOATS), "the end of t"),
    "known type": (raw_gguf([], [info("t", [256], 10)], FLOATS), "Q2_K, which is not supported"),
    "unknown type": (raw_gguf([], [info("t", [8], 777)], FLOATS), "the type of t is 777"),
    "removed type": (raw_gguf([], [info("t", [8], 4)], FLOATS), "the type of t is 4"),
    "row of a half block": (raw_gguf([], [info("t", [16, 2], 8)], b"\0" * 64), "row length of t is 16"),
    "offset unaligned": (raw_gguf([], [info("t", [1], 0, 4)], FLOATS), "the offset of t is 4"),
    "offset outside": (raw_gguf([], [info("t", [8], 0, 32)], FLOATS), "the end of t"),
    "offset huge": (raw_gguf([], [info("t", [8], 0, 2**64 - 32)], FLOATS), "the end of t"),
    "one byte short": (raw_gguf([], [info("t", [8])], FLOATS[:-1]), "the end of t"),
    "name twice": (raw_gguf([], [info("t", [4])] * 2, FLOATS), "'t': occurs twice"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_rule_is_named(tmp_path, case):
    data, message = BROKEN[case]
    with pytest.raises(ModelError, match=message) as caught:
        parse(tmp_path, data)
    assert "x.gguf" in str(caught.value)


def test_the_same_file_unbroken(tmp_path):
    """Guards the table above: its files fail for the one broken rule only."""
    file = parse(tmp_path, raw_gguf([entry("k", U32, u32(1))], [info("t", [8])], FLOATS))
    assert file.read("t").tolist() == list(range(8))


def test_missing_file_and_folder(tmp_path):
    for path in (tmp_path / "no.gguf", tmp_path):
        with pytest.raises(ModelError, match="cannot be read"):
            GGUFFile(path)


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "s.gguf"
    state = tiny_state(num_layers=1)
    state = {name: tensor for name, tensor in state.items() if "mlp.gate" not in name}  # any subset will do
    data = write_model(path, "llama", state).read_bytes()
    return path, data, GGUFFile(path).tensors["token_embd.weight"].start


def survive(path, data: bytes) -> bool:
    """True when it parsed. Nothing but ModelError may come out, also from reading and from the derived config."""
    path.write_bytes(data)
    try:
        file = GGUFFile(path)
    except ModelError:
        return False
    for name in file.tensors:
        file.read(name)
    file.close()
    with contextlib.suppress(ModelError):
        GGUFCheckpoint(path).close()
    return True


def test_every_truncation_of_the_header(sample):
    path, data, header_len = sample
    step = max(1, header_len // 700)
    for length in range(0, header_len, step):
        assert not survive(path, data[:length]), length
    assert survive(path, data)
    assert not survive(path, data[:-33])  # more than the padding


def test_every_kind_of_overwrite(sample):
    """Numbers that break careless readers, anywhere in the header, alone and cut off, within a bounded allocation."""
    path, data, header_len = sample
    rng = random.Random(0)
    numbers = [struct.pack("<Q", number) for number in (0, 10**7, 2**31, 2**32, 2**63, 2**64 - 1)]
    evil = [*numbers, b"\xff" * 4, u32(9), b"\x80", rng.randbytes(12)]
    parsed = 0
    tracemalloc.start()
    for _ in range(600):
        at, patch = rng.randrange(header_len), rng.choice(evil)
        damaged = data[:at] + patch + data[at + len(patch) :]
        parsed += survive(path, damaged)
        if rng.random() < 0.2:
            survive(path, damaged[: rng.randrange(len(damaged))])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0 < parsed < 600
    assert peak < 20 * len(data) + (1 << 20), peak
