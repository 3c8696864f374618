"""Weights of integers in groups, for a GPU: what the loader fills in is what the file says, whatever its format, and
what does not fit stays exact. The products of a GPU are in tests/ops; here the plain twin computes."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.attention.sdpa import SdpaBackend
from nanovllm.cli.facts import describe_packing, quantised_products
from nanovllm.cli.plan import read_facts
from nanovllm.config import EngineConfig
from nanovllm.hardware.parallel import Parallel
from nanovllm.layers.build import Build
from nanovllm.layers.integers import IntegerForm, IntegerWeight, expect_types
from nanovllm.layers.packed import count_weights, formats_of
from nanovllm.layers.parted import PartedLoading, check_products, parted_weights
from nanovllm.layers.scaled import Scales
from nanovllm.memory.facts import ModelFacts
from nanovllm.model_config import ModelConfig
from nanovllm.models.registry import find_family
from nanovllm.models.transformer import Parts
from nanovllm.ops import integers, quant
from nanovllm.ops.opset import PLAIN
from nanovllm.runner.quantization import choose_scales, report_stored
from nanovllm.weights.checkpoint import open_checkpoint
from nanovllm.weights.expert_form import ExpertIntegers
from nanovllm.weights.four_bits import Grouped
from nanovllm.weights.gguf_quants import TENSOR_TYPES, StoredBlocks, decode
from nanovllm.weights.integer_groups import KINDS, IntegerGroups, from_blocks, from_grouped
from nanovllm.weights.loader import load_dummy, load_weights
from tests.tiny_models import Variant, hf_model
from tests.weights.gguf_samples import blocks_of, write_model
from tests.weights.quantised_samples import Sample, awq, compressed, gptq, write_folders

CPU = torch.device("cpu")
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE = {**SIZES, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
FORMATS: dict[str, tuple[Sample, IntegerForm]] = {
    "awq": (awq(64), IntegerForm(4, 64)),
    "gptq": (gptq(32, True), IntegerForm(4, 32)),
    "gptq-128": (gptq(128, False), IntegerForm(4, 128)),  # the last group of `down` has 64 of 192 inputs
    "gptq-act-order": (gptq(32, False, act_order=True), IntegerForm(4, 32)),
    "compressed": (compressed(32, True), IntegerForm(4, 32)),
    "compressed-channel": (compressed(None, True), IntegerForm(4, None)),
}
SYMMETRIC = ("gptq", "compressed", "compressed-channel")
OF_NAME = {kind.name: kind for kind in TENSOR_TYPES.values()}


def numbers(weight: IntegerWeight) -> torch.Tensor:
    return weight.plain if weight.plain is not None else integers.expand(weight, torch.float32)


def grouped(outputs: int, group: torch.Tensor, zero: int | None = None) -> Grouped:
    number = int(group.max()) + 1
    zeros = torch.randint(0, 16, (outputs, number)) if zero is None else torch.full((outputs, number), zero)
    q = torch.randint(0, 16, (outputs, len(group)), dtype=torch.uint8)
    return Grouped(q, torch.rand(outputs, number).half() + 0.5, zeros.to(torch.uint8), group)


# ---- the form ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
def test_where_the_bits_lie(bits: int) -> None:
    """By the definition in ops/integers.py, number by number; also where a row ends within a block."""
    columns, length, middle = 224, 512 // bits, 2 ** (bits - 1)
    q = torch.randint(0, 2**bits, (3, columns), dtype=torch.uint8)
    words = integers.pack_words(q, bits)
    assert words.shape == (3, -(-columns // length) * 16)
    shifts = (0, 8, 4, 12) * 2 if bits == 4 else (0, 8) * 2
    for i in range(columns):
        place, column = divmod(i % length, 16)
        word = words[:, i // length * 16 + column // 2 * 2 + (2 * place >= len(shifts))].long()
        found = word >> shifts[place] + 16 * (column % 2) & 2**bits - 1
        assert torch.equal(found ^ middle, q[:, i].long())
    assert torch.equal(integers.unpack_words(words, bits, columns).int() + middle, q.int())
    whole = integers.unpack_words(words, bits, words.shape[1] * 32 // bits)
    assert not whole[:, columns:].any()


@pytest.mark.parametrize("name", KINDS)
def test_blocks_of_gguf(name: str) -> None:
    import gguf

    kind = OF_NAME[name]
    raw = torch.tensor(blocks_of(torch.randn(5, 512).numpy(), gguf.GGMLQuantizationType[name]))
    found = from_blocks(StoredBlocks(kind, raw))
    expected = decode(raw.flatten(), kind).view(5, 512)
    torch.testing.assert_close(found.expanded(), expected, rtol=1e-6, atol=1e-6)
    assert found.fits_half
    assert (found.bits, found.group) == (4 if name.startswith("Q4") else 8, 16 if name == "Q6_K" else 32)
    torch.testing.assert_close(found.columns(96, 64).expanded(), expected[:, 96:160], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("zero", [8, None])
def test_groups_that_are_runs(zero: int | None) -> None:
    for size, start in ((64, 0), (64, 32), (32, 32), (128, 64), (256, 0)):
        whole = grouped(4, torch.arange(256) // size, zero)
        piece = whole.narrow(slice(0, 3), slice(start, 224))
        found = from_grouped(piece)
        assert isinstance(found, IntegerGroups)
        assert found.group == (size if start % size == 0 and size < 256 else 224 if size == 256 else 32)
        assert (found.offset is None) == (zero == 8)
        torch.testing.assert_close(found.expanded(), piece.expanded())


def test_groups_that_are_no_runs() -> None:
    shuffled = grouped(4, torch.arange(96)[torch.randperm(96)] // 32)
    found = from_grouped(shuffled)
    assert isinstance(found, IntegerGroups)
    assert found.order is not None
    torch.testing.assert_close(found.expanded(), shuffled.expanded())
    assert from_grouped(grouped(4, torch.arange(96) // 48)) == "expanded: its groups of 48 inputs cut blocks of 32"
    assert from_grouped(grouped(4, torch.arange(72) // 36)) == "expanded: a row of 72 is no multiple of 32"
    assert from_grouped(grouped(4, torch.zeros(40, dtype=torch.long))) == "expanded: a row of 40 is no multiple of 32"


# ---- a weight of several parts -------------------------------------------------------------------------------------


def weight(parts: dict[str, int], columns: int, **form: Any) -> IntegerWeight:
    return IntegerWeight(parts, columns, IntegerForm(**form), torch.float32, CPU)


def groups(rows: int, bits: int = 4, group: int = 32, has_offset: bool = True, columns: int = 128) -> IntegerGroups:
    number = -(-columns // group)
    q = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8)
    offset = torch.randn(rows, number).half().float() if has_offset else None
    return IntegerGroups(bits, group, q, torch.rand(rows, number).half().float(), offset)


def test_parts_in_different_forms_share_the_wider_bits_and_the_smaller_groups() -> None:
    parts = {"q": groups(6, 4, 64), "k": groups(3, 8, 32, False), "v": groups(2, 8, 16, False)}
    found = weight({name: len(part.q) for name, part in parts.items()}, 128)
    assert [found.put(name, part) for name, part in parts.items()] == [True] * 3
    assert (found.bits, found.group, found.label) == (8, 16, "int8-16")
    torch.testing.assert_close(numbers(found), torch.cat([part.expanded() for part in parts.values()]))
    assert found.num_bytes == 11 * (128 + 8 * 4)


def test_the_same_form_keeps_its_memory() -> None:
    found = weight({"gate": 4, "up": 4}, 128, group=64)
    words = found.words
    for name in ("gate", "up"):
        found.put(name, part := groups(4, 4, 64, False))
    assert found.words is words
    assert found.num_bytes == 8 * (64 + 2 * 4)
    torch.testing.assert_close(numbers(found)[4:], part.expanded())


def test_an_order_of_inputs_is_shared_or_the_weight_expanded() -> None:
    order, other = torch.randperm(128), torch.randperm(128)
    for second, fits in ((order, True), (other, False), (None, False)):
        parts = [replace(groups(4), order=order), replace(groups(4), order=second)]
        found = weight({"q": 4, "k": 4}, 128)
        found.put("q", parts[0])
        assert found.put("k", parts[1]) is fits
        torch.testing.assert_close(numbers(found), torch.cat([part.expanded() for part in parts]), rtol=1e-6, atol=1e-6)
        assert fits or ("different orders" in found.why and found.label == "float32")


@pytest.mark.parametrize(
    ("columns", "part", "why"),
    [
        (40, torch.randn(4, 40), "a row of 40 is no multiple of 32"),
        (128, torch.randn(4, 128), "the file has float32"),
        (
            128,
            replace(groups(4), scale=torch.full((4, 4), 2.0**-30), offset=None),
            "too small or too large for float16",
        ),
        (128, replace(groups(4), scale=torch.full((4, 4), 1e6), offset=None), "too small or too large for float16"),
    ],
)
def test_what_does_not_fit_stays_exact(columns: int, part: Any, why: str) -> None:
    found, exact = weight({"": 4}, columns), part if isinstance(part, torch.Tensor) else part.expanded()
    assert not found.put("", part)
    assert why in found.why
    assert torch.equal(numbers(found), exact)
    assert found.num_bytes == 4 * columns * 4


@pytest.mark.parametrize(("bits", "name"), [(4, "Q4_1"), (8, "Q8_0")])
def test_quantised_while_loading_as_on_a_cpu(bits: int, name: str) -> None:
    found, plain = weight({"": 6}, 96, bits=bits, quantises=True), torch.randn(6, 96)
    plain[2] = 0
    assert found.put("", plain)
    cpu = quant.dequantise_rows(quant.quantise_matrix(name, plain), torch.arange(6))
    step = (plain.max() - plain.min()) / (2**bits - 1)
    torch.testing.assert_close(numbers(found), cpu, rtol=1e-3, atol=float(step) / 100)
    assert torch.equal(numbers(found)[2], plain[2])


# ---- models from files ---------------------------------------------------------------------------------------------


def model_of(path: Path, form: IntegerForm | None, parallel: Parallel | None = None, dummy: bool = False) -> Any:
    checkpoint = open_checkpoint(path)
    config = ModelConfig.from_hf(checkpoint.config)
    ops = PLAIN if form is None else replace(PLAIN, linear=_linear)
    build = Build(torch.float32, CPU, ops, parallel or Parallel(), scaling=form)
    model = find_family(config)(config, Parts(build, SdpaBackend(), 64)).eval()
    loading = PartedLoading(model)
    expect_types(model, checkpoint, model.rules)
    expected = count_weights(model)[1]
    if dummy:
        load_dummy(model, 0, loading.targets())
    else:
        load_weights(model, checkpoint, model.rules, loading.targets())
    if form is not None:
        loading.report()
        if str(path).endswith(".gguf"):
            assert count_weights(model)[1] == expected
    checkpoint.close()
    return model


def _linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    product = torch.nn.functional.linear if isinstance(weight, torch.Tensor) else integers.integer_linear
    return product(x, weight, bias)


def choose(path: Path, is_gpu: bool = True, **options: Any) -> Any:
    checkpoint = open_checkpoint(path)
    config = EngineConfig(model=str(path), **options)
    return choose_scales(config, ModelConfig.from_hf(checkpoint.config), checkpoint, is_gpu)


def compare(found: Any, expected: Any, parts: int) -> None:
    weights = parted_weights(found)
    assert len(weights) == 4 * len(found.layers)
    assert sum(each.plain is None for each in weights.values()) == parts
    for place, each in weights.items():
        torch.testing.assert_close(numbers(each), expected.get_parameter(place), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_holds_the_numbers_of_its_file(tmp_path: Path, name: str) -> None:
    sample, form = FORMATS[name]
    quantised, plain = write_folders(tmp_path, "Llama", SIZES, sample)
    assert choose(quantised) == form
    found = model_of(quantised, form)
    compare(found, model_of(plain, None), 8)
    if name in SYMMETRIC:  # then every number is exact
        assert all(
            torch.equal(numbers(w), model_of(plain, None).get_parameter(n)) for n, w in parted_weights(found).items()
        )
    assert f"int4-{form.group or 128}" in formats_of(found)
    weights = parted_weights(found).values()
    size = sum(4 * w.shape[0] * (-(-w.shape[1] // 128)) * (16 + 128 // w.group) for w in weights)
    size += sum(8 * w.shape[1] for w in weights if w.order is not None)
    assert size == count_weights(found)[1] - sum(p.nbytes for p in found.parameters())


@pytest.mark.parametrize("name", KINDS)
def test_a_gguf_model_alike(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    state = hf_model(Variant("Llama", WIDE), 0).state_dict()
    path = write_model(tmp_path / "m.gguf", "llama", state, head_dim=64, types={"proj": name, "embed": "Q8_0"})
    form = choose(path)
    assert form.bits == KINDS[name][0]
    with caplog.at_level(logging.INFO, "nanovllm"):
        found = model_of(path, form)
        checkpoint = open_checkpoint(path)
        report_stored(checkpoint, None, form, torch.bfloat16, False)
    compare(found, model_of(path, None), 4)
    assert f"matrices in memory: int{form.bits}-{form.group}, " in caplog.text
    assert "1 matrices stored as Q8_0 are expanded to bfloat16" in caplog.text
    kinds = {name, "Q8_0"}
    assert describe_packing(None, form, checkpoint) == ", ".join(sorted(kinds))


def test_parts_of_several_types_as_llama_cpp_mixes_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Q4_K_M has some `v` and `down` in Q6_K."""
    state = hf_model(Variant("Llama", WIDE), 0).state_dict()
    types = {"v_proj": "Q6_K", "down_proj": "Q6_K", "gate_proj": "F16", "proj": "Q4_K"}
    path = write_model(tmp_path / "m.gguf", "llama", state, head_dim=64, types=types)
    with caplog.at_level(logging.INFO, "nanovllm"):
        found = model_of(path, choose(path))
    compare(found, model_of(path, None), 3)
    assert formats_of(found) == ["float32", "int4-32", "int8-16"]
    assert (
        "gate_proj.weight: the file has float16" in caplog.text or "up_proj.weight: the file has float16" in caplog.text
    )


