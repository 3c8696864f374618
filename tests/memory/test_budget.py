"""The memory model against hand-computed numbers and the models as built; every boundary from both sides."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.errors import ConfigError
from nanovllm.memory.budget import (
    CONTEXT_BYTES,
    GIB,
    DoesNotFit,
    Memory,
    ModelFacts,
    Tiers,
    Wants,
    ceil_gb,
    default_step_tokens,
    size_tiers,
    spread,
)
from nanovllm.memory.facts import CAPTURED_TOKENS, EXPANDED_BYTES, INTEGER_ROWS
from nanovllm.memory.speed import Links, distinct_experts, hit_rate, missed_experts, predict
from nanovllm.model_config import ModelConfig
from nanovllm.ops import linear
from nanovllm.ops.sampler_state import SamplerState
from nanovllm.runner import captured_steps

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {path.parent.name: path for path in (ROOT / "benchmarks/models").glob("*/config.json")}
FOLDERS["tiny-mixtral"] = ROOT / "tests/fixtures/tiny-mixtral/config.json"


def facts(name: str, **changes: Any) -> ModelFacts:
    return ModelFacts(ModelConfig.from_hf({**json.loads(FOLDERS[name].read_text()), **changes}))


MIXTRAL, QWEN = facts("mixtral-8x7b"), facts("qwen3-30b-a3b")
HOST = 256 * GIB


def card(usable: int) -> Memory:
    """A card with exactly so many usable bytes."""
    memory = Memory(usable + CONTEXT_BYTES, HOST, 1.0)
    assert memory.usable_bytes == usable
    return memory


def fixed_bytes(model: ModelFacts, wants: Wants) -> int:
    return model.dense_bytes + model.step_bytes(wants.max_num_batched_tokens, wants.max_num_seqs) + wants.reserve_bytes


def captured_bytes(model: ModelFacts, wants: Wants) -> int:
    return model.captured_bytes(wants.max_num_batched_tokens, wants.max_num_seqs)


# ---- bytes of a model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dense", "expert", "num_experts", "kv"),
    [
        # embeddings and head 2 x 32000 x 4096; a layer: attention 2 x 4096 x (4096 + 1024), router 8 x 4096, two
        # norms; the last norm
        ("mixtral-8x7b", 2 * (2 * 32000 * 4096 + 32 * (2 * 4096 * 5120 + 8 * 4096 + 2 * 4096) + 4096),
         3 * 4096 * 14336 * 2, 256, 131072),
        # heads of 128: q 32, k and v 4 each; a norm for q's heads and one for k's
        ("qwen3-30b-a3b", 2 * (2 * 151936 * 2048 + 48 * (2048 * 128 * (32 + 8 + 32) + 128 * 2048 + 2 * 2048 + 256)
                               + 2048), 3 * 2048 * 768 * 2, 48 * 128, 98304),
        ("qwen3-8b", 2 * 8_190_735_360, 0, 0, 147456),
        ("qwen3-0.6b", 2 * 596_049_920, 0, 0, 114688),
        ("tiny-mixtral", 2 * (2048 * 128 + 4 * (128 * 128 * 2 + 128 * 64 * 2 + 8 * 128 + 2 * 128) + 128),
         3 * 128 * 256 * 2, 32, 1024),
    ],
)  # fmt: skip
def test_bytes_by_hand(name: str, dense: int, expert: int, num_experts: int, kv: int) -> None:
    model = facts(name)
    assert model.dense_bytes == dense
    assert model.expert_bytes == expert
    assert model.num_experts == num_experts
    assert model.kv_bytes_per_token == kv


def tiny_config(architecture: str, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        **more,
    }


LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14}
LATENT |= {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 2}


@pytest.mark.parametrize(
    "config",
    [
        tiny_config("LlamaForCausalLM"),
        tiny_config("LlamaForCausalLM", tie_word_embeddings=True),
        tiny_config("LlamaForCausalLM", attention_bias=True, mlp_bias=True),
        tiny_config("MistralForCausalLM", sliding_window=32),
        tiny_config("Qwen2ForCausalLM", model_type="qwen2"),
        tiny_config("Qwen3ForCausalLM", model_type="qwen3", attention_bias=True),
        tiny_config("MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2),
        tiny_config("Qwen3MoeForCausalLM", model_type="qwen3_moe", num_experts=6, num_experts_per_tok=2,
                    moe_intermediate_size=32, attention_bias=True),
        tiny_config("Qwen3MoeForCausalLM", model_type="qwen3_moe", num_experts=6, num_experts_per_tok=2,
                    moe_intermediate_size=32, mlp_only_layers=[1]),
        tiny_config("DeepseekV2ForCausalLM", **LATENT),
        tiny_config("DeepseekV3ForCausalLM", **LATENT, q_lora_rank=20, n_group=2, topk_group=1),
    ],
    ids=lambda config: config["architectures"][0],
)  # fmt: skip
def test_parameters_are_those_of_the_model_as_built(config: dict[str, Any]) -> None:
    from nanovllm.attention.base import attention_specs
    from nanovllm.attention.select import select_backend
    from nanovllm.hardware.device import Device
    from nanovllm.hardware.parallel import Parallel
    from nanovllm.layers.build import Build
    from nanovllm.layers.packed import format_of, packed_weights
    from nanovllm.models.registry import find_family
    from nanovllm.models.transformer import Parts
    from nanovllm.ops.opset import choose_ops
    from nanovllm.ops.quant import BLOCK, FORMATS, LANES
    from nanovllm.runner.kv_cache import block_bytes

    parsed = ModelConfig.from_hf(config)
    device = Device.choose("cpu")
    backend = select_backend("auto", attention_specs(parsed, torch.float32, Parallel()), device, 16).backend
    build = Build(torch.float32, torch.device("meta"), choose_ops(False, torch.float32), Parallel())
    built = find_family(parsed)(parsed, Parts(build, backend, 64))
    num = sum(parameter.numel() for parameter in built.parameters())
    model = ModelFacts(parsed, itemsize=4)
    assert model.dense_bytes + model.all_experts_bytes == 4 * num
    assert model.kv_bytes_per_token == block_bytes(built.specs, 1)
    kinds = {"float16": torch.float16, "int8": torch.int8, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}
    for kind, kv_dtype in kinds.items():
        specs = attention_specs(parsed, torch.float32, Parallel(), kv_dtype)
        assert ModelFacts(parsed, 4, kv_cache_dtype=kind).kv_bytes_per_token == block_bytes(specs, 1)
    packed = find_family(parsed)(parsed, Parts(dataclasses.replace(build, packs=True), backend, 64))
    shapes = [weight.shape for weight in packed_weights(packed).values()]
    if any(rows % LANES or columns % BLOCK for rows, columns in shapes):
        return  # such rows stay float32: no model of use has them
    for kind in ("int8", "int4"):
        model = ModelFacts(parsed, itemsize=4, quantization=kind)
        found = [(weight.shape, FORMATS[format_of(kind, weight) or ""]) for weight in packed_weights(packed).values()]
        size = sum(rows // LANES * form.panel_bytes(columns) for (rows, columns), form in found)
        size += 4 * sum(parameter.numel() for parameter in packed.parameters())
        assert model.dense_bytes + model.all_experts_bytes == size


def test_step_bytes_by_hand() -> None:
    """Mixtral, 2048 tokens: the experts' part is the largest. Logits win when the rows are many and the tokens few."""
    always = 3 * 2048 * 4096 * 2 + (32768 + 2048) * 128 * 4
    experts = 2 * 2048 * ((2 * 4096 + 3 * 14336) * 2 + 16) + 8 * 2048 * 8
    assert MIXTRAL.step_bytes(2048, 256) == always + experts
    always = 3 * 256 * 4096 * 2 + (32768 + 256) * 128 * 4
    assert MIXTRAL.step_bytes(256, 256) == always + 256 * 32000 * 10
    dense = facts("qwen3-8b")
    assert dense.step_bytes(2048, 1) == 3 * 2048 * 4096 * 2 + (40960 + 2048) * 512 + 2048 * 3 * 12288 * 2


