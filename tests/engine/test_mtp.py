"""The model's own layer for multi-token prediction guesses: the answer is that without guesses, and each guess is what
the formulas give over the whole text (tests/mtp_models.py), whatever steps the text came from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from nanovllm import LLM
from nanovllm.errors import ConfigError, ModelError
from tests.drafting import always
from tests.engine.test_draft_model import counts, right
from tests.engine.test_speculation import REQUESTS, answers, near, params_of
from tests.mtp_models import MtpReference, add_knowing_layer, add_mtp_layer
from tests.tiny_models import TinyModel, edit_config
from tests.weights.test_fp8 import BLOCK, KEPT, expanded, quantise

MakeLLM = Callable[..., LLM]
MTP3 = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}


@pytest.fixture(scope="module")
def v3(tiny: Callable[[str], TinyModel]) -> TinyModel:
    return tiny("deepseek-v3")


@pytest.fixture(scope="module")
def folder(v3: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mtp") / "model"
    add_mtp_layer(v3.path, path)
    return path


@pytest.fixture(scope="module")
def knowing(v3: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("knowing") / "model"
    add_knowing_layer(v3.path, path)
    return path


def recorded(llm: LLM) -> list[tuple[list[int], list[int]]]:
    """(text, guesses at what follows it) of every step from now on."""
    drafter = llm.engine.executor.runner.drafter  # type: ignore[attr-defined]
    propose, found = drafter.propose_all, list[tuple[list[int], list[int]]]()

    def watched(batch: Any, entries: Any, most: int) -> list[np.ndarray]:
        texts = [batch.tokens(entry.seq_id).tolist() for entry in entries]
        guesses: list[np.ndarray] = propose(batch, entries, most)
        found.extend(zip(texts, (draft.tolist() for draft in guesses)))
        return guesses

    drafter.propose_all = watched
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"decode_steps": 3},
        {"num_kvcache_blocks": 9, "kvcache_block_size": 16},  # sequences are preempted
        {"enable_prefix_caching": False, "max_num_batched_tokens": 16},  # prompts in chunks
        {"max_model_len": 40},
        {"quantization": "int8"},
    ],
    ids=lambda options: "-".join(map(str, options)) or "defaults",
)
def test_the_output_is_that_without_drafts(
    make_llm: MakeLLM, v3: TinyModel, folder: Path, knowing: Path, options: dict[str, Any]
) -> None:
    prompts = [v3.prompts[i % len(v3.prompts)][:20] for i in range(len(REQUESTS))]
    params = [params_of(fields) for fields in REQUESTS.values()]
    for path in (folder, knowing):
        wanted = answers(make_llm(path, **options), prompts, params)
        llm = make_llm(path, **options, **MTP3)
        always(llm, 3, 1, 0, 2)
        near(answers(llm, prompts, params), wanted)
        near(answers(llm, prompts, params), wanted)  # with what is in the prefix cache now
        assert llm.engine.scheduler.blocks.num_used == 0
        if path is knowing:
            # Not all: a guess is drawn by a product of other rows, and its last digit may tip a tie.
            assert right(llm) > 0.95
        else:
            assert right(llm) < 0.5


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"decode_steps": 4},
        {"max_num_batched_tokens": 16},  # prompts in chunks, beside decodes
        {"num_kvcache_blocks": 5, "kvcache_block_size": 16},  # preempted, and read again
        {"num_speculative_tokens": 1},
        {"num_speculative_tokens": 6},
    ],
    ids=lambda options: "-".join(map(str, options)) or "defaults",
)
def test_every_guess_is_that_of_the_formulas(
    make_llm: MakeLLM, v3: TinyModel, folder: Path, options: dict[str, Any]
) -> None:
    options = {**options}
    most = options.pop("num_speculative_tokens", 3)
    how = {"method": "mtp", "num_speculative_tokens": most}
    llm = make_llm(folder, enable_prefix_caching=False, speculative_config=how, **options)
    always(llm, most, 0, 1)
    found = recorded(llm)
    prompts = [v3.prompts[i][:40] for i in (0, 1, 2, 4, 9)]
    params = [params_of({"temperature": 0, "max_tokens": 20 + 3 * i}) for i in range(len(prompts))]
    answers(llm, prompts, params)
    if "num_kvcache_blocks" in options:
        assert llm.engine.scheduler.num_preemptions > 0
    reference = MtpReference(v3, folder)
    assert len(found) > 30
    assert max(len(guesses) for _, guesses in found) == most
    for text, guesses in found:
        reference.check(text, guesses)


def test_guesses_after_right_ones(make_llm: MakeLLM, v3: TinyModel, folder: Path) -> None:
    """Steps that keep several tokens, so that the next begins behind them: a layer that knows nothing is right now and
    then where there are only two tokens to choose from."""
    llm = make_llm(folder, enable_prefix_caching=False, **MTP3)
    always(llm, 3)
    found = recorded(llm)
    allowed = [21, 22]
    params = [params_of({"temperature": 0, "seed": i, "allowed_token_ids": allowed}) for i in range(5)]
    answers(llm, [prompt[:20] for prompt in v3.prompts[3:8]], params)
    drafted, accepted = counts(llm)
    assert 0.1 < accepted / drafted < 0.95
    reference = MtpReference(v3, folder)
    for text, guesses in found:
        reference.check(text, guesses, allowed)


def test_cached_prefixes_change_no_answer(make_llm: MakeLLM, v3: TinyModel, knowing: Path) -> None:
    prompt = (v3.prompts[3] * 20)[:70]
    params = [params_of({"temperature": 0, "max_tokens": 20})]
    wanted = answers(make_llm(knowing, kvcache_block_size=16), [prompt], params)
    llm = make_llm(knowing, kvcache_block_size=16, **MTP3)
    always(llm, 3)
    for _ in range(2):
        got = answers(llm, [prompt], params)
        near(got, wanted)
    assert got[0].num_cached_tokens >= 64
    drafted, accepted = counts(llm)
    assert accepted == drafted > 0


def test_several_ranks_guess_alike(make_llm: MakeLLM, v3: TinyModel, folder: Path) -> None:
    params = [params_of(REQUESTS[name]) for name in ("greedy", "seeded", "penalties")]
    prompts = [prompt[:20] for prompt in v3.prompts[3:6]]
    wanted = answers(make_llm(folder), prompts, params)
    llm = make_llm(folder, tensor_parallel_size=2, enable_prefix_caching=False, **MTP3)
    always(llm, 3)
    found = recorded(llm)
    near(answers(llm, prompts, params), wanted)
    reference = MtpReference(v3, folder)
    greedy = [(text, guesses) for text, guesses in found if text[: len(prompts[0])] == prompts[0]]
    assert greedy
    for text, guesses in greedy:
        reference.check(text, guesses)


def test_a_layer_in_8_bits(make_llm: MakeLLM, v3: TinyModel, tmp_path: Path) -> None:
    """As V3 is published: all its matrices, eh_proj too, in 8-bit floats with scales of blocks."""
    exact, small = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, weight in add_mtp_layer(v3.path, tmp_path / "exact").items():
        exact[name] = small[name] = weight
        if weight.dim() == 2 and not any(word in name for word in (*KEPT, "shared_head")):
            small[name], small[f"{name}_scale_inv"] = quantise(weight)
            exact[name] = expanded(small[name], small[f"{name}_scale_inv"])
    add_mtp_layer(v3.path, tmp_path / "small")
    form = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
    edit_config(tmp_path / "small", quantization_config=form)
    guesses = []
    for name, weights in (("exact", exact), ("small", small)):
        save_file(weights, tmp_path / name / "model.safetensors")
        llm = make_llm(tmp_path / name, **MTP3)
        always(llm, 3)
        guesses.append(recorded(llm))
        answers(llm, [v3.prompts[5]], [params_of({"temperature": 0})])
    assert guesses[0] == guesses[1] != []


def test_dummy_weights(make_llm: MakeLLM, folder: Path) -> None:
    llm = make_llm(folder, load_format="dummy", **MTP3)
    always(llm, 3)
    assert len(answers(llm, [[5, 6, 7]], [params_of({"temperature": 0})])[0].outputs[0].token_ids) == 24
    assert counts(llm)[0] > 0


def test_what_it_says(make_llm: MakeLLM, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "nanovllm"):
        alone = make_llm(folder, num_kvcache_blocks=12)
        assert "(MTP) after the last are not used" in caplog.text
        caplog.clear()
        llm = make_llm(folder, num_kvcache_blocks=12, speculative_config={"method": "deepseek_mtp"})
        assert "MTP" not in caplog.text
    facts, without = llm.engine.describe(), alone.engine.describe()
    assert (facts["speculative_method"], facts["num_speculative_tokens"]) == ("mtp", 1)
    assert "prompt_lookup" not in facts
    assert facts["runs_on"]["kv_bytes"] * 3 == without["runs_on"]["kv_bytes"] * 4  # three layers and one more
    assert facts["runs_on"]["weight_bytes"] > without["runs_on"]["weight_bytes"]


def test_models_without_the_layer_are_refused(
    make_llm: MakeLLM, v3: TinyModel, folder: Path, tmp_path: Path, tiny: Callable[[str], TinyModel]
) -> None:
    for name in ("qwen3", "deepseek-v2-lite"):
        with pytest.raises(ConfigError, match=r"has no layer for multi-token prediction .* 'draft_model'"):
            make_llm(tiny(name).path, **MTP3)
    with pytest.raises(ConfigError, match=r"has no model\.layers\.3\.eh_proj\.weight: .* take the published files"):
        make_llm(v3.path, **MTP3)
    weights = add_mtp_layer(v3.path, tmp_path / "none")
    edit_config(tmp_path / "none", num_nextn_predict_layers=0)
    with pytest.raises(ConfigError, match="has no layer for multi-token prediction"):
        make_llm(tmp_path / "none", **MTP3)
    add_mtp_layer(v3.path, tmp_path / "part")
    del weights["model.layers.3.hnorm.weight"]
    save_file(weights, tmp_path / "part" / "model.safetensors")
    with pytest.raises(ModelError, match=r"1 not found in the checkpoint: mtp\.hnorm\.weight"):
        make_llm(tmp_path / "part", **MTP3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"speculative_config": {"method": "mtp", "model": "x"}}, "give both or neither"),
        ({"speculative_config": {"method": "mtp", "num_speculative_tokens": 0}}, r"in \[1, 16\]; 1 is a good start"),
        ({"speculative_config": {"method": "mtp", "num_speculative_tokens": 17}}, r"in \[1, 16\]"),
        ({**MTP3, "expert_placement": "offload", "expert_cache_gb": 1e-3}, "experts are offloaded"),
    ],
)
def test_bad_options_are_refused(make_llm: MakeLLM, folder: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_llm(folder, **options)
