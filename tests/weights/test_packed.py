"""Weights that stay quantised: they are the numbers of the file, whatever their types, rows, ranks and ties."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_samples import tiny_state, write_model
from torch import nn

from nanovllm import LLM, ConfigError, ModelError, SamplingParams
from nanovllm.cli.facts import collect
from nanovllm.config import EngineConfig
from nanovllm.hardware.parallel import Parallel
from nanovllm.layers.build import Build
from nanovllm.layers.embedding import LMHead, VocabEmbedding
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.packed import PackedWeight, Packing, packed_weights
from nanovllm.ops import opset
from nanovllm.ops.native import build as native_build
from nanovllm.ops.native.build import load_library
from nanovllm.ops.quant import dequantise_rows
from nanovllm.runner import quantization
from nanovllm.weights.checkpoint import open_checkpoint
from nanovllm.weights.loader import load_weights
from nanovllm.weights.rules import Rule
from tests.tiny_models import TinyModel, Variant, hf_model

pytestmark = pytest.mark.skipif(isinstance(load_library(), str), reason="no C compiler")
MakeLLM = Callable[..., LLM]
TYPES = {
    "q_proj": "Q4_0",
    "k_proj": "Q8_0",
    "v_proj": "F16",
    "o_proj": "Q5_1",
    "gate_proj": "Q4_1",
    "up_proj": "Q4_1",
    "down_proj": "Q5_0",
    "embed_tokens": "Q8_0",
    "lm_head": "Q5_0",
}
PROMPT = {"prompt_token_ids": list(range(5, 45))}


@pytest.fixture
def gguf_file(tmp_path: Path) -> Callable[..., Path]:
    def make(**options: Any) -> Path:
        return write_model(tmp_path / "m.gguf", "llama", tiny_state(inner=64, **options), types=TYPES)

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """folder("Llama") -> a random model whose rows are whole blocks of 32."""

    def make(family: str, **config: Any) -> Path:
        sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
        hf_model(Variant(family, {**sizes, **config}), 0).save_pretrained(tmp_path / family)
        return tmp_path / family

    return make


def prompt_logprobs(llm: LLM) -> torch.Tensor:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    output = llm.generate([PROMPT], params, use_tqdm=False)[0]
    return torch.tensor([next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]])


def expanded(weight: PackedWeight) -> torch.Tensor:
    floats = (
        m if isinstance(m, torch.Tensor) else dequantise_rows(m, torch.arange(m.outputs)) for m in weight.matrices
    )
    return torch.cat(list(floats))


def formats(weight: PackedWeight) -> list[str]:
    return ["float32" if isinstance(m, torch.Tensor) else m.form.name for m in weight.matrices]


@pytest.mark.parametrize("tied", [True, False])
def test_every_matrix_has_the_numbers_of_the_file(
    make_llm: MakeLLM, gguf_file: Callable[..., Path], caplog: pytest.LogCaptureFixture, tied: bool
) -> None:
    """q, k and v have three types, rows of q and k another order in the file, the vocabulary no whole panels."""
    path = gguf_file(tied=tied)
    plain = dict(make_llm(path, quantization="none").engine.executor.runner.model.named_parameters())
    with caplog.at_level(logging.INFO, "nanovllm"):
        llm = make_llm(path)
    weights = packed_weights(llm.engine.executor.runner.model)
    assert formats(weights["layers.0.attention.qkv.weight"]) == ["Q4_0", "Q8_0", "float32"]
    assert formats(weights["layers.1.mlp.gate_up.weight"]) == ["Q4_1"]  # one product for both
    assert set(weights) == {name for name, p in plain.items() if p.dim() == 2}
    for name, weight in weights.items():
        assert torch.equal(expanded(weight), plain[name])
    assert (
        "model.layers.0.self_attn.v_proj.weight and 1 more: computed in float32, because the file has float16"
        in caplog.text
    )
    facts = llm.engine.describe()["runs_on"]
    known = collect(EngineConfig(model=str(path), device="cpu"))["model"]
    assert known["weight_bytes"] == facts["weight_bytes"]
    assert known["num_parameters"] == sum(p.numel() for p in plain.values())
    assert facts["quantization"] == "Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, float32"
    assert facts["weight_bytes"] < 0.4 * sum(p.nbytes for p in plain.values())


def test_few_and_many_rows_give_what_the_expanded_weights_give(
    make_llm: MakeLLM, gguf_file: Callable[..., Path]
) -> None:
    path = gguf_file(tied=True)
    expected = prompt_logprobs(make_llm(path, quantization="none"))
    many = prompt_logprobs(make_llm(path))
    few = prompt_logprobs(make_llm(path, max_num_batched_tokens=16, max_num_seqs=2))
    torch.testing.assert_close(many, expected, rtol=3e-3, atol=3e-3)
    torch.testing.assert_close(few, expected, rtol=3e-3, atol=3e-3)
    assert not torch.equal(many, expected)  # inputs are rounded


@pytest.mark.parametrize("gone", ["model.layers.1.self_attn.k_proj.weight", "model.embed_tokens.weight"])
def test_a_missing_tensor_is_named(make_llm: MakeLLM, llama_copy: Path, gone: str) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(llama_copy / "model.safetensors")
    del weights[gone]
    save_file(weights, llama_copy / "model.safetensors")
    with pytest.raises(ModelError, match=r"1 not found in the checkpoint: (layers.1.attention.qkv.weight\[k\]|embed)"):
        make_llm(llama_copy, quantization="int8")


class Toy(nn.Module):
    rules = (
        Rule("model.embed_tokens.weight", "embed.weight"),
        Rule("lm_head.weight", "head.weight"),
        Rule("model.layers.0.mlp.{part:gate|up}_proj.weight", "up.weight"),
        Rule("model.layers.0.mlp.down_proj.weight", "down.weight"),
        Rule("model.norm.weight", None),
        Rule("model.layers.{i}.{w:input_layernorm|post_attention_layernorm}.weight", None),
        Rule("model.layers.{i}.self_attn.{w:q|k|v|o}_proj.weight", None),
        Rule("model.layers.1.mlp.{w:gate|up|down}_proj.weight", None),
    )

    def __init__(self, inner: int, parallel: Parallel) -> None:
        super().__init__()
        build = Build(torch.float32, torch.device("cpu"), opset.native_ops(), parallel, packs=True)
        self.embed = VocabEmbedding(267, 32, build)
        self.up = MergedColumnParallelLinear(32, {"gate": inner, "up": inner}, False, build)
        self.down = RowParallelLinear(inner, 32, False, build)
        self.head = LMHead(267, 32, build, self.embed)


@pytest.mark.parametrize(("inner", "form"), [(64, "Q5_0"), (96, "float32")])
def test_ranks_have_their_rows_and_columns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, inner: int, form: str
) -> None:
    """Columns 48..96 would begin inside a block of 32: they are expanded, and the log says so. Of the vocabulary the
    second rank has one row less, and zeros there."""
    checkpoint = open_checkpoint(write_model(tmp_path / "m.gguf", "llama", tiny_state(inner=inner), types=TYPES))
    whole = {name: checkpoint.read(name) for name in checkpoint.names()}
    for rank in range(2):
        model = Toy(inner, Parallel(rank, 2))
        packing = Packing(model, "auto", checkpoint.quantised_types())
        load_weights(model, checkpoint, Toy.rules, packing.targets())
        half = slice(rank * inner // 2, (rank + 1) * inner // 2)
        gate, up, down = (whole[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        assert torch.equal(expanded(model.up.weight), torch.cat([gate[half], up[half]]))
        assert torch.equal(expanded(model.down.weight), down[:, half])
        assert formats(model.down.weight) == [form]
        table = torch.cat([whole["model.embed_tokens.weight"], torch.zeros(1, 32)])
        assert torch.equal(expanded(model.embed.weight), table[134 * rank : 134 * rank + 134])
        assert model.head.weight is model.embed.weight
        caplog.clear()
        with caplog.at_level(logging.INFO, "nanovllm"):
            packing.report()
        said = "down_proj.weight: computed in float32, because the ranks cut rows inside a block of Q5_0" in caplog.text
        assert said == (form == "float32")
    checkpoint.close()


@pytest.mark.parametrize(("kind", "error"), [("int8", 0.01), ("int4", 0.12)])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_other_models_are_quantised_while_they_load(
    make_llm: MakeLLM, folder: Callable[..., Path], kind: str, error: float, load_format: str
) -> None:
    options = {"model": folder("Qwen2"), "load_format": load_format, "skip_tokenizer_init": True}
    plain = make_llm(**options).engine.executor.runner.model.get_parameter
    llm = make_llm(**options, quantization=kind)
    weights = packed_weights(llm.engine.executor.runner.model)
    for name, weight in weights.items():
        exact = plain(name)
        assert (expanded(weight) - exact).norm() < error * exact.norm()
    assert formats(weights["layers.0.attention.qkv.weight"]) == [{"int8": "Q8_0", "int4": "Q4_1"}[kind]]
    assert formats(weights["embed.weight"]) == ["Q8_0"]
    prompt_logprobs(llm)


def test_rows_that_are_no_whole_blocks_stay_float(
    make_llm: MakeLLM, tiny: Callable[[str], TinyModel], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "nanovllm"):
        llm = make_llm(tiny("llama-gqa-tied").path, quantization="int8")  # hidden size 72
    assert "a row of 72 does not divide into blocks of 32" in caplog.text
    assert formats(packed_weights(llm.engine.executor.runner.model)["layers.0.attention.qkv.weight"]) == ["float32"]
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2), use_tqdm=False)


def test_what_quantises_nothing_or_twice_is_said(
    make_llm: MakeLLM,
    tiny: Callable[[str], TinyModel],
    gguf_file: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_llm(tiny("deepseek-v3").path, quantization="int4")  # hidden size 48, experts of 40
    assert "quantization='int4' quantises no matrix of this model: a row of" in caplog.text
    caplog.clear()
    make_llm(gguf_file(tied=True), quantization="int4")
    assert "quantization='int4' rounds weights again that the file has in Q4_0" in caplog.text
    caplog.clear()
    make_llm(gguf_file(tied=True))
    assert "rounds" not in caplog.text


@pytest.mark.parametrize("inner", [96, 100])
def test_experts_are_quantised_and_routers_are_not(make_llm: MakeLLM, folder: Callable[..., Path], inner: int) -> None:
    """With 100 a row of `down` is no whole number of blocks, and parts of `gate_up` no whole number of panels."""
    path = folder("Mixtral", intermediate_size=inner, num_local_experts=4, num_experts_per_tok=4)
    options = {"skip_tokenizer_init": True, "max_num_batched_tokens": 16}
    expected = prompt_logprobs(make_llm(path, **options))
    llm = make_llm(path, **options, quantization="int8")
    weights = packed_weights(llm.engine.executor.runner.model)
    experts = "layers.0.mlp.experts."
    assert set(formats(weights[experts + "gate_up.weight"])) == {"Q8_0"}
    assert formats(weights[experts + "down.weight"]) == (["Q8_0"] if inner == 96 else ["float32"])
    assert "layers.0.mlp.gate.weight" not in weights
    assert (prompt_logprobs(llm) - expected).norm() / expected.norm() < 0.05


# ---- where it is not possible ----------------------------------------------------------------------------


def test_what_was_asked_for_and_cannot_be_is_refused_with_the_remedy(
    make_llm: MakeLLM, gguf_file: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match=r"quantization='int8': .* compute in float32; leave dtype out"):
        make_llm(quantization="int8", dtype="bfloat16")
    moving = EngineConfig(quantization="int8", enable_eplb=True, tensor_parallel_size=2, expert_parallel_size=2)
    checkpoint = open_checkpoint(gguf_file(tied=True))
    with pytest.raises(
        ConfigError, match=r"quantization='int8': on a CPU experts .* of dtype; leave enable_eplb out, or"
    ):
        quantization.choose_packing(moving, checkpoint, False, opset.native_ops())
    assert quantization.choose_packing(moving, checkpoint, True, opset.PLAIN) is None, "there they move as blocks"
    checkpoint.close()


def test_on_a_gpu_other_kernels_decide(gguf_file: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = open_checkpoint(gguf_file(tied=True))
    assert quantization.choose_packing(EngineConfig(), checkpoint, True, opset.PLAIN) is None
    assert quantization.choose_packing(EngineConfig(), checkpoint, False, opset.native_ops()) == "auto"
    assert not caplog.records
    checkpoint.close()


def test_without_a_compiler(
    make_llm: MakeLLM, gguf_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NANOVLLM_NATIVE", "0")
    native_build.load_library.cache_clear()
    try:
        llm = make_llm(gguf_file(tied=True))
        assert llm.engine.describe()["runs_on"]["quantization"] == "none"
        assert "expanded, which is slower: products with quantised weights need compiled C code" in caplog.text
        with pytest.raises(ConfigError, match="leave that out"):
            make_llm(quantization="int4")
    finally:
        native_build.load_library.cache_clear()