# ---- resident or offload -------------------------------------------------------------------------------------------

WANTS = Wants(max_model_len=1000, max_num_batched_tokens=2048, max_num_seqs=16)
ONE_SEQUENCE = 1024 * 131072  # 1000 tokens in blocks of 64


def test_resident_exactly_and_one_byte_less() -> None:
    needed = fixed_bytes(MIXTRAL, WANTS) + captured_bytes(MIXTRAL, WANTS) + MIXTRAL.all_experts_bytes + ONE_SEQUENCE
    tiers = size_tiers(card(needed), MIXTRAL, WANTS)
    assert tiers.captured_bytes == captured_bytes(MIXTRAL, WANTS)
    assert (tiers.placement, tiers.num_buffers, tiers.resident_experts) == ("resident", 0, 256)
    assert (tiers.kv_bytes, tiers.kv_tokens, tiers.longest_context) == (ONE_SEQUENCE, 1024, 1024)
    assert (tiers.host_experts, tiers.disk_experts) == (0, 0)
    less = size_tiers(card(needed - 1), MIXTRAL, WANTS)
    assert (less.placement, less.resident_experts, less.host_experts) == ("offload", 0, 256)
    assert 200 < less.num_buffers < 256


def test_resident_that_does_not_fit_says_what_would() -> None:
    wants = dataclasses.replace(WANTS, placement="resident")
    needed = fixed_bytes(MIXTRAL, wants) + captured_bytes(MIXTRAL, wants) + MIXTRAL.all_experts_bytes + ONE_SEQUENCE
    assert size_tiers(card(needed), MIXTRAL, wants).placement == "resident"
    with pytest.raises(DoesNotFit, match="expert_placement='resident'") as caught:
        size_tiers(card(needed - 1), MIXTRAL, wants)
    assert caught.value.missing_bytes == 1
    with pytest.raises(DoesNotFit) as caught:
        size_tiers(Memory(11 * GIB, HOST), MIXTRAL, wants)
    message = str(caught.value)
    for figure in ("2.99 GiB", "256 experts 84.00 GiB", "'offload'", "of 256 experts on the GPU", "9.90 GiB"):
        assert figure in message, message
    assert caught.value.missing_bytes == needed - Memory(11 * GIB, HOST).usable_bytes