@pytest.mark.parametrize("name", ["awq", "gptq-128", "gptq-act-order", "Q4_K"])
def test_ranks_cut_groups_at_borders_of_32(tmp_path: Path, name: str) -> None:
    """`down` has 96 columns of 192 a rank, one and a half groups of 64; of Q4_K half of a block of 256. Inputs of
    a rank that were shuffled (act-order) are no whole groups: expanded."""
    if name == "Q4_K":
        state = hf_model(Variant("Llama", WIDE), 0).state_dict()
        quantised = write_model(tmp_path / "m.gguf", "llama", state, head_dim=64, types={"proj": name})
        expected = model_of(quantised, None)
    else:
        quantised, plain = write_folders(tmp_path, "Llama", SIZES, FORMATS[name][0])
        expected = model_of(plain, None)
    for rank in range(2):
        found = model_of(quantised, choose(quantised), Parallel(rank, 2))
        for place, each in parted_weights(found).items():
            whole, layer = expected.get_parameter(place), found.get_submodule(place.rpartition(".")[0])
            pieces = whole.split([shard.total if shard.dim == 0 else len(whole) for shard in layer.shards.values()])
            cut = [p.narrow(s.dim, s.start, s.length) for p, s in zip(pieces, layer.shards.values())]
            torch.testing.assert_close(numbers(each), torch.cat(cut), rtol=2e-3, atol=1e-3)
            is_row = layer.shards.get("") is not None
            assert (each.plain is None) == (name != "gptq-act-order" or not is_row), place


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("awq", 6, ""),
        ("awq", 4, "4 ranks cut 192 inputs within 32 of them; numbers of ranks that keep it: [1, 2, 3, 6]"),
        ("awq", 12, "12 ranks cut 192 inputs within 32 of them; numbers of ranks that keep it: [1, 2, 3, 6]"),
        ("gptq", 3, ""),
        (
            "gptq-act-order",
            2,
            "2 ranks cut 192 inputs that are in an order of their own (act-order); one rank does not",
        ),
        ("groups of 48", 2, "its groups of 48 inputs cut blocks of 32"),
        ("Q4_0", 4, "4 ranks cut 192 inputs within 32 of them; numbers of ranks that keep it: [1, 2, 3, 6]"),
    ],
)
def test_why_ranks_expand_a_matrix_is_logged(
    tmp_path: Path, name: str, size: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With the numbers of ranks that keep it."""
    sizes = {**SIZES, "num_attention_heads": 12, "num_key_value_heads": 12, "hidden_size": 192, "head_dim": 16}
    if name == "Q4_0":
        state = hf_model(Variant("Llama", sizes), 0).state_dict()
        heads = {"num_heads": 12, "num_kv_heads": 12, "head_dim": 16}
        path = write_model(tmp_path / "m.gguf", "llama", state, **heads, types={"proj": name})
        form = choose(path)
    else:
        sample, form = FORMATS[name] if name in FORMATS else (awq(48), IntegerForm(4, 48))
        path, _ = write_folders(tmp_path, "Llama", sizes, sample)
    with caplog.at_level(logging.INFO, "nanovllm"):
        found = model_of(path, form, Parallel(1, size))
    assert (f"more: expanded: {said}" in caplog.text) == bool(said), caplog.text
    assert (parted_weights(found)["layers.0.mlp.down.weight"].plain is not None) == bool(said)


@pytest.mark.parametrize(("form", "name"), [((4, 32), "int4-32"), ((4, 64), "int4-64"), ((8, 32), "int8-32")])
def test_bytes_are_known_before(tmp_path: Path, form: tuple[Any, ...], name: str) -> None:
    """Of a model in 16 bits beside them, as on a GPU (memory/facts.py)."""
    hf_model(Variant("Llama", {**SIZES, "intermediate_size": 256}), 0).save_pretrained(tmp_path)
    config = ModelConfig.from_hf(open_checkpoint(tmp_path).config)
    scaling = IntegerForm(*form)
    build = Build(torch.bfloat16, torch.device("meta"), PLAIN, Parallel(), scaling=scaling)
    model = find_family(config)(config, Parts(build, SdpaBackend(), 64))
    assert count_weights(model)[1] == ModelFacts(config, 2, quantization=name).dense_bytes


def test_dummy_weights_are_quantised(tmp_path: Path) -> None:
    _, plain = write_folders(tmp_path, "Llama", SIZES, FORMATS["awq"][0])
    model = model_of(plain, IntegerForm(quantises=True), dummy=True)
    assert all(each.plain is None and each.words.any() for each in parted_weights(model).values())


def test_what_is_chosen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quantised, plain = write_folders(tmp_path, "Llama", SIZES, FORMATS["awq"][0])
    assert read_facts(EngineConfig(model=str(quantised))).quantization == "int4-64"
    assert read_facts(EngineConfig(model=str(plain))).quantization == "none"
    assert choose(plain) is None
    assert choose(quantised, is_gpu=False) is None
    assert choose(quantised, quantization="none") is None
    assert choose(plain, load_format="dummy") is None
    assert choose(quantised, load_format="dummy") == IntegerForm(4, 64, True)  # made-up numbers in the same form
    assert choose(plain, quantization="int4") == IntegerForm(4, 32, True)
    assert choose(plain, quantization="int8") == IntegerForm(8, 32, True)
    again = choose(quantised, quantization="int4")
    assert again.quantises  # as on a CPU: all is rounded anew
    report_stored(open_checkpoint(quantised), None, again, torch.bfloat16, False)
    assert "quantization='int4' rounds weights again that the file has in AWQ; 'auto' rounds nothing" in caplog.text
    floats = choose(quantised, quantization="fp8")
    assert floats == Scales(0, quantises=True)
    report_stored(open_checkpoint(quantised), None, floats, torch.bfloat16, False)
    assert "quantization='fp8' rounds weights again that the file has in AWQ; 'auto' rounds nothing" in caplog.text
    moe = hf_model(Variant("Mixtral", {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4}), 0)
    moe.save_pretrained(tmp_path / "moe")
    assert choose(tmp_path / "moe", quantization="int4").experts == ExpertIntegers((4, 32), (4, 32))
    assert "int4" in quantised_products(True, replace(PLAIN, gemv=print))
    assert quantised_products(True, PLAIN) == "no: they need triton"


@pytest.mark.parametrize("fault", ["none", "one output", "not a number", "does not run", "a part"])
def test_a_wrong_product_expands_all(tmp_path: Path, fault: str) -> None:
    """On a card that the kernels do not suit: the answer stays right, and why is said."""
    path = write_folders(tmp_path, "Llama", SIZES, FORMATS["awq"][0])[0]
    model, before = model_of(path, choose(path)), model_of(path, choose(path))

    def linear(x: torch.Tensor, weight: Any) -> torch.Tensor:
        out = integers.integer_linear(x, weight)
        if fault == "one output" and len(x) == 8:
            out[:, -1] += 10 * out.norm()
        if fault == "not a number":
            out[0, 0] = torch.nan
        if fault == "does not run":
            raise RuntimeError("no kernel image is available")
        return out

    def parts(x: torch.Tensor, weight: Any) -> torch.Tensor:
        whole = integers.integer_linear(x, weight)
        return torch.stack((whole, whole * (fault == "a part")))

    why = check_products(model, linear, parts)
    said = {"one output": "8 rows with int4", "not a number": "wrong by nan", "does not run": "no kernel image"}
    said["a part"] = "wrong by 100.0 %"
    assert said.get(fault, "") in why
    assert bool(why) == (fault != "none")
    for found, expected in zip(parted_weights(model).values(), parted_weights(before).values()):
        assert (found.plain is None) == (fault == "none")
        assert torch.equal(numbers(found) if found.plain is None else found.plain, numbers(expected))
