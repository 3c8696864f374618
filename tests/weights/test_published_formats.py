"""Quantised safetensors as they are published give what their numbers give: whole, sliced, over ranks, and packed."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantised_samples import (
    KEPT,
    Numbers,
    Sample,
    as_compressed,
    as_gptq,
    awq,
    compressed,
    compressed_config,
    float_scheme,
    floats,
    gptq,
    write_folders,
    write_weight,
)
from safetensors.torch import load_file, save_file

from nanovllm import LLM, ModelError, SamplingParams
from nanovllm.attention.sdpa import SdpaBackend
from nanovllm.cli.facts import collect
from nanovllm.config import EngineConfig
from nanovllm.hardware.parallel import Parallel
from nanovllm.layers.build import Build
from nanovllm.layers.packed import packed_weights
from nanovllm.layers.scaled_attention import scaled_layers
from nanovllm.model_config import ModelConfig
from nanovllm.models.registry import find_family
from nanovllm.models.transformer import Parts, Transformer
from nanovllm.ops.native.build import load_library
from nanovllm.ops.opset import PLAIN
from nanovllm.ops.quant import PackedMatrix, dequantise_rows
from nanovllm.runner.quantization import load_kv_scales
from nanovllm.weights.four_bits import Grouped
from nanovllm.weights.fp8 import Fp8Blocks
from nanovllm.weights.safetensors_folder import SafetensorsFolder
from tests.cli.runner import Run

needs_compiler = pytest.mark.skipif(isinstance(load_library(), str), reason="no C compiler")
MakeLLM = Callable[..., LLM]
SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
MIXTRAL = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4}
QWEN3_MOE = {
    "hidden_size": 64,
    "head_dim": 16,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
SAMPLES = {
    "awq-64": ("Llama", awq(64, zero_point=True)),
    "awq-channel": ("Qwen2", awq(None, version="GEMM")),
    "gptq-32": ("Llama", gptq(32, True)),
    "gptq-128": ("Qwen2", gptq(128, True)),  # of the 192 inputs of `down` the second group has 64
    "gptq-64-asymmetric": ("Qwen3", gptq(64, False)),
    "gptq-channel-v2": ("Llama", gptq(None, False, less=0, checkpoint_format="gptq_v2")),
    "gptq-act-order": ("Llama", gptq(32, False, act_order=True)),
    "gptq-called-v1-with-zeros-of-v2": ("Llama", gptq(64, True, less=0, checkpoint_format="gptq")),
    "compressed-32": ("Llama", compressed(32, True)),
    "compressed-64-asymmetric": ("Qwen3", compressed(64, False)),
    "compressed-channel": ("Llama", compressed(None, True, dtype=torch.float32)),
    "compressed-act-order": ("Llama", compressed(64, False, act_order=True)),
    "fp8-tensor": ("Llama", floats("tensor", FP8)),
    "fp8-scalar": ("Qwen3", floats("scalar", FP8, "weight_scale_inv")),
    "fp8-block": ("Qwen3", floats("block", {**FP8, "weight_block_size": [16, 32]}, "weight_scale_inv")),
    "fp8-channel": ("Llama", floats("channel", compressed_config("float-quantized", float_scheme("channel")))),
    "fp8-compressed-block": (
        "Llama",
        floats("block", compressed_config("float-quantized", float_scheme("block", block_structure=[16, 32]))),
    ),
}


@pytest.fixture
def folders(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    def make(family: str, sample: Sample, sizes: dict[str, Any] | None = None, **more: Any) -> tuple[Path, Path]:
        return write_folders(tmp_path, family, sizes or SIZES, sample, **more)

    return make


def answers(llm: LLM) -> Any:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    found = llm.generate([list(range(3, 40)), [5, 9]], params, use_tqdm=False)
    return [[(step.token_ids, step.logprobs) for step in output.outputs] for output in found]


def engine(make_llm: Callable[..., Any], path: Path, **options: Any) -> Any:
    return make_llm(path, skip_tokenizer_init=True, **options)


def expanded(matrices: list[PackedMatrix | torch.Tensor]) -> torch.Tensor:
    whole = [m if isinstance(m, torch.Tensor) else dequantise_rows(m, torch.arange(m.outputs)) for m in matrices]
    return torch.cat(whole)


def forms(matrices: list[PackedMatrix | torch.Tensor]) -> list[str]:
    return ["float32" if isinstance(matrix, torch.Tensor) else matrix.form.name for matrix in matrices]


# ---- the numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_a_model_gives_what_its_numbers_give(
    make_llm: MakeLLM, folders: Callable[..., tuple[Path, Path]], name: str
) -> None:
    small, plain = folders(*SAMPLES[name])
    found, expected = SafetensorsFolder(small), SafetensorsFolder(plain)
    assert sorted(found.names()) == sorted(expected.names())
    for tensor in expected.names():
        assert found.shape(tensor) == expected.shape(tensor)
        assert torch.equal(found.read(tensor), expected.read(tensor))
    assert found.location("model.layers.0.mlp.up_proj.weight") is None
    assert answers(engine(make_llm, small, quantization="none")) == answers(engine(make_llm, plain))


@pytest.mark.parametrize(("family", "sizes"), [("Mixtral", MIXTRAL), ("Qwen3Moe", QWEN3_MOE)])
@pytest.mark.parametrize("sample", [awq(32), gptq(32, True), floats("tensor", FP8)], ids=["awq", "gptq", "fp8"])
@pytest.mark.parametrize("placement", [{}, {"expert_placement": "offload", "expert_cache_gb": 2e-4}], ids=["", "moved"])
def test_experts_alike(
    make_llm: MakeLLM,
    folders: Callable[..., tuple[Path, Path]],
    family: str,
    sizes: dict[str, Any],
    sample: Sample,
    placement: dict[str, Any],
) -> None:
    small, plain = folders(family, sample, sizes)
    assert any(".experts.3." in name for name in SafetensorsFolder(small).packed_forms())
    expected = answers(engine(make_llm, plain))
    assert answers(engine(make_llm, small, quantization="none", **placement)) == expected


@needs_compiler
@pytest.mark.parametrize("placement", ["resident", "offload"])
def test_experts_stay_in_4_bits(make_llm: MakeLLM, folders: Callable[..., tuple[Path, Path]], placement: str) -> None:
    small, plain = folders("Mixtral", gptq(32, True), MIXTRAL)
    llm = engine(make_llm, small, expert_placement=placement)
    exact = dict(engine(make_llm, plain).engine.executor.runner.model.named_parameters())
    weights = packed_weights(llm.engine.executor.runner.model)
    for name in ("layers.1.mlp.experts.gate_up.weight", "layers.1.mlp.experts.down.weight"):
        assert set(forms(weights[name].matrices)) == {"Q4_0"}
        assert torch.equal(expanded(weights[name].matrices), exact[name].flatten(0, -2))
    answers(llm)


@needs_compiler
def test_a_head_in_4_bits(make_llm: MakeLLM, folders: Callable[..., tuple[Path, Path]]) -> None:
    """300 rows: the last word of its zeros is half empty, and its last panel too."""
    small, plain = folders("Llama", gptq(32, True), kept=("embed_tokens", "norm"))
    exact = engine(make_llm, plain)
    assert answers(engine(make_llm, small, quantization="none")) == answers(exact)
    head = packed_weights(engine(make_llm, small).engine.executor.runner.model)["head.weight"]
    assert forms(head.matrices) == ["Q4_0"]
    assert torch.equal(expanded(head.matrices), exact.engine.executor.runner.model.get_parameter("head.weight"))


@pytest.mark.parametrize("name", SAMPLES)
def test_the_packed_form_is_the_weight(folders: Callable[..., tuple[Path, Path]], name: str) -> None:
    checkpoint = SafetensorsFolder(folders(*SAMPLES[name], {**SIZES, "num_hidden_layers": 1})[0])
    weight = "model.layers.0.mlp.down_proj.weight"
    packed = checkpoint.read_packed(weight)
    if name in ("fp8-block", "fp8-compressed-block"):  # of 16 x 32: no product takes these
        assert packed is None
        assert checkpoint.bytes_location(weight) is None
        assert weight in checkpoint.packed_forms()
        return
    assert isinstance(packed, Fp8Blocks if name.startswith("fp8") else Grouped)
    assert (checkpoint.bytes_location(weight) is not None) == name.startswith("fp8")
    assert torch.equal(packed.expanded(), checkpoint.read(weight))
    if isinstance(packed, Grouped):
        assert packed.is_in_order == ("act-order" not in name)
        assert packed.q.dtype == packed.zero.dtype == torch.uint8
    assert checkpoint.read_packed("model.norm.weight") is None
    assert weight in checkpoint.packed_forms()


SHAPES = {"awq": (24, 37), "gptq": (20, 40), "compressed": (21, 45), "fp8": (21, 45)}


@pytest.mark.parametrize("name", [name for name in SAMPLES if name not in ("awq-channel", "fp8-compressed-block")])
def test_a_slice_is_a_part_of_the_whole(tmp_path: Path, name: str) -> None:
    """Rows and columns that are no multiples of eight, where the format allows them."""
    sample, shape = SAMPLES[name][1], SHAPES[name.split("-")[0]]
    parts, exact = sample.pack(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    checkpoint = SafetensorsFolder(write_weight(tmp_path, sample, {f"a.b.{part}": t for part, t in parts.items()}))
    assert checkpoint.names() == ["a.b.weight"]
    assert checkpoint.shape("a.b.weight") == shape
    assert torch.equal(checkpoint.read("a.b.weight"), exact)

    @settings(deadline=None, max_examples=40)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        dim = data.draw(st.integers(0, 1))
        start = data.draw(st.integers(0, shape[dim] - 1))
        length = data.draw(st.integers(1, shape[dim] - start))
        assert torch.equal(checkpoint.read_slice("a.b.weight", dim, start, length), exact.narrow(dim, start, length))

    check()


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32 - 1), st.sampled_from(["v1", "v2", "compressed"]))
def test_any_numbers_come_back(tmp_path: Path, seed: int, form: str) -> None:
    """Numbers that no tool would choose: any q with any zero."""
    rng = np.random.default_rng(seed)
    outputs, inputs, size = 8 * int(rng.integers(1, 4)), 8 * int(rng.integers(1, 9)), int(rng.integers(1, 40))
    group = rng.permutation(np.arange(inputs) // size)
    shape = outputs, int(group.max()) + 1
    zeros = rng.integers(0, 16, shape)
    n = Numbers(rng.integers(0, 16, (outputs, inputs)), zeros, torch.tensor(rng.random(shape)).half(), group)
    if form == "compressed":
        sample, parts = compressed(size, False, True), as_compressed(n, act_order=True)
    else:
        version = "gptq" if form == "v1" else "gptq_v2"
        sample = gptq(size, False, True, checkpoint_format=version)
        parts = as_gptq(n, less=1 if form == "v1" else 0)
    path = write_weight(tmp_path, sample, {f"x.{part}": tensor for part, tensor in parts.items()})
    assert torch.equal(SafetensorsFolder(path).read("x.weight"), n.exact)


# ---- traps ----------------------------------------------------------------------------------------------------------


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], Any], **config: Any) -> Path:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    whole = json.loads((path / "config.json").read_text())
    whole["quantization_config"].update(config)
    (path / "config.json").write_text(json.dumps(whole))
    return path


@pytest.mark.parametrize("g_idx", ["zeros", "absent"])
def test_groups_that_a_tool_did_not_write_are_runs(tmp_path: Path, g_idx: str) -> None:
    parts, exact = gptq(32, False).pack(torch.randn(16, 64))
    parts["g_idx"].zero_()
    if g_idx == "absent":
        del parts["g_idx"]
    path = write_weight(tmp_path, gptq(32, False), {f"x.{part}": tensor for part, tensor in parts.items()})
    assert torch.equal(SafetensorsFolder(path).read("x.weight"), exact)


@pytest.mark.parametrize("actorder", ["weight", None])
@pytest.mark.parametrize("filled", [True, False])
def test_inputs_that_were_only_rounded_in_another_order_are_runs(
    tmp_path: Path, actorder: str | None, filled: bool
) -> None:
    sample = compressed(32, False)
    sample.config["config_groups"]["group_0"]["weights"]["actorder"] = actorder
    parts, exact = sample.pack(torch.randn(16, 64))
    if filled:
        parts["weight_g_idx"] = torch.full((64,), -1, dtype=torch.int32)
    path = write_weight(tmp_path, sample, {f"x.{part}": tensor for part, tensor in parts.items()})
    assert torch.equal(SafetensorsFolder(path).read("x.weight"), exact)


@pytest.mark.parametrize("group", [32, None])
@pytest.mark.parametrize(("sample", "name"), [(gptq, "g_idx"), (compressed, "weight_g_idx")])
@pytest.mark.parametrize("number", [0, -1, 1, None])
def test_an_order_that_the_file_does_not_have_is_refused(
    tmp_path: Path, sample: Callable[..., Sample], name: str, group: int | None, number: int | None
) -> None:
    """config.json says that there is one. Taken as runs, weights would be wrong without a word. Of one group the order
    changes nothing, but GPTQ's tools always write it."""
    format = sample(group, False, act_order=True)
    parts, exact = format.pack(torch.randn(16, 64))
    del parts[name]
    if number is not None:
        parts[name] = torch.full((64,), number, dtype=torch.int32)
    path = write_weight(tmp_path, format, {f"x.{part}": tensor for part, tensor in parts.items()})
    if group is None and (number in (0, -1) or (number is None and sample is compressed)):
        assert torch.equal(SafetensorsFolder(path).read("x.weight"), exact)
        return
    said = "is not there, but config.json says .*order of their own"
    if number is not None:
        said = f"has groups from {number} to" if group is None else f"names one group, {number}, of 2"
    with pytest.raises(ModelError, match=rf"x\.{name} {said}.*; get "):
        SafetensorsFolder(path).read("x.weight")