def test_the_card_that_is_offered_is_enough() -> None:
    for utilization in (0.9, 0.95, 1.0):
        memory = Memory(4 * GIB, HOST, utilization)
        with pytest.raises(DoesNotFit) as caught:
            size_tiers(memory, MIXTRAL, WANTS)
        offered = memory.card_for(memory.usable_bytes + caught.value.missing_bytes)
        assert f"at least {ceil_gb(offered)} GiB" in str(caught.value)
        assert size_tiers(dataclasses.replace(memory, gpu_bytes=offered), MIXTRAL, WANTS).placement == "offload"
        with pytest.raises(DoesNotFit):
            size_tiers(dataclasses.replace(memory, gpu_bytes=offered - 8), MIXTRAL, WANTS)


# ---- offload -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "streaming", "quotas"),
    [
        (2, 2, (0,) * 32),
        (3, 3, (0,) * 32),
        (4, 4, (0,) * 32),
        (5, 4, (1,) + (0,) * 31),
        (36, 4, (1,) * 32),
        (37, 4, (2,) + (1,) * 31),
        (259, 4, (8,) * 31 + (7,)),
        (260, 4, (8,) * 32),
    ],
)
def test_slots(slots: int, streaming: int, quotas: tuple[int, ...]) -> None:
    """By expert_cache_gb: so many slots exactly, one byte less is one slot less."""
    wants = dataclasses.replace(WANTS, placement="offload", cache_gb=slots * MIXTRAL.expert_bytes / GIB)
    big = Memory(200 * GIB, HOST)
    tiers = size_tiers(big, MIXTRAL, wants)
    assert (tiers.num_buffers, tiers.num_streaming, tiers.quotas) == (slots, streaming, quotas)
    fewer = dataclasses.replace(wants, cache_gb=(slots * MIXTRAL.expert_bytes - 1) / GIB)
    if slots > 2:
        assert size_tiers(big, MIXTRAL, fewer).num_buffers == slots - 1
    else:
        with pytest.raises(ConfigError, match=r"needs 2 at once: give at least 0.66") as caught:
            size_tiers(big, MIXTRAL, fewer)
        assert "holds 1 experts" in str(caught.value)


def test_never_more_slots_than_experts() -> None:
    wants = dataclasses.replace(WANTS, placement="offload")
    tiers = size_tiers(Memory(500 * GIB, HOST), MIXTRAL, wants)
    assert (tiers.num_cached, tiers.num_streaming, max(tiers.quotas)) == (256, 4, 8)
    assert tiers.kv_bytes == 16 * ONE_SEQUENCE  # what max_num_seqs can use, no more


