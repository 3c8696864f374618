"""Weights in 8-bit floats with scales: what the loader fills in is what the file says, and what does not fit stays
exact. The products of a GPU are in tests/ops; here the plain twin computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nanovllm.attention.sdpa import SdpaBackend
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.hardware.parallel import Parallel, Shard
from nanovllm.layers.build import Build
from nanovllm.layers.parted import PartedLoading, check_products, parted_weights
from nanovllm.layers.scaled import ScaledWeight, Scales
from nanovllm.model_config import ModelConfig
from nanovllm.models.registry import find_family
from nanovllm.models.transformer import Parts
from nanovllm.ops import fp8
from nanovllm.ops.opset import PLAIN
from nanovllm.runner.quantization import choose_scales
from nanovllm.weights.checkpoint import open_checkpoint
from nanovllm.weights.fp8 import Fp8Blocks
from nanovllm.weights.loader import load_dummy, load_weights
from tests.weights.quantised_samples import compressed_config, float_scheme, floats, write_folders

CPU = torch.device("cpu")
FORMATS = {
    "tensor": (floats("tensor", {"quant_method": "fp8"}), Scales(0)),
    "row": (floats("channel", compressed_config("float-quantized", float_scheme("channel"))), Scales(0)),
    "block": (
        floats("block", {"quant_method": "fp8", "weight_block_size": [128, 128]}, "weight_scale_inv", (128, 128)),
        Scales(128),
    ),
}

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


def weight(parts: dict[str, int], columns: int, scales: Scales) -> ScaledWeight:
    return ScaledWeight(parts, columns, scales, torch.float32, CPU)


def numbers(found: ScaledWeight) -> torch.Tensor:
    return found.plain if found.plain is not None else fp8.expand(found.q, found.scale, torch.float32)


def blocks(rows: int, columns: int, block: tuple[int, int]) -> Fp8Blocks:
    sizes = -(-rows // block[0]), -(-columns // block[1])
    return Fp8Blocks(torch.randn(rows, columns).to(torch.float8_e4m3fn), torch.rand(sizes) + 0.5, block)


@pytest.mark.parametrize("block", [(7, 40), (1, 40)])
def test_parts_with_a_scale_of_a_tensor_or_a_row_keep_their_numbers(block: tuple[int, int]) -> None:
    found, (a, b) = weight({"q": 7, "k": 5}, 40, Scales()), (blocks(7, 40, block), blocks(5, 40, (5, 40)))
    assert found.put("q", a)
    assert found.put("k", b)
    assert torch.equal(numbers(found), torch.cat([a.expanded(), b.expanded()]))
    assert found.num_bytes == 12 * 40 + 12 * 4


def test_blocks_that_meet_at_a_row_stay_and_others_become_plain_numbers() -> None:
    for rows, is_kept in ((256, True), (200, False)):
        parts = [blocks(n, 300, (128, 128)) for n in (rows, 130)]
        found = weight({"gate": rows, "up": 130}, 300, Scales(128))
        assert found.put("gate", parts[0])
        assert found.put("up", parts[1]) is is_kept
        assert (found.plain is None) is is_kept
        assert torch.equal(numbers(found), torch.cat([part.expanded() for part in parts]))


def test_a_part_that_the_file_has_in_16_bits_is_not_quantised() -> None:
    found, plain = weight({"q": 4, "k": 4}, 16, Scales()), torch.randn(4, 16)
    found.put("q", blocks(4, 16, (1, 16)))
    assert not found.put("k", plain)
    assert torch.equal(numbers(found)[4:], plain)


def test_quantised_while_loading() -> None:
    found, plain = weight({"": 6}, 32, Scales(quantises=True)), torch.randn(6, 32)
    plain[2] = 0
    assert found.put("", plain)
    torch.testing.assert_close(numbers(found), plain, rtol=2**-4, atol=1e-3)  # 3 bits of mantissa, rounded
    assert torch.equal(numbers(found)[2], plain[2])
    assert found.q.float().abs().amax(1)[[0, 1, 3, 4, 5]].tolist() == [448.0] * 5


@pytest.mark.parametrize(("dim", "start", "length"), [(0, 0, 128), (0, 128, 128), (1, 256, 128), (1, 64, 64)])
@pytest.mark.parametrize("block", [(128, 128), (1, 384), (256, 384)])
def test_a_ranks_part_is_a_slice_of_the_whole(block: tuple[int, int], dim: int, start: int, length: int) -> None:
    whole = blocks(256, 384, block)
    found = whole.cut(Shard(dim, start, length, whole.q.shape[dim]))
    assert torch.equal(found.expanded(), whole.expanded().narrow(dim, start, length))


@pytest.mark.parametrize(
    ("rows", "ranks", "dim", "said"),
    [
        ((512, 256), 2, 0, ""),
        ((512, 256), 3, 0, "3 ranks cut 512 + 256 rows within blocks of 128"),
        ((512, 256), 4, 0, "4 ranks cut 512 + 256 rows within blocks of 128"),
        ((256,), 3, 1, ""),
        ((256,), 2, 1, "2 ranks cut 384 inputs within blocks of 128; numbers of ranks that keep it: [1, 3]"),
        ((256,), 4, 1, "4 ranks cut 384 inputs within blocks of 128; numbers of ranks that keep it: [1, 3]"),
        ((200, 256), 1, 0, "its parts, of [200, 256] rows, do not begin and end where blocks of 128 x 128 do"),
        ((200, 256), 2, 0, "its parts, of [100, 128] rows, do not begin and end where blocks of 128 x 128 do"),
    ],
)
def test_why_a_matrix_in_blocks_is_expanded(rows: tuple[int, ...], ranks: int, dim: int, said: str) -> None:
    shards = [Shard(dim, total // ranks, total // ranks, total) for total in (rows if dim == 0 else (384,))]
    if ranks == 1:
        shards = [Shard(0, 0, total, total) for total in rows]
    parts = [blocks(n, 384, (128, 128)).cut(shard) for n, shard in zip(rows, shards)]
    found = weight({str(i): len(part.q) for i, part in enumerate(parts)}, parts[0].q.shape[1], Scales(128))
    assert [found.put(str(i), part) for i, part in enumerate(parts)][-1] == (not said)
    assert found.why == (f"expanded: {said}" if said else "")


@pytest.mark.parametrize("block", [(256, 384), (1, 384)])
def test_every_ranks_columns_keep_the_scales_of_their_rows(block: tuple[int, int]) -> None:
    whole = blocks(256, 384, block)
    for start in (0, 128, 256):
        part, found = whole.cut(Shard(1, start, 128, 384)), weight({"": 256}, 128, Scales())
        assert found.put("", part), start
        assert torch.equal(numbers(found), part.expanded())


def model_of(path: Path, scales: Scales | None, **more: Any) -> Any:
    checkpoint = open_checkpoint(path)
    config = ModelConfig.from_hf(checkpoint.config)
    build = Build(torch.float32, CPU, replace(PLAIN, linear=fp8.scaled_linear), Parallel(), scaling=scales)
    if scales is None:
        build = replace(build, ops=PLAIN)
    model = find_family(config)(config, Parts(build, SdpaBackend(), 64)).eval()
    targets = PartedLoading(model).targets()
    if more.get("dummy"):
        load_dummy(model, 0, targets)
    else:
        load_weights(model, checkpoint, model.rules, targets)
    checkpoint.close()
    return model


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_holds_the_numbers_of_its_file(tmp_path: Path, name: str) -> None:
    sample, scales = FORMATS[name]
    quantised, plain = write_folders(tmp_path, "Llama", SIZES, sample)
    found, expected = model_of(quantised, scales), model_of(plain, None)
    weights = parted_weights(found)
    assert len(weights) == 4 * len(found.layers)
    for place, each in weights.items():
        assert torch.equal(numbers(each), expected.get_parameter(place)), place
    kept = [place for place, each in weights.items() if each.plain is None]
    assert len(kept) == len(weights) if name != "block" else 0 < len(kept) <= len(weights)


def test_dummy_weights_are_quantised(tmp_path: Path) -> None:
    sample, _ = FORMATS["row"]
    _, plain = write_folders(tmp_path, "Llama", SIZES, sample)
    model = model_of(plain, Scales(quantises=True), dummy=True)
    assert all(each.plain is None and each.q.float().abs().max() == 448 for each in parted_weights(model).values())


class NoRuntimeError(Exception):
    """As Triton's errors."""


