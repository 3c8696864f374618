"""Blocks of experts in 8-bit floats: their sizes, what each rank loads of them, copies of redundant ones, and which
models get them."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.attention.sdpa import SdpaBackend
from nanovllm.config import EngineConfig
from nanovllm.hardware.parallel import Parallel
from nanovllm.layers.build import Build
from nanovllm.layers.integers import IntegerForm
from nanovllm.layers.packed import count_weights, formats_of
from nanovllm.layers.parted import PartedLoading
from nanovllm.layers.scaled import Scales
from nanovllm.memory.facts import ModelFacts
from nanovllm.model_config import ModelConfig
from nanovllm.models.registry import find_family
from nanovllm.models.transformer import Parts
from nanovllm.moe.offload.shape import ExpertShape
from nanovllm.moe.rebalance import _parts, add_places
from nanovllm.moe.resident import ResidentExperts
from nanovllm.moe.scaled import expert_views, scaled_expert_targets
from nanovllm.ops.opset import PLAIN
from nanovllm.runner.quantization import choose_scales, report_experts, scaled_facts
from nanovllm.weights.checkpoint import open_checkpoint
from nanovllm.weights.expert_form import ExpertForm, ExpertIntegers
from nanovllm.weights.loader import load_weights
from tests.moe.experts8 import BLOCK_FILE, MODELS, ROW_FILE, SIZES
from tests.weights.quantised_samples import floats, write_folders

CPU = torch.device("cpu")
SAMPLES = {"blocks": (BLOCK_FILE, Scales(128, experts=True)), "rows": (ROW_FILE, Scales(0, experts=True))}


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_a_block_of_mixtral_and_of_deepseek_v3_by_hand() -> None:
    numbers = 3 * 4096 * 14336
    rows = ExpertForm.dense(4096, 14336, 0)
    assert (rows.numel, rows.scales_start, rows.num_scales) == (numbers, numbers, 2 * 14336 + 4096)
    assert rows.length == rows.num_bytes(2) == numbers + 4 * rows.num_scales  # 131,072 bytes of scales
    blocks = ExpertForm.dense(7168, 2048, 128)
    assert [blocks.scale_shape(part) for part in ("gate", "up", "down")] == [(16, 56), (16, 56), (56, 16)]
    assert blocks.length == 3 * 7168 * 2048 + 4 * 3 * 16 * 56
    assert ExpertForm.dense(4096, 14336).num_bytes(2) == 2 * numbers


@pytest.mark.parametrize("sizes", [(4096, 14336), (2048, 768), (7168, 2048), (37, 23), (144, 136)])
@pytest.mark.parametrize("block", [0, 128])
def test_blocks_are_round_and_pieces_are_few(sizes: tuple[int, int], block: int) -> None:
    """Bytes that follow a round product would leave it few divisors: a piece would be a few bytes."""
    form = ExpertForm.dense(*sizes, block)
    assert form.length % 512 == form.scales_start % 16 == 0
    assert form.length - form.scales_start - 4 * form.num_scales in range(512)
    shape = ExpertShape((0,), 4, (form,), torch.uint8)
    least = -(-shape.num_bytes // (4 << 20))
    assert shape.num_pieces(4 << 20) < 2 * least + 1
    gate_up, down = expert_views(form, torch.zeros(2, form.length + 512, dtype=torch.uint8))
    assert (gate_up.shape[1:], down.shape[1:]) == ((2 * sizes[1], sizes[0]), sizes)
    gate_up.scale.fill_(1.0)
    down.scale.fill_(2.0)
    assert set(gate_up.scale.unique().tolist()) == {1.0}, "scales of the two overlap"
    assert gate_up.q.view(torch.uint8).max() == down.q.view(torch.uint8).max() == 0, "scales lie on numbers"


@pytest.mark.parametrize("block", [0, 128])
def test_ranks_cut_blocks_only_where_they_meet(block: int) -> None:
    form = ExpertForm.dense(256, 768, block)
    kept = [form.share(ranks).scale_block is not None for ranks in (1, 2, 3, 4, 6)]
    assert kept == ([True] * 5 if block == 0 else [True, True, True, False, True])
    assert ExpertForm.dense(256, 200, block).share(1).scale_block == block  # odd sizes are no cut


# ---- loading ---------------------------------------------------------------------------------------------------------


def model_of(path: Path, scales: Scales | None, parallel: Parallel) -> Any:
    checkpoint = open_checkpoint(path)
    config = ModelConfig.from_hf(checkpoint.config)
    build = Build(torch.float32, CPU, PLAIN, parallel, scaling=scales)
    model = find_family(config)(config, Parts(build, SdpaBackend(), 64)).eval()
    load_weights(model, checkpoint, model.rules, {**PartedLoading(model).targets(), **scaled_expert_targets(model)})
    checkpoint.close()
    return model


def numbers_of(experts: ResidentExperts) -> tuple[torch.Tensor, torch.Tensor]:
    if experts.scaled is None:
        return experts.gate_up.weight.view(experts.gate_up_shape), experts.down.weight.view(experts.down_shape)
    stacks = experts.scaled.views
    gate_up, down = (torch.stack([stack.expanded(e, torch.float32) for e in range(len(stack.q))]) for stack in stacks)
    return gate_up, down


@pytest.mark.parametrize("form", SAMPLES)
@pytest.mark.parametrize(("size", "groups"), [(1, 1), (2, 1), (3, 1), (2, 2), (4, 2)])
def test_each_rank_has_its_part_of_the_files_numbers(tmp_path: Path, form: str, size: int, groups: int) -> None:
    """Cut (groups of one), spread (as many groups as ranks), and both. 384 is cut in three blocks, not in two."""
    (sample, scales), sizes = SAMPLES[form], {**SIZES, "intermediate_size": 384, "num_local_experts": 4}
    sizes |= {"hidden_size": 132, "num_attention_heads": 12, "num_key_value_heads": 12}
    small, plain = write_folders(tmp_path, "Mixtral", sizes, sample)
    whole = numbers_of(model_of(plain, None, Parallel()).layers[1].mlp.experts)
    per_expert = size // groups
    for rank in range(size):
        model = model_of(small, scales, Parallel(rank, size, expert_size=groups))
        experts = model.layers[1].mlp.experts
        is_kept = form == "rows" or 384 // per_expert % 128 == 0
        assert (experts.scaled is not None) == is_kept
        gate_up, down = numbers_of(experts)
        group, share = divmod(rank, per_expert)
        here = slice(group * 4 // groups, (group + 1) * 4 // groups)
        cut = slice(share * 384 // per_expert, (share + 1) * 384 // per_expert)
        expected = whole[0][here].unflatten(1, (2, 384))[:, :, cut].flatten(1, 2)
        torch.testing.assert_close(gate_up, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(down, whole[1][here][:, :, cut], rtol=1e-6, atol=0)


@pytest.mark.parametrize("model", ["mixtral", "deepseek-v3"])
@pytest.mark.parametrize("form", SAMPLES)
def test_sizes_are_known_before(tmp_path: Path, model: str, form: str) -> None:
    """`nanovllm plan` and the engine count the bytes of an expert alike; of other matrices without the scales."""
    sample, scales = SAMPLES[form]
    small, _ = write_folders(tmp_path, *MODELS[model], sample)
    built = model_of(small, scales, Parallel())
    config = ModelConfig.from_hf(open_checkpoint(small).config)
    facts = ModelFacts(config, 4, **scaled_facts(scales))
    pools = [layer.mlp.experts.scaled for layer in built.layers if hasattr(layer.mlp, "experts")]
    assert facts.all_experts_bytes == sum(pool.num_bytes for pool in pools)
    assert facts.layer_bytes == tuple(pool.pool.shape[1] for pool in pools)
    numbers, num_bytes = count_weights(built)
    plain, _ = count_weights(model_of(small, None, Parallel()))
    assert numbers == plain
    if form == "rows":  # with blocks some matrices are expanded: these are too small
        estimate = facts.dense_bytes + facts.all_experts_bytes
        assert num_bytes == pytest.approx(estimate, rel=0.05)
        assert num_bytes > estimate
    assert formats_of(built) == (["FP8"] if form == "rows" else ["FP8", "float32"])


def test_redundant_experts_are_copies_with_their_scales(tmp_path: Path) -> None:
    sample, scales = SAMPLES["rows"]
    small, _ = write_folders(tmp_path, *MODELS["qwen3-moe"], sample)
    experts = model_of(small, scales, Parallel(1, 2, expert_size=2)).layers[0].mlp.experts
    before = numbers_of(experts)
    add_places(experts, 8, 4)
    after = numbers_of(experts)
    for old, new in zip(before, after):
        assert len(new) == 6
        assert torch.equal(new, old[[0, 1, 2, 3, 0, 1]])
    [part] = _parts(experts, 6)  # what moves between ranks: bytes and scales together
    assert part.shape == (6, experts.form.length)
    assert part.data_ptr() == experts.scaled.pool.data_ptr()


# ---- which models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", SAMPLES)
def test_which_scales_a_mixture_of_experts_gets(tmp_path: Path, form: str) -> None:
    sample, scales = SAMPLES[form]
    small, plain = write_folders(tmp_path, *MODELS["mixtral"], sample)
    files, with_numbers = open_checkpoint(small), open_checkpoint(plain)
    model = ModelConfig.from_hf(files.config)
    choose = partial(choose_scales, model=model, is_gpu=True)
    assert choose(EngineConfig(model=str(small)), checkpoint=files) == scales
    assert choose(EngineConfig(model=str(small), quantization="none"), checkpoint=files) is None
    assert choose(EngineConfig(model=str(small)), checkpoint=files, is_gpu=False) is None
    quantised = choose(EngineConfig(model=str(plain), quantization="fp8"), checkpoint=with_numbers)
    assert quantised == Scales(0, quantises=True, experts=True)
    low_rank = choose(EngineConfig(model=str(small)), checkpoint=files, low_rank=True)
    assert low_rank == replace(scales, experts=False)
    made_up = EngineConfig(model=str(small), load_format="dummy")
    assert choose(made_up, checkpoint=files) == replace(scales, quantises=True)
    assert choose(replace(made_up, quantization="none"), checkpoint=files) is None
    assert choose(made_up, checkpoint=with_numbers) is None
    row = Scales(0, quantises=True, experts=True)
    assert choose(replace(made_up, quantization="fp8"), checkpoint=with_numbers) == row
    (small / "model.safetensors").unlink()  # config.json alone, as for `nanovllm plan`
    alone = open_checkpoint(small)
    assert choose(EngineConfig(model=str(small)), checkpoint=alone) == scales
    assert choose(made_up, checkpoint=alone) == replace(scales, quantises=True)


@pytest.mark.parametrize("wanted", ["auto", "fp8"])
@pytest.mark.parametrize("has_files", [True, False])
def test_blocks_of_other_sizes_get_scales_of_rows_where_that_is_asked_for(
    tmp_path: Path, wanted: str, has_files: bool
) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    small, _ = write_folders(tmp_path, *MODELS["mixtral"], floats("block", config, "weight_scale_inv", (64, 64)))
    if not has_files:
        (small / "model.safetensors").unlink()
    files = open_checkpoint(small)
    for load_format in ("auto", "dummy"):
        options = EngineConfig(model=str(small), quantization=wanted, load_format=load_format)
        found = choose_scales(options, ModelConfig.from_hf(files.config), files, True)
        assert found == (None if wanted == "auto" else Scales(0, quantises=True, experts=True))


INTS = IntegerForm(4, 64, experts=ExpertIntegers((4, 64), (4, 64)))


@pytest.mark.parametrize(
    ("form", "size", "ranks", "said"),
    [
        (Scales(128, experts=True), 768, Parallel(0, 2), ""),
        (Scales(0, experts=True), 768, Parallel(0, 4), ""),
        (Scales(128, experts=True), 768, Parallel(0, 4), "4 ranks cut blocks of 128 .* size of 768; .*: [1, 2, 3, 6]"),
        (Scales(128, experts=True), 136, Parallel(0, 2), "2 ranks cut blocks of 128 .* size of 136; .*: [1]"),
        (Scales(128, experts=True), 136, Parallel(0, 2, expert_size=2), ""),
        (INTS, 96, Parallel(0, 3), ""),
        (INTS, 96, Parallel(0, 2), "2 ranks cut an intermediate size of 96 within 32 inputs; .*: [1, 3]"),
        (INTS, 32, Parallel(0, 4, expert_size=2), "2 ranks cut .* size of 32 within 32 inputs; .*: [1]"),
        (INTS, 96, Parallel(0, 2, expert_size=2), ""),
    ],
)
def test_why_experts_are_expanded_is_logged(
    form: Any, size: int, ranks: Parallel, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With the numbers of ranks that keep them; one always does."""
    hf = {"architectures": ["MixtralForCausalLM"], "hidden_size": 256, "intermediate_size": size, "vocab_size": 64}
    hf |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    with caplog.at_level(logging.INFO, logger="nanovllm"):
        report_experts(form, ModelConfig.from_hf(hf), ranks)
    expected = said.replace("[", r"\[").replace("]", r"\]$")
    assert re.search(f"experts are expanded: {expected}", caplog.text.strip()) if said else not caplog.records