def test_offload_exactly_and_one_byte_less() -> None:
    """The dense part, a step, one sequence and top_k slots: the least that runs."""
    needed = fixed_bytes(MIXTRAL, WANTS) + 2 * MIXTRAL.expert_bytes + ONE_SEQUENCE
    tiers = size_tiers(card(needed), MIXTRAL, WANTS)
    assert (tiers.num_cached, tiers.num_streaming, tiers.kv_tokens) == (0, 2, 1024)
    assert tiers.longest_context == 1024
    with pytest.raises(DoesNotFit) as caught:
        size_tiers(card(needed - 1), MIXTRAL, WANTS)
    assert caught.value.missing_bytes == 1
    for figure in ("2.99 GiB", "2 expert slots 0.66 GiB", "1000 tokens 0.12 GiB", "max_model_len to at most 960"):
        assert figure in str(caught.value), str(caught.value)


def test_a_cap_below_the_dense_part() -> None:
    with pytest.raises(DoesNotFit) as caught:
        size_tiers(Memory(2 * GIB, HOST), MIXTRAL, WANTS)
    message = str(caught.value)
    assert "the dense part needs 2.99 GiB" in message
    assert "lower" not in message  # no option makes weights smaller
    assert "take a card" in message


def test_kv_gets_a_tenth_and_at_least_one_sequence() -> None:
    short = dataclasses.replace(WANTS, max_model_len=64)
    memory = Memory(24 * GIB, HOST)
    left = memory.usable_bytes - fixed_bytes(MIXTRAL, short)
    tiers = size_tiers(memory, MIXTRAL, dataclasses.replace(short, max_num_seqs=16))
    assert tiers.kv_bytes == 16 * 64 * 131072  # all that 16 sequences of 64 tokens can use
    many = dataclasses.replace(WANTS, max_num_seqs=64)
    left = memory.usable_bytes - fixed_bytes(MIXTRAL, many)
    tiers = size_tiers(memory, MIXTRAL, many)
    assert left / 10 - 64 * 131072 <= tiers.kv_bytes < left / 10 + MIXTRAL.expert_bytes
    long = size_tiers(memory, MIXTRAL, dataclasses.replace(many, max_model_len=32768))
    assert long.kv_tokens >= 32768 > tiers.kv_tokens
    assert long.num_buffers < tiers.num_buffers


@pytest.mark.parametrize("model", [MIXTRAL, QWEN, facts("tiny-mixtral")], ids=["mixtral", "qwen3", "tiny"])
@pytest.mark.parametrize("gigabytes", [5, 8, 11, 16, 24, 48, 80, 141])
def test_the_parts_never_exceed_the_card(model: ModelFacts, gigabytes: int) -> None:
    wants = dataclasses.replace(WANTS, placement="offload", max_num_batched_tokens=512)
    tiers = size_tiers(Memory(gigabytes * GIB, HOST), model, wants)
    parts = tiers.dense_bytes + tiers.step_bytes + tiers.reserve_bytes + tiers.gpu_expert_bytes + tiers.kv_bytes
    assert parts <= tiers.usable_bytes
    assert tiers.kv_tokens >= 1000
    assert tiers.num_streaming >= model.top_k
    assert max(tiers.quotas) - min(tiers.quotas) <= 1
    assert tiers.longest_context >= 1000 or tiers.longest_context == model.config.max_position_embeddings


def test_longest_context_really_fits_and_the_next_block_does_not() -> None:
    memory = Memory(6 * GIB, HOST)
    longest = size_tiers(memory, MIXTRAL, WANTS).longest_context
    assert 64 < longest < 32768
    tiers = size_tiers(memory, MIXTRAL, dataclasses.replace(WANTS, max_model_len=longest))
    assert tiers.num_buffers == 2
    with pytest.raises(DoesNotFit):
        size_tiers(memory, MIXTRAL, dataclasses.replace(WANTS, max_model_len=longest + 1))


def test_expert_cache_that_is_too_large() -> None:
    memory = Memory(11 * GIB, HOST)
    with pytest.raises(ConfigError, match=r"expert_cache_gb=11.5: the GPU has only 11.00 GiB"):
        size_tiers(memory, MIXTRAL, dataclasses.replace(WANTS, cache_gb=11.5))
    room = memory.usable_bytes - fixed_bytes(MIXTRAL, WANTS) - ONE_SEQUENCE
    most = room // MIXTRAL.expert_bytes
    fits = dataclasses.replace(WANTS, cache_gb=most * MIXTRAL.expert_bytes / GIB)
    assert size_tiers(memory, MIXTRAL, fits).num_buffers == most
    with pytest.raises(ConfigError, match="give at most") as caught:
        size_tiers(memory, MIXTRAL, dataclasses.replace(WANTS, cache_gb=(most + 1) * MIXTRAL.expert_bytes / GIB))
    offered = float(str(caught.value).split("give at most ")[1].split(",")[0])
    assert size_tiers(memory, MIXTRAL, dataclasses.replace(WANTS, cache_gb=offered)).num_buffers == most