@pytest.mark.parametrize("name", ["row", "block"])
@pytest.mark.parametrize("fault", ["", "is wrong by", "does not run: out of resource"])
def test_a_wrong_product_expands_all(tmp_path: Path, name: str, fault: str) -> None:
    """Inputs in 8 bits, with a scale for a row or for each 128 of them, are not a fault."""
    sample, scales = FORMATS[name]
    path = write_folders(tmp_path, "Llama", SIZES, sample)[0]
    model, before = model_of(path, scales), model_of(path, scales)

    def linear(x: torch.Tensor, weight: Any) -> torch.Tensor:
        if fault.startswith("does") and len(x) == 41:
            raise NoRuntimeError("out of resource: shared memory")
        groups = F.pad(x, (0, -x.shape[1] % 128 if weight.block else 0))
        q, scale = fp8.quantise(groups, weight.block)
        rounded = (q.float().unflatten(1, (scale.shape[1], -1)) * scale[..., None]).flatten(1)[:, : x.shape[1]]
        return fp8.scaled_linear(rounded.to(x.dtype), weight) * (1.03 if fault and len(x) == 41 else 1)

    why = check_products(model, linear)
    assert (f"a product of 41 rows with FP8 {fault}" in why) == bool(fault) == bool(why)
    for found, expected in zip(parted_weights(model).values(), parted_weights(before).values()):
        assert (found.plain is None) == (expected.plain is None and not fault)
        assert torch.equal(numbers(found), numbers(expected))