def test_a_zero_of_0_in_gptqs_first_version(tmp_path: Path) -> None:
    """0 is stored as -1, and borrows from the next number: GPTQModel subtracts 0x11111111 from whole words, and adds it
    when it reads. AutoGPTQ writes 15 there and in all later numbers of the word, which no reader can mend; only of the
    last of a word it is the same."""
    zeros = np.array([[0, 5, 0, 0, 15, 8, 3, 0, 7, 1, 1, 1, 1, 1, 1, 0]]).T
    n = Numbers(np.arange(128).reshape(16, 8) % 16, zeros, torch.ones(16, 1).half(), np.zeros(8, int))
    parts = as_gptq(n, less=1)
    stored = [word % 2**32 for word in parts["qzeros"].flatten().tolist()]
    assert stored == [(0x038F0050 - 0x11111111) % 2**32, 0xF0000006]
    path = write_weight(tmp_path, gptq(None, False), {f"x.{part}": tensor for part, tensor in parts.items()})
    assert torch.equal(SafetensorsFolder(path).read("x.weight"), n.exact)


@pytest.mark.parametrize(("symmetric", "shift"), [(True, 0), (False, 1)])
def test_zeros_of_nothing_but_8_are_of_v2_only_if_the_weights_are_symmetric(
    tmp_path: Path, symmetric: bool, shift: int
) -> None:
    """Else 8 means 9 in a file of v1, as it says."""
    n = Numbers(np.arange(64).reshape(8, 8) % 16, np.full((8, 1), 8 + shift), torch.ones(8, 1).half(), np.zeros(8, int))
    parts = {f"x.{part}": tensor for part, tensor in as_gptq(n, less=shift).items()}
    path = write_weight(tmp_path, gptq(8, symmetric), parts)
    assert set(load_file(path / "model.safetensors")["x.qzeros"].flatten().tolist()) == {0x88888888 - 2**32}
    assert torch.equal(SafetensorsFolder(path).read("x.weight"), n.exact)