def test_a_limited_cache_is_offload_even_where_all_would_fit() -> None:
    memory = Memory(141 * GIB, HOST)
    assert size_tiers(memory, MIXTRAL, WANTS).placement == "resident"
    everything = MIXTRAL.all_experts_bytes / GIB
    assert size_tiers(memory, MIXTRAL, dataclasses.replace(WANTS, cache_gb=20)).placement == "offload"
    assert size_tiers(memory, MIXTRAL, dataclasses.replace(WANTS, cache_gb=everything)).placement == "resident"


# ---- host and disk -------------------------------------------------------------------------------------------------


def on_host(host_bytes: int, host_gb: float | None = None) -> Tiers:
    wants = dataclasses.replace(WANTS, host_gb=host_gb)
    return size_tiers(Memory(11 * GIB, host_bytes), MIXTRAL, wants)


def test_host_and_disk() -> None:
    size = MIXTRAL.expert_bytes
    assert on_host(64 * GIB).host_experts == 56 * GIB // size == 170  # an eighth is left to others
    assert (on_host(64 * GIB).lone_experts, on_host(64 * GIB).disk_experts) == (12, 74)  # 12 cached slots
    assert on_host(16 * GIB).host_experts == 12 * GIB // size  # at least 4 GiB
    assert on_host(2 * GIB).host_experts == 0
    assert (on_host(96 * GIB).host_experts, on_host(96 * GIB).notes) == (256, ())  # 84 of 96: just enough
    assert on_host(96 * GIB - 8).host_experts == 255
    assert on_host(96 * GIB - 8).disk_experts == 0
    assert "1 more have a place on the GPU alone and are read from disk once" in on_host(96 * GIB - 8).notes[0]
    assert "missing" not in on_host(96 * GIB - 8).notes[0]
    assert "12 more have" in on_host(64 * GIB).notes[0]
    assert "74 are read from disk each time they are missing" in on_host(64 * GIB).notes[0]


def test_a_card_and_a_host_that_hold_all_experts_together_read_no_disk() -> None:
    """80 GB and 64: 0.99 to 2.0 tok/s while the two held the same experts, with a third of the misses on disk."""
    wants = Wants(max_model_len=32768, max_num_batched_tokens=16384, max_num_seqs=16)
    tiers = size_tiers(Memory(80 * GIB, 64 * GIB), MIXTRAL, wants)
    assert tiers.num_cached + tiers.host_experts > 256 > max(tiers.num_cached, tiers.host_experts)
    assert (tiers.lone_experts, tiers.disk_experts, tiers.disk_bytes, tiers.held) == (86, 0, 0, (8,) * 32)
    for links, even in ((Links(25e9, 3e9, 1e30), 3.5), (Links(55e9, 3e9, 1e30), 7.6)):
        speed = predict(MIXTRAL, tiers, links, 1, skewed=False, overlap=False)
        assert speed.tokens_per_second == pytest.approx(even, rel=0.05)
        assert speed.disk_bytes == 0
    less = size_tiers(Memory(80 * GIB, 24 * GIB), MIXTRAL, wants)
    even = predict(MIXTRAL, less, Links(25e9, 3e9, 1e30), 1, skewed=False, overlap=False)
    assert less.disk_experts == 256 - less.num_cached - less.host_experts > 0
    assert even.disk_bytes == pytest.approx(64 * less.disk_experts / 256 * MIXTRAL.expert_bytes)
    seconds = (even.copied_bytes - even.disk_bytes) / 25e9 + even.disk_bytes / 3e9
    assert even.tokens_per_second == pytest.approx(1 / seconds)