def test_what_was_expanded_is_not_called_8_bits(tmp_path: Path) -> None:
    sample, scales = FORMATS["row"]
    model = model_of(write_folders(tmp_path, "Llama", SIZES, sample)[0], scales)
    weights = list(parted_weights(model).values())
    assert {each.label for each in weights} == {"FP8"}
    weights[0].give_up()
    assert [each.label for each in weights[:2]] == ["float32", "FP8"]


@pytest.mark.parametrize("block", [0, 128])
@pytest.mark.parametrize("first", [0, 100, 128, 250])
def test_rows_are_drawn_anew(block: int, first: int) -> None:
    """Of made-up weights; those before them in their block stay what they are, to rounding."""
    found, whole = weight({"": 300}, 200, Scales(block, quantises=True)), torch.randn(300, 200)
    assert found.put("", whole)
    drawn = 2 * torch.randn(300 - first, 200)
    found.set_rows(first, drawn)
    expected = torch.cat((whole[:first], drawn))
    torch.testing.assert_close(found.expanded(), expected, rtol=0.15, atol=0.02)
    if first >= 128:
        assert torch.equal(found.expanded()[:128], expand_rounded(whole[:128], block))


def expand_rounded(x: torch.Tensor, block: int) -> torch.Tensor:
    q, scale = fp8.quantise_blocks(x) if block else fp8.quantise(x, 0)
    return fp8.expand(q, scale if block else scale[:, 0], x.dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_which_scales_a_file_gets(tmp_path: Path, name: str) -> None:
    sample, scales = FORMATS[name]
    quantised, plain = write_folders(tmp_path, "Llama", SIZES, sample)
    files, with_numbers = open_checkpoint(quantised), open_checkpoint(plain)
    model = ModelConfig.from_hf(files.config)

    def choose(path: Path, is_gpu: bool = True, **options: Any) -> Scales | None:
        config = EngineConfig(model=str(path), **options)
        return choose_scales(config, model, files if path == quantised else with_numbers, is_gpu)

    assert choose(quantised) == scales
    assert choose(quantised, is_gpu=False) is None
    assert choose(quantised, quantization="none") is None
    assert choose(plain) is None
    assert choose(plain, quantization="fp8") == Scales(quantises=True)
    with pytest.raises(ConfigError, match="int8"):
        choose(plain, quantization="fp8", is_gpu=False)
