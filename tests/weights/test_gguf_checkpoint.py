"""GGUF as a Hugging Face checkpoint: names, rows, config; transformers' own GGUF reader is the independent witness."""

import math

import numpy as np
import pytest
import torch
from gguf_samples import tiny_state, write_model

from nanovllm.errors import ModelError
from nanovllm.weights.checkpoint import open_checkpoint
from nanovllm.weights.gguf_checkpoint import hf_name, llama3_divisors, llama3_rope_scaling
from nanovllm.weights.resolve import cache_folder
from nanovllm.weights.wheel_model import SMOLLM2, find_cached


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_every_tensor_comes_back(tmp_path, arch, tied):
    state = tiny_state(arch, tied=tied)
    checkpoint = open_checkpoint(write_model(tmp_path / "m.gguf", arch, state))
    assert sorted(checkpoint.names()) == sorted(state)
    for name, tensor in state.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert torch.equal(checkpoint.read(name), tensor), name
    config = checkpoint.config
    assert config["architectures"] == [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[arch] + "ForCausalLM"]
    expected = {
        "model_type": arch, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "rope_scaling": None, "max_position_embeddings": 128, "vocab_size": 267, "tie_word_embeddings": tied,
        "bos_token_id": 1, "eos_token_id": 0, "torch_dtype": "float32", "attention_bias": arch == "qwen2",
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected
    assert checkpoint.generation_config["eos_token_id"] == [0]
    with pytest.raises(ModelError, match="has no tensor nope"):
        checkpoint.read("nope")
    checkpoint.close()


def rotate(x: torch.Tensor, position: int, pairs: list[tuple[int, int]]) -> torch.Tensor:
    """RoPE on one head vector, written out: pair i turns by position * theta^(-2i/d)."""
    out = x.clone()
    for i, (a, b) in enumerate(pairs):
        angle = position * 10000.0 ** (-2 * i / len(x))
        out[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        out[b] = x[a] * math.sin(angle) + x[b] * math.cos(angle)
    return out


def test_row_order_gives_the_same_attention_scores(tmp_path):
    """The reason for the reordering is the witness: llama.cpp's RoPE on its rows = Hugging Face's RoPE on ours."""
    checkpoint = open_checkpoint(write_model(tmp_path / "m.gguf", "llama", tiny_state()))
    x, y = torch.randn(2, 32, dtype=torch.float64)
    neighbours, halves = [(0, 1), (2, 3), (4, 5), (6, 7)], [(0, 4), (1, 5), (2, 6), (3, 7)]

    def score(q, k, head, pairs):
        q_row, k_row = (q.double() @ x)[head * 8 : head * 8 + 8], (k.double() @ y)[head * 4 // 8 * 8 :][:8]
        return float(rotate(q_row, 5, pairs) @ rotate(k_row, 2, pairs))

    stored = [checkpoint._file.read(f"blk.1.attn_{p}.weight") for p in "qk"]
    ours = [checkpoint.read(f"model.layers.1.self_attn.{p}_proj.weight") for p in "qk"]
    for head in range(4):
        expected = score(*stored, head, neighbours)
        assert score(*ours, head, halves) == pytest.approx(expected, rel=1e-9)
        assert score(*stored, head, halves) != pytest.approx(expected, rel=1e-3)


def config_of(tmp_path, extra, arch="llama", **kwargs):
    return open_checkpoint(write_model(tmp_path / "m.gguf", arch, tiny_state(arch), extra=extra, **kwargs)).config


def test_rope_scaling_linear_and_yarn(tmp_path):
    def scaled(kind, factor):
        def extra(writer):
            writer.add_string("llama.rope.scaling.type", kind)
            writer.add_float32("llama.rope.scaling.factor", factor)
            writer.add_uint32("llama.rope.scaling.original_context_length", 32)

        return config_of(tmp_path, extra)["rope_scaling"]

    assert scaled("linear", 2.0) == {"rope_type": "linear", "factor": 2.0}
    yarn = {"original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}
    assert scaled("yarn", 4.0) == {"rope_type": "yarn", "factor": 4.0, **yarn}
    old = config_of(tmp_path, lambda writer: writer.add_float32("llama.rope.scale_linear", 4.0))
    assert old["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def llama3(factor, high=4.0, context=8192):
    blend = {"low_freq_factor": 1.0, "high_freq_factor": high, "original_max_position_embeddings": context}
    return {"rope_type": "llama3", "factor": factor, **blend}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("scaling", [llama3(8.0), llama3(32.0), llama3(4.0, 8.0, 4096)], ids=str)
def test_llama3_scaling_is_found_again(scaling, head_dim):
    stored = [float(np.float32(d)) for d in llama3_divisors(scaling, 500000.0, head_dim)]
    assert llama3_rope_scaling(stored, 500000.0, head_dim) == scaling


def test_llama3_divisors_agree_with_transformers():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {**llama3(8.0), "rope_theta": 500000.0}
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=rope)
    inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-torch.arange(0, 128, 2) / 128)
    expected = plain / torch.tensor(llama3_divisors(llama3(8.0), 500000.0, 128))
    torch.testing.assert_close(inverse, expected, rtol=1e-4, atol=0)


def test_rope_freqs_in_a_file(tmp_path):
    def with_divisors(divisors):
        def extra(writer):
            writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))

        return extra

    scaling = llama3(8.0, high=64.0, context=250)
    config = config_of(tmp_path, with_divisors(llama3_divisors(scaling, 10000.0, 8)))
    assert config["rope_scaling"]["rope_type"] == "llama3"
    again = llama3_divisors(config["rope_scaling"], 10000.0, 8)
    assert again == pytest.approx(llama3_divisors(scaling, 10000.0, 8), rel=1e-3)
    assert config_of(tmp_path, with_divisors([1.0] * 4))["rope_scaling"] is None
    for bad in ([2.0, 1.0, 3.0, 1.0], [1.0, math.nan, 2.0, 2.0], [1.0, 2.0]):
        with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
            config_of(tmp_path, with_divisors(bad))


REFUSED = {
    "shared experts": (lambda w: [w.add_expert_count(8), w.add_expert_shared_count(1)], "expert_shared_count is 1"),
    "partial rotary": (lambda w: w.add_rope_dimension_count(4), "rope.dimension_count is 4"),
    "sliding window": (lambda w: w.add_sliding_window(64), "sliding_window is 64"),
    "longrope": (lambda w: w.add_string("llama.rope.scaling.type", "longrope"), "'longrope'"),
    "attn_factor": (lambda w: w.add_float32("llama.rope.scaling.attn_factor", 1.5), "attn_factor is 1.5"),
    "split": (lambda w: w.add_uint16("split.count", 3), "one of 3 parts"),
    "unknown tensor": (lambda w: w.add_tensor("blk.0.ssm_a", np.ones(4, np.float32)), "blk.0.ssm_a"),
    "negative eot": (lambda w: w.add_int32("tokenizer.ggml.eot_token_id", -1), "eot_token_id is -1"),
    "not causal": (lambda w: w.add_causal_attention(False), "causal is False"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(tmp_path, case):
    extra, message = REFUSED[case]
    with pytest.raises(ModelError, match=message):
        config_of(tmp_path, extra)


def test_unknown_architecture_and_bad_numbers(tmp_path):
    with pytest.raises(ModelError, match=r"general\.architecture is 'gemma3'"):
        open_checkpoint(write_model(tmp_path / "m.gguf", "gemma3", tiny_state()))
    with pytest.raises(ModelError, match="expert_count is 8"):
        config_of(tmp_path, lambda writer: writer.add_expert_count(8), arch="qwen3")
    with pytest.raises(ModelError, match="head_count is 0"):
        config_of(tmp_path, None, num_heads=0, arch="qwen3")
    with pytest.raises(ModelError, match=r"head_count_kv is .*must be one integer"):
        config_of(tmp_path, None, num_kv_heads=[2, 1], arch="qwen3")
    assert config_of(tmp_path, None, num_kv_heads=[2, 2], arch="qwen3")["num_key_value_heads"] == 2


def test_eot_joins_the_stop_tokens(tmp_path):
    def extra(writer):
        writer.add_eot_token_id(5)
        writer.add_eom_token_id(0)

    path = write_model(tmp_path / "m.gguf", "llama", tiny_state(), extra=extra)
    assert open_checkpoint(path).generation_config["eos_token_id"] == [0, 5]


@pytest.mark.parametrize("name", ["blk.01.attn_q.weight", "blk.0.attn_q.scale", "blk.0.attn_q", "blk.x.attn_q.bias"])
def test_names_without_a_place(tmp_path, name):
    with pytest.raises(ModelError, match="has no place"):
        hf_name(name, tmp_path)


def test_the_default_model(tmp_path):
    path = find_cached(SMOLLM2, cache_folder())
    if path is None:
        pytest.skip("the default model is not in the cache")
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"]) == (30, 9, 3)
    assert (config["rope_theta"], config["rms_norm_eps"], config["tie_word_embeddings"]) == (100000.0, 1e-5, True)
    assert len(checkpoint.names()) == 272
    assert checkpoint.generation_config["eos_token_id"] == [2]
    assert torch.isfinite(checkpoint.read("model.layers.29.self_attn.q_proj.weight")).all()