def test_expert_host_gb() -> None:
    size = MIXTRAL.expert_bytes
    assert on_host(64 * GIB, 0).host_experts == 0
    assert on_host(64 * GIB, 10 * size / GIB).host_experts == 10
    assert on_host(64 * GIB, (10 * size - 1) / GIB).host_experts == 9
    assert on_host(64 * GIB, 64).host_experts == 64 * GIB // size  # asked for: not reduced
    more = on_host(64 * GIB, 65)  # impossible: as if not asked, and said
    assert more.host_experts == 170
    assert "expert_host_gb=65" in more.notes[0]


# ---- dense models and memory ---------------------------------------------------------------------------------------


def test_dense_models() -> None:
    model = facts("qwen3-8b")
    needed = fixed_bytes(model, WANTS) + captured_bytes(model, WANTS) + 1024 * 147456
    tiers = size_tiers(card(needed), model, WANTS)
    assert (tiers.placement, tiers.num_buffers, tiers.resident_experts, tiers.kv_tokens) == ("resident", 0, 0, 1024)
    with pytest.raises(DoesNotFit, match=r"the weights need 15.26 GiB") as caught:
        size_tiers(card(needed - 1), model, WANTS)
    assert "expert" not in str(caught.value)


def test_what_captured_steps_and_products_in_fewer_bits_keep() -> None:
    """The constants are those of the rooms that allocate; these import torch, which this arithmetic does without."""
    assert EXPANDED_BYTES == 2 * linear.PIECE_NUMBERS
    assert captured_steps.TOKEN_BUCKETS[-1] == CAPTURED_TOKENS
    source = (ROOT / "nanovllm/ops/triton/integers.py").read_text()  # triton may not be installed
    assert f"\nMATMUL_ROWS = {INTEGER_ROWS}\n" in source
    model = facts("qwen3-8b")
    small = dataclasses.replace(model, quantization="int4-128")
    assert small.step_bytes(256, 1) == model.step_bytes(256, 1)
    assert small.step_bytes(2048, 1) == model.step_bytes(2048, 1) + EXPANDED_BYTES
    eight = dataclasses.replace(model, quantization="fp8")
    assert eight.step_bytes(2048, 1) == model.step_bytes(2048, 1) + 2048 * 12288
    for tokens, share in ((512, 1), (2048, 1), (8192, 4)):
        sampler = SamplerState.num_bytes(16, model.config.vocab_size)
        kept = model.captured_bytes(tokens, 16) - model.step_bytes(tokens, 16) // share
        assert kept == pytest.approx(sampler, rel=0.01)


