"""Small GGUF files for the tests: written by the gguf package, or byte by byte to break one rule at a time."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def entry(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def info(name: str, dims: list[int], kind: int = 0, offset: int = 0, num_dims: int | None = None) -> bytes:
    out = text(name) + struct.pack("<I", len(dims) if num_dims is None else num_dims)
    return out + b"".join(struct.pack("<Q", d) for d in dims) + struct.pack("<IQ", kind, offset)


def raw_gguf(
    entries=(), infos=(), data: bytes = b"", *, version=3, num_entries=None, num_tensors=None, alignment=32
) -> bytes:
    num_entries = len(entries) if num_entries is None else num_entries
    num_tensors = len(infos) if num_tensors is None else num_tensors
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries) + b"".join(entries) + b"".join(infos)
    return head + b"\0" * (-len(head) % alignment) + data


def byte_alphabet() -> list[str]:
    return sorted(ByteLevel.alphabet())


def write_tokenizer(writer: gguf.GGUFWriter, pre: str = "smollm") -> int:
    """A byte-level vocabulary with a few merges, two control tokens and a user-defined one; returns its size."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "Ġ 1", "Ġ Ġ"]
    tokens = ["<|end|>", "<|start|>", *byte_alphabet(), *[m.replace(" ", "") for m in merges], "<tool>"]
    types = [3, 3] + [1] * (len(tokens) - 3) + [4]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    return len(tokens)


def blocks_of(array: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """uint8 [rows, bytes of a row]. The gguf package does not round to K types: such blocks are drawn, with numbers as
    large as weights are."""
    if not kind.name.endswith("_K"):
        return gguf.quants.quantize(array, kind)
    length, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(array.shape[0])
    raw = generator.integers(0, 256, (array.size // length, size), dtype=np.uint8)
    for at in (208,) if kind.name == "Q6_K" else (0, 2):  # d, and that of the minimum
        numbers = generator.uniform(1e-4, 4e-4, len(raw)).astype(np.float16)
        raw[:, at : at + 2] = numbers.view(np.uint8).reshape(-1, 2)
    return raw.reshape(len(array), -1)


def write_model(
    path: Path,
    arch: str,
    state: dict[str, torch.Tensor],
    *,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    extra=None,
    types=None,
) -> Path:
    """A Hugging Face state dict as llama.cpp's converter would write it. `extra(writer)` adds metadata or tensors;
    `types`: part of a name -> type, "Q4_0" (F32 where there is none)."""
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "model.layers.": "blk.",
    }
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_context_length(128)
    writer.add_embedding_length(state["model.embed_tokens.weight"].shape[1])
    writer.add_feed_forward_length(state["model.layers.0.mlp.up_proj.weight"].shape[0])
    writer.add_block_count(1 + max(int(n.split(".")[2]) for n in state if n.startswith("model.layers.")))
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    write_tokenizer(writer)
    if extra is not None:
        extra(writer)
    for name, tensor in state.items():
        array = tensor.detach().float().numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = num_heads if "q_proj" in name else num_kv_heads
            halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
            array = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
        kind = next((gguf.GGMLQuantizationType[kind] for part, kind in (types or {}).items() if part in name), None)
        for long, short in names.items():
            name = name.replace(long, short)
        if kind is None:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, blocks_of(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stack_experts(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`...experts.3.w1.weight` and its like as one tensor, `...experts.w1.weight`."""
    found: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in state.items():
        before, _, after = name.partition(".experts.")
        number, _, matrix = after.partition(".")
        found.setdefault(f"{before}.experts.{matrix}" if after else name, {})[int(number or 0)] = tensor
    stacked = {name: torch.stack([those[i] for i in range(len(those))]) for name, those in found.items()}
    return {name: tensor if ".experts." in name else tensor[0] for name, tensor in stacked.items()}


def add_tensors(
    writer: gguf.GGUFWriter,
    names: gguf.TensorNameMap,
    state: dict[str, torch.Tensor],
    matrices: list[str] | None = None,
) -> None:
    """By the names that the gguf package has for Hugging Face's. `matrices`: types that these take in turns."""
    kinds = itertools.cycle(gguf.GGMLQuantizationType[kind] for kind in matrices or ["F32"])
    for name, tensor in state.items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        array = tensor.detach().float().contiguous().numpy()
        if array.ndim > 1 and "ffn_gate_inp" not in stored and (kind := next(kinds)) != 0:  # 0: F32
            writer.add_tensor(stored, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, array)


def tiny_state(
    arch: str = "llama", *, tied: bool = True, num_layers: int = 2, vocab: int = 267, inner: int = 48
) -> dict:
    """hidden 32, 4 query heads and 2 key heads of 8; row i of each projection is recognisable."""
    torch.manual_seed(0)
    state = {"model.embed_tokens.weight": torch.randn(vocab, 32), "model.norm.weight": torch.randn(32)}
    if not tied:
        state["lm_head.weight"] = torch.randn(vocab, 32)
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        for part, rows in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16), ("o_proj", 32)):
            state[f"{prefix}self_attn.{part}.weight"] = torch.randn(rows, 32)
            if arch == "qwen2" and part != "o_proj":
                state[f"{prefix}self_attn.{part}.bias"] = torch.randn(rows)
        if arch == "qwen3":
            state[f"{prefix}self_attn.q_norm.weight"] = torch.randn(8)
            state[f"{prefix}self_attn.k_norm.weight"] = torch.randn(8)
        state[f"{prefix}input_layernorm.weight"] = torch.randn(32)
        state[f"{prefix}post_attention_layernorm.weight"] = torch.randn(32)
        state[f"{prefix}mlp.gate_proj.weight"] = torch.randn(inner, 32)
        state[f"{prefix}mlp.up_proj.weight"] = torch.randn(inner, 32)
        state[f"{prefix}mlp.down_proj.weight"] = torch.randn(32, inner)
    return state