def test_zero_points_in_bytes(tmp_path: Path) -> None:
    """As early versions of compressed-tensors wrote them."""
    n = Numbers(np.arange(160).reshape(10, 16) % 16, np.full((10, 2), 3), torch.rand(10, 2), np.arange(16) // 8)
    parts = as_compressed(n)
    parts["weight_zero_point"] = torch.full((10, 2), 3 - 8, dtype=torch.int8)
    path = write_weight(tmp_path, compressed(8, False), {f"x.{part}": tensor for part, tensor in parts.items()})
    assert torch.equal(SafetensorsFolder(path).read("x.weight"), n.exact)


@pytest.mark.parametrize(("zero", "error"), [(8, None), (7, "weight_zero_point is not 0, but by config.json")])
def test_zero_points_of_symmetric_weights(zero: int, error: str | None, tmp_path: Path) -> None:
    """Some tools write them; then they must say the same."""
    n = Numbers(np.arange(160).reshape(10, 16) % 16, np.full((10, 2), zero), torch.rand(10, 2), np.arange(16) // 8)
    path = write_weight(
        tmp_path, compressed(8, True), {f"x.{part}": tensor for part, tensor in as_compressed(n).items()}
    )
    with pytest.raises(ModelError, match=error) if error else contextlib.nullcontext():
        assert torch.equal(SafetensorsFolder(path).read("x.weight"), n.exact)


def test_modules_that_are_not_converted_stay_plain(
    make_llm: MakeLLM, folders: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    listed = ["lm_head", "model.layers.1"]
    small, plain = folders("Llama", awq(32, modules_to_not_convert=listed), kept=(*KEPT, "layers.1."))
    forms = SafetensorsFolder(small).packed_forms()
    assert {name.split(".")[2] for name in forms} == {"0"}
    assert answers(engine(make_llm, small, quantization="none")) == answers(engine(make_llm, plain))
    rewrite(small, lambda tensors: None, modules_to_not_convert=["model.layers.0.mlp"])
    with pytest.raises(
        ModelError, match=r"model.layers.0.mlp.\w+ is quantised in the file, but config.json lists 'mod"
    ):
        SafetensorsFolder(small).names()


def test_scales_of_activations_and_caches_and_biases_of_zeros_are_left_out(
    make_llm: MakeLLM, folders: Callable[..., tuple[Path, Path]], caplog: pytest.LogCaptureFixture
) -> None:
    small, plain = folders("Llama", floats("tensor", FP8))
    scales = {
        f"model.layers.{i}.self_attn.{what}": torch.ones(1)
        for i in range(2)
        for what in ("k_scale", "v_scale", "q_proj.input_scale", "k_proj.output_scale")
    }
    bias = "model.layers.0.self_attn.q_proj.bias"
    rewrite(small, lambda tensors: tensors.update({**scales, bias: torch.zeros(128)}))
    with caplog.at_level(logging.INFO, "nanovllm"):
        assert answers(engine(make_llm, small)) == answers(engine(make_llm, plain))
    assert sorted(SafetensorsFolder(small).unused()) == sorted(scales)
    assert "8 scales of activations or of a KV cache are not used: model.layers." in caplog.text
    assert SafetensorsFolder(small).kv_scales() == {0: (1.0, 1.0), 1: (1.0, 1.0)}
    assert "14 matrices stored as FP8 are expanded to float32: 0.00 GB in memory" in caplog.text
    rewrite(small, lambda tensors: tensors[bias].fill_(1))
    with pytest.raises(ModelError, match=rf"1 in the checkpoint but not in the model: {bias}"):
        engine(make_llm, small)


@pytest.mark.parametrize(
    "names",
    [("k_scale", "v_scale"), ("attn.k_scale", "attn.v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("kv_scale",)],
    ids=lambda names: names[0],
)
def test_scales_of_a_kv_cache(folders: Callable[..., tuple[Path, Path]], names: tuple[str, ...]) -> None:
    small, plain = folders("Llama", floats("tensor", FP8))
    given = {f"model.layers.{i}.self_attn.{name}": torch.tensor(0.5 + i) for i in range(2) for name in names}
    given[f"model.layers.0.self_attn.{names[-1]}"] = torch.tensor([0.1, 0.25]).bfloat16()  # by head
    rewrite(small, lambda tensors: tensors.update(given))
    checkpoint = SafetensorsFolder(small)
    first = 0.25 if names == ("kv_scale",) else 0.5
    assert checkpoint.kv_scales() == {0: (first, 0.25), 1: (1.5, 1.5)}
    assert not SafetensorsFolder(plain).kv_scales()
    model = find_model(small, torch.float8_e4m3fn)
    layers = scaled_layers(model.layers)
    load_kv_scales(layers, checkpoint)
    assert [layer.scales.tolist() for layer in layers] == [[first, 0.25], [1.5, 1.5]]
    assert all(layer.from_checkpoint for layer in layers)
    # One layer without: all are measured.
    rewrite(small, lambda tensors: tensors[f"model.layers.1.self_attn.{names[-1]}"].fill_(0))
    layers = scaled_layers(find_model(small, torch.float8_e4m3fn).layers)
    load_kv_scales(layers, SafetensorsFolder(small))
    assert [layer.scales.tolist() for layer in layers] == [[1.0, 1.0]] * 2
    assert not any(layer.from_checkpoint for layer in layers)


def find_model(folder: Path, kv_dtype: torch.dtype) -> Transformer:
    config = ModelConfig.from_hf(SafetensorsFolder(folder).config)
    build = Build(torch.float32, torch.device("cpu"), PLAIN, Parallel(), kv_dtype=kv_dtype)
    return find_family(config)(config, Parts(build, SdpaBackend(), 64))


# ---- settings beside config.json ------------------------------------------------------------------------------------

AUTO_GPTQ = {"bits": 4, "group_size": 32, "damp_percent": 0.1, "desc_act": False, "sym": False, "true_sequential": True}
AUTO_AWQ = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
MOVED = {
    "auto-gptq": ("quantize_config.json", gptq(32, False), AUTO_GPTQ),
    "auto-gptq-act-order": ("quantize_config.json", gptq(32, False, True), {**AUTO_GPTQ, "desc_act": True}),
    "auto-gptq-0.7": (
        "quantize_config.json",
        gptq(32, True),
        {**AUTO_GPTQ, "sym": True, "quant_method": "gptq", "checkpoint_format": "gptq", "model_name_or_path": None},
    ),
    "gptqmodel-v2": ("quantize_config.json", gptq(32, False, less=0), {**AUTO_GPTQ, "checkpoint_format": "gptq_v2"}),
    "auto-awq": ("quant_config.json", awq(64), AUTO_AWQ),
    "auto-awq-old": ("quant_config.json", awq(64), {**AUTO_AWQ, "quant_method": None, "modules_to_not_convert": None}),
    "awq-under-the-other-name": ("quantize_config.json", awq(64), AUTO_AWQ),
}


def move_settings(path: Path, file: str, settings: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    (path / file).write_text(json.dumps(settings))


@pytest.mark.parametrize("name", MOVED)
def test_settings_in_a_file_of_their_own(
    make_llm: MakeLLM, folders: Callable[..., tuple[Path, Path]], name: str
) -> None:
    file, sample, settings = MOVED[name]
    small, plain = folders("Llama", sample)
    move_settings(small, file, settings)
    checkpoint = SafetensorsFolder(small)
    assert len(checkpoint.packed_forms()) == 14
    assert answers(engine(make_llm, small, quantization="none")) == answers(engine(make_llm, plain))


def test_settings_that_are_not_read(folders: Callable[..., tuple[Path, Path]]) -> None:
    small, _ = folders("Llama", gptq(32, False))
    kept = SafetensorsFolder(small).read("model.layers.0.mlp.up_proj.weight")
    (small / "quantize_config.json").write_text(json.dumps({**AUTO_GPTQ, "group_size": 64}))
    assert torch.equal(SafetensorsFolder(small).read("model.layers.0.mlp.up_proj.weight"), kept), (
        "config.json goes first"
    )
    for changed, words in (
        (
            {"bits": 8},
            r"^quantize_config\.json: bits=8 is not supported: this engine reads GPTQ in 4 bits; get the 16-bit",
        ),
        ({"is_marlin_format": True}, r"^quantize_config\.json: is_marlin_format=True"),
        ({"quant_method": "marlin"}, r"^quantize_config\.json: quant_method='marlin' is not supported"),
    ):
        if "quantization_config" in json.loads((small / "config.json").read_text()):
            move_settings(small, "quantize_config.json", {})
        (small / "quantize_config.json").write_text(json.dumps({**AUTO_GPTQ, **changed}))
        with pytest.raises(ModelError, match=words):
            ModelConfig.from_hf(SafetensorsFolder(small).config)
    (small / "quantize_config.json").write_text('{"a file": "of something else"}')
    assert "quantization_config" not in SafetensorsFolder(small).config
    (small / "quantize_config.json").write_text("[4]")
    with pytest.raises(ModelError, match=r"quantize_config\.json: must hold a JSON object"):
        SafetensorsFolder(small)


# ---- on a CPU ---------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("awq-64", "Q4_1"),
        ("gptq-32", "Q4_0"),
        ("gptq-128", "Q4_0"),
        ("gptq-channel-v2", "Q4_1"),
        ("compressed-32", "Q4_0"),
        ("compressed-64-asymmetric", "Q4_1"),
    ],
)
def test_on_a_cpu_groups_of_32_stay_in_4_bits(
    make_llm: MakeLLM, folders: Callable[..., tuple[Path, Path]], run: Run, name: str, kind: str
) -> None:
    """Symmetric weights exactly; of the others the minimum is rounded to float16."""
    small, plain = folders(*SAMPLES[name])
    exact = dict(engine(make_llm, plain).engine.executor.runner.model.named_parameters())
    llm = engine(make_llm, small)
    weights = packed_weights(llm.engine.executor.runner.model)
    layer = weights["layers.0.mlp.gate_up.weight"]
    assert forms(layer.matrices) == [kind]
    for weight, packed in weights.items():
        if kind == "Q4_0":
            assert torch.equal(expanded(packed.matrices), exact[weight])
        else:  # a step is a fifteenth of what its group spans
            torch.testing.assert_close(expanded(packed.matrices), exact[weight], rtol=1e-3, atol=1e-3)
    facts = llm.engine.describe()["runs_on"]
    known = collect(EngineConfig(model=str(small), device="cpu"))["model"]
    assert known["weight_bytes"] == facts["weight_bytes"]
    assert facts["quantization"] == f"{kind}, float32"
    assert facts["weight_bytes"] < 0.6 * sum(p.nbytes for p in exact.values())
    (_, found), (_, expected) = answers(llm), answers(engine(make_llm, plain))
    for here, there in zip(found[0][1], expected[0][1]):
        best = next(iter(there))
        assert here[best].logprob == pytest.approx(there[best].logprob, abs=0.1)
        break  # later steps may have other tokens before them
    planned = run("plan", "--model", small, "--gpu-memory-gb", 8, "--host-memory-gb", 16, "--json", "-")
    assert planned.code == 0, planned.err


@needs_compiler
def test_groups_out_of_order_are_expanded(
    make_llm: MakeLLM, folders: Callable[..., tuple[Path, Path]], caplog: pytest.LogCaptureFixture
) -> None:
    small, plain = folders("Llama", gptq(32, True, act_order=True))
    with caplog.at_level(logging.INFO, "nanovllm"):
        llm = engine(make_llm, small)
    assert not packed_weights(llm.engine.executor.runner.model)
    assert "14 matrices stored as GPTQ are expanded to float32" in caplog.text
    assert answers(llm) == answers(engine(make_llm, plain))
    caplog.clear()
    parts = gptq(32, True).pack(load_file(plain / "model.safetensors")["model.layers.0.mlp.up_proj.weight"])[0]
    rewrite(small, lambda tensors: tensors.update({f"model.layers.0.mlp.up_proj.{k}": v for k, v in parts.items()}))
    with caplog.at_level(logging.INFO, "nanovllm"):
        llm = engine(make_llm, small)
    assert "and 12 more: computed in float32, because groups of inputs in GPTQ are no runs of whole" in caplog.text
    assert "matrices in memory: Q4_0, float32" in caplog.text


@pytest.mark.parametrize(
    ("scale", "fits"),
    [(2.0**-10, True), (1e-3, True), (2.0**-30, False), (1e6, False), (0.0, True), (torch.nan, False)],
)
def test_scales_that_float16_cannot_hold_are_not_packed(scale: float, fits: bool) -> None:
    q = torch.arange(64, dtype=torch.uint8).view(1, 64) % 16
    for zero in (8, 3):
        shape, group = torch.full((1, 2), zero, dtype=torch.uint8), torch.arange(64) // 32
        blocks = Grouped(q, torch.full((1, 2), scale), shape, group).as_blocks()
        assert (blocks is not None) == fits
        assert blocks is None or blocks.kind.name == ("Q4_0" if zero == 8 else "Q4_1")
    assert Grouped(q, torch.ones(1, 4), torch.ones(1, 4, dtype=torch.uint8), torch.arange(64) // 16).as_blocks() is None


@needs_compiler
@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_two_ranks_compute_what_one_does(
    make_llm: MakeLLM, folders: Callable[..., tuple[Path, Path]], quantization: str
) -> None:
    """A row of `down` has 96 columns a rank: whole blocks of 32 that cut a group of 64."""
    small, _ = folders("Llama", awq(64))
    one, two = (answers(engine(make_llm, small, quantization=quantization, tensor_parallel_size=n)) for n in (1, 2))
    for here, there in zip(one, two):
        assert here[0][0] == there[0][0]
        for a, b in zip(here[0][1], there[0][1]):
            assert {t: e.logprob for t, e in a.items()} == pytest.approx({t: e.logprob for t, e in b.items()}, abs=0.02)


# ---- damage ----------------------------------------------------------------------------------------------------------


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.update({name: tensor})


AWQ_64, GPTQ_32, INT_32 = awq(64), gptq(32, False), compressed(32, False)
TENSOR, ROWS = floats("tensor", FP8), SAMPLES["fp8-channel"][1]
I32, F16 = torch.int32, torch.float16


@pytest.mark.parametrize(
    ("sample", "change", "words"),
    [
        (AWQ_64, drop("x.scales"), "x.scales is not there, but x.qweight is"),
        (AWQ_64, drop("x.qzeros"), "x.qzeros is not there"),
        (AWQ_64, drop("x.qweight"), "x.(scales|qzeros) belongs to x.qweight, which is not there"),
        (AWQ_64, put("x.weight", torch.ones(16, 128)), "x.weight is there twice"),
        (
            AWQ_64,
            put("x.scales", torch.ones(3, 16).half()),
            r"x.scales has shape \(3, 16\): .* \(16, 128\) .* \(2, 16\)",
        ),
        (AWQ_64, put("x.qzeros", torch.ones(2, 1, dtype=I32)), r"x.qzeros has shape \(2, 1\): .* needs \(2, 2\)"),
        (AWQ_64, put("x.qweight", torch.ones(128, 2)), "x.qweight is stored as F32, not as I32"),
        (AWQ_64, put("x.qweight", torch.ones(256, dtype=I32)), r"x.qweight has shape \(256,\), no matrix"),
        (AWQ_64, put("x.qweight", torch.ones(0, 2, dtype=I32)), r"x.qweight has shape \(0, 2\), no matrix"),
        (AWQ_64, put("x.scales", torch.ones(2, 16, dtype=I32)), "x.scales is stored as I32, not as F16 or BF16 or F32"),
        (GPTQ_32, put("x.g_idx", torch.full((128,), 4, dtype=I32)), "x.g_idx has groups from 4 to 4, there are 4"),
        (GPTQ_32, put("x.g_idx", torch.arange(-1, 127, dtype=I32)), "x.g_idx has groups from -1 to 126"),
        (GPTQ_32, put("x.g_idx", torch.zeros(64, dtype=I32)), r"x.g_idx has shape \(64,\)"),
        (GPTQ_32, drop("x.qweight"), "belongs to x.qweight"),
        (INT_32, drop("x.weight_shape"), "x.weight_shape is not there"),
        (INT_32, put("x.weight_shape", torch.tensor([2**40, 128])), r"x.weight_shape is \(1099511627776, 128\)"),
        (INT_32, put("x.weight_shape", torch.tensor([16, -128])), r"x.weight_shape is \(16, -128\)"),
        (INT_32, put("x.weight_shape", torch.tensor(16)), "x.weight_shape must be two integers"),
        (INT_32, put("x.weight_zero_point", torch.ones(16, 4, dtype=I32)), r"x.weight_zero_point has shape \(16, 4\)"),
        (INT_32, drop("x.weight_packed"), "belongs to x.weight_packed, which is not there"),
        (TENSOR, drop("x.weight_scale"), "x.weight in 8-bit floats needs one scale, there is neither"),
        (TENSOR, put("x.weight_scale_inv", torch.ones(1)), "there is x.weight_scale_inv and x.weight_scale"),
        (TENSOR, put("x.weight_scale", torch.ones(3)), r"x.weight_scale has shape \(3,\): .* or \(16, 1\)"),
        (TENSOR, put("x.weight_scale", torch.ones(1, dtype=I32)), "x.weight_scale is stored as I32"),
        *[
            (
                TENSOR,
                put("x.weight_scale", torch.ones(1).to(kind)),
                rf"x\.weight_scale is stored as {name}, not as F32, F16, BF16, F64; get the 16-bit .*, or a GGUF file",
            )
            for kind, name in ((torch.float8_e8m0fnu, "F8_E8M0"), (torch.uint8, "U8"))
        ],
        *[
            (
                TENSOR,
                put("x.weight", torch.ones(16, 128).to(kind)),
                rf"x\.weight, which is {name}: of 8-bit floats this engine reads F8_E4M3; get the 16-bit .*, or a GGUF",
            )
            for kind, name in ((torch.float8_e5m2, "F8_E5M2"), (torch.float8_e4m3fnuz, "F8_E4M3FNUZ"))
        ],
        (TENSOR, drop("x.weight"), "x.weight_scale belongs to x.weight, which is not there"),
        (TENSOR, put("x.weight", torch.ones(16, 128)), "x.weight_scale belongs to x.weight, which is F32, not F8_E4M3"),
        (AWQ_64, put("x.scales", torch.full((2, 16), float("nan")).half()), "x.scales has numbers that are not finite"),
        (
            TENSOR,
            put("x.weight_scale", torch.full((1,), float("inf"))),
            "x.weight_scale has numbers that are not finite",
        ),
        (GPTQ_32, put("x.g_idx", torch.full((128,), 3, dtype=I32)), "x.g_idx names one group, 3, of 4"),
        (INT_32, drop("x.weight_zero_point"), "x.weight_zero_point is not there"),
        (ROWS, put("x.weight_scale", torch.ones(16, 2)), r"x.weight_scale has shape \(16, 2\)"),
    ],
)
def test_damage_is_found_and_named(
    tmp_path: Path, sample: Sample, change: Callable[[dict[str, torch.Tensor]], Any], words: str
) -> None:
    parts, _ = sample.pack(torch.randn(16, 128))
    path = write_weight(tmp_path, sample, {f"x.{part}": tensor for part, tensor in parts.items()})
    SafetensorsFolder(path).read("x.weight")
    rewrite(path, change)
    with pytest.raises(ModelError, match=words):
        SafetensorsFolder(path).read("x.weight")


def test_without_a_config_the_numbers_mean_nothing(tmp_path: Path) -> None:
    parts, _ = TENSOR.pack(torch.randn(16, 128))
    path = write_weight(tmp_path, Sample(TENSOR.pack, {}), {f"x.{part}": tensor for part, tensor in parts.items()})
    with pytest.raises(ModelError, match=r"x.weight is stored as F8_E4M3, .* has no quantization_config .* or a GGUF"):
        SafetensorsFolder(path).shape("x.weight")