def test_usable_memory() -> None:
    assert Memory(11 * GIB, 0).usable_bytes == int(11 * GIB * 0.9)
    assert Memory(8 * GIB, 0, 1.0).usable_bytes == 8 * GIB - CONTEXT_BYTES  # the context is there in any case
    assert Memory(8 * GIB, 0, 1.0, context_bytes=0).usable_bytes == 8 * GIB
    assert Memory(11 * GIB, 0, free_bytes=GIB).usable_bytes == GIB
    assert Memory(CONTEXT_BYTES // 2, 0).usable_bytes == 0


@pytest.mark.parametrize(
    ("gigabytes", "num_tokens"), [(1, 256), (6, 1024), (11, 2048), (24, 4096), (48, 8192), (139, 16384), (500, 16384)]
)
def test_default_step(gigabytes: int, num_tokens: int) -> None:
    memory = Memory(gigabytes * GIB, HOST)
    assert default_step_tokens(memory, MIXTRAL, 16) == num_tokens
    share = memory.usable_bytes // 20
    assert MIXTRAL.step_bytes(num_tokens, 16) <= share or num_tokens == 256
    assert num_tokens == 16384 or MIXTRAL.step_bytes(2 * num_tokens, 16) > share
    assert default_step_tokens(memory, MIXTRAL, 20_000) == 20_000  # a decode of everyone must fit


def test_an_11_gb_card_runs_mixtral_with_nothing_but_defaults() -> None:
    memory = Memory(11 * GIB, HOST)
    tiers = size_tiers(memory, MIXTRAL, Wants(32768, default_step_tokens(memory, MIXTRAL, 256)))
    assert tiers.kv_tokens >= 32768
    assert tiers.num_streaming == 4


@pytest.mark.parametrize("total", [0, 1, 31, 32, 33, 64, 255, 256])
def test_spread(total: int) -> None:
    quotas = spread(total, 32)
    assert sum(quotas) == total
    assert list(quotas) == sorted(quotas, reverse=True)
    assert quotas[0] - quotas[-1] <= 1


# ---- speed ---------------------------------------------------------------------------------------------------------

LIMITS = {  # tokens a second with even routing, by experts cached a layer: hand-computed, bandwidth / bytes missed
    12: (0.53, 0.61, 0.71, 0.85, 1.06, 1.42, 2.13, 4.26),
    25: (1.11, 1.27, 1.48, 1.77, 2.22, 2.96, 4.43, 8.87),
    55: (2.44, 2.79, 3.25, 3.90, 4.88, 6.50, 9.76, 19.5),
}


@pytest.mark.parametrize("gbs", LIMITS)
@pytest.mark.parametrize("cached", range(8))
def test_limits_of_mixtral(gbs: int, cached: int) -> None:
    missed = missed_experts(MIXTRAL, [cached] * 32, 1, skewed=False)
    assert missed == pytest.approx(64 * (1 - cached / 8))
    limit = gbs * 1e9 / (missed * MIXTRAL.expert_bytes)
    assert limit == pytest.approx(LIMITS[gbs][cached], abs=0.006, rel=0.002)
    wants = dataclasses.replace(WANTS, placement="offload", cache_gb=(32 * cached + 4) * MIXTRAL.expert_bytes / GIB)
    tiers = size_tiers(Memory(200 * GIB, HOST), MIXTRAL, wants)
    infinite = Links(gbs * 1e9, 1e9, 1e30)
    assert predict(MIXTRAL, tiers, infinite, 1, False, False).tokens_per_second == pytest.approx(limit)


def test_experts_touched_by_a_batch() -> None:
    touched = [round(distinct_experts(8, 2, batch), 1) for batch in (1, 2, 4, 8, 16)]
    assert touched == [2.0, 3.5, 5.5, 7.2, 7.9]
    assert distinct_experts(8, 8, 1) == 8


def test_hit_rates() -> None:
    assert [hit_rate(share, skewed=True) for share in (0, 0.25, 0.5, 0.75, 1)] == [0, 0.49, 0.70, 0.87, 1]
    assert hit_rate(0.125, skewed=True) == pytest.approx(0.245)
    assert all(hit_rate(x / 16, True) >= hit_rate(x / 16, False) == x / 16 for x in range(17))
    # everything touched: a cache hits its share, whatever the skew
    many = [missed_experts(MIXTRAL, [4] * 32, 10_000, skewed) for skewed in (False, True)]
    assert many == pytest.approx([128, 128])


def test_the_skewed_rates_are_those_of_a_simulated_cache() -> None:
    from tests.moe.routing import simulate_hit_rates

    for share, simulated in zip((0.25, 0.5, 0.75), simulate_hit_rates([2, 4, 6], num_tokens=400)):
        assert simulated == pytest.approx(hit_rate(share, skewed=True), abs=0.1)


def test_disk_reading_and_overlap() -> None:
    """All from disk at 3 GB/s: a third of 9 GB/s. In turns the times add up, overlapped the longer one counts."""
    tiers = size_tiers(Memory(11 * GIB, HOST), MIXTRAL, dataclasses.replace(WANTS, host_gb=0))
    hosted = size_tiers(Memory(11 * GIB, HOST), MIXTRAL, WANTS)
    links = Links(9e9, 3e9, 600e9)
    slow, fast = (predict(MIXTRAL, t, links, 1, False, True).tokens_per_second for t in (tiers, hosted))
    assert fast == pytest.approx(3 * slow)
    speed = predict(MIXTRAL, hosted, links, 1, False, False)
    read = MIXTRAL.dense_bytes - 32000 * 4096 * 2 + 64 * MIXTRAL.expert_bytes
    assert speed.read_bytes == pytest.approx(read)
    assert 1 / speed.tokens_per_second == pytest.approx(speed.copied_bytes / 9e9 + read / 600e9)


def test_dense_speed_is_its_bytes() -> None:
    model = facts("qwen3-8b")
    tiers = size_tiers(Memory(24 * GIB, HOST), model, WANTS)
    speed = predict(model, tiers, Links(12e9, 3e9, 1e12), 16, True, True)
    read = 2 * (8_190_735_360 - 151936 * 4096)  # the embedding is looked up, the head is read
    assert speed.tokens_per_second == pytest.approx(16 * 1e12 / read)
    assert speed.copied_bytes == 0
    tied = facts("qwen3-0.6b")
    assert predict(tied, tiers, Links(1e9, 1e9, 1e12), 1, True, True).read_bytes == 2 * 596_049_920
