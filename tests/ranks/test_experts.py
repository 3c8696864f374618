"""Mixture-of-experts models on several ranks give the tokens of one rank, wherever the experts are and however they are
divided; each rank reads its own part of the files and no other.

Every case compares tokens, so no rank may build another architecture. What ranks decide by is agreed, and what they
sample from is the same (`agree`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.attention.base import attention_specs
from nanovllm.attention.sdpa import SdpaBackend
from nanovllm.attention.select import select_backend
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.hardware.device import Device
from nanovllm.hardware.parallel import Parallel
from nanovllm.layers.build import Build
from nanovllm.memory.budget import GIB, DoesNotFit, Memory, Wants, size_tiers
from nanovllm.memory.facts import ModelFacts
from nanovllm.model_config import ModelConfig
from nanovllm.models.registry import find_family
from nanovllm.models.transformer import Parts
from nanovllm.moe.load import ExpertLoad
from nanovllm.moe.rebalance import BESIDE, Balancer, add_places
from nanovllm.ops.opset import PLAIN
from nanovllm.runner.expert_memory import check_expert_ranks
from nanovllm.runner.kv_cache import block_bytes
from nanovllm.weights.checkpoint import open_checkpoint
from tests.lowrank.svd_folders import Choice, copy_model, write_svd
from tests.moe.experts8 import FILES4, MODELS4
from tests.ranks.group import RankGroup
from tests.ranks.rank import greedy
from tests.tiny_models import TinyModel, random_prompts
from tests.weights.quantised_samples import write_folders

Tiny = Callable[[str], TinyModel]
Ranks = Callable[[int], RankGroup]
# The first prompts also one by one: one token in a step is fewer than there are ranks.
NUM_ALONE, NUM_TOKENS = 2, 6


def ask(model: TinyModel) -> dict[str, Any]:
    prompts = model.prompts
    batches = [prompts, *([prompt] for prompt in prompts[:NUM_ALONE])]
    return {"do": "greedy", "path": str(model.path), "batches": batches, "num_tokens": NUM_TOKENS}


def wanted(model: TinyModel) -> list[list[int]]:
    """By transformers, on no ranks at all."""
    tokens = [found[:NUM_TOKENS] for found in model.tokens]
    return tokens + tokens[:NUM_ALONE]


def agree(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks say."""
    assert all("error" not in rank for rank in found), found
    for name in ("tokens", "describe", "load", "moved"):
        assert all(rank[name] == found[0][name] for rank in found)
    if found[0]["stats"] is not None:  # on a CPU nothing is guessed, so all miss, keep and copy alike
        assert all(rank["stats"] == found[0]["stats"] for rank in found)
    return found[0]


def share_bytes(model: TinyModel, num_ranks: int) -> int:
    """Of one rank's share of an expert, in fp32."""
    config = ModelConfig.from_hf(open_checkpoint(model.path).config)
    assert config.moe is not None
    return 3 * config.hidden_size * config.moe.intermediate_size // num_ranks * 4


# ---- tensor parallelism: every rank has a share of every expert ------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("mixtral", 2),
        ("mixtral", 4),
        ("mixtral-top1", 2),
        ("mixtral-window-sharded", 4),
        ("qwen3-moe", 4),
        ("qwen3-moe-dense-layers", 2),
        ("qwen3-moe-every-second", 4),
    ],
)
def test_resident_experts(tiny: Tiny, ranks: Ranks, name: str, size: int) -> None:
    model = tiny(name)
    found = ranks(size).do(options={}, **ask(model))
    assert agree(found)["tokens"] == wanted(model)
    whole = greedy({**ask(model), "options": {}, "batches": []}, Parallel())
    for rank in found:
        assert rank["num_read"] < (0.75 if size == 2 else 0.55) * whole["num_read"], "a rank reads its own share"
        assert rank["num_parameters"] < 0.75 * whole["num_parameters"]


# name -> (slots, experts in host memory, other options); mixtral has 2 layers of 8 experts and top_k 2
TIERS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "memory": (6, 16, {}),
    "disk": (6, 0, {}),
    "mixed": (7, 5, {"expert_policy": "lru"}),
    "exclusive": (7, 13, {}),  # three of them cached: 16 in all
    "least": (2, 16, {"expert_prefetch": False}),
    "cpu": (5, 16, {"expert_cpu_misses": True}),
}


@pytest.mark.parametrize(
    ("tier", "size"),
    [
        ("memory", 2),
        ("disk", 2),
        ("exclusive", 2),
        ("cpu", 2),
        ("mixed", 4),
        ("least", 4),
    ],
)
def test_offloaded_experts(tiny: Tiny, ranks: Ranks, tier: str, size: int) -> None:
    """Every rank has as many expert buffers."""
    model, (slots, in_host, more) = tiny("mixtral"), TIERS[tier]
    expert = share_bytes(model, size)
    room = {"expert_cache_gb": slots + 0.5, "expert_host_gb": in_host + 0.5}
    options = {**{name: count * expert / GIB for name, count in room.items()}, **more}
    found = ranks(size).do(options=options, **ask(model))
    said = agree(found)
    assert said["tokens"] == wanted(model)
    experts = said["describe"]
    assert experts["placement"] == "offload"
    assert experts["cached_slots"] + experts["streaming_slots"] == slots < 8
    kept = min(experts["cached_slots"], 16 - in_host)
    assert (experts["in_host_memory"], experts["on_disk"]) == (in_host, 16 - in_host - kept)
    assert experts["expert_bytes"] == expert
    hits, misses, on_cpu, copied = said["stats"]
    assert misses > 16
    assert (on_cpu > 0) == (tier == "cpu")
    assert copied == (misses - on_cpu) * expert, "a miss moves a share and no more"
    assert hits > 0 or tier == "least"
    if tier == "disk":  # a miss reads its share of the file: half of the rows, half of each column
        assert found[0]["bytes_later"] == copied
        whole = greedy({**ask(model), "options": {}, "batches": []}, Parallel())
        assert all(rank["num_read"] < 0.75 * whole["num_read"] - 16 * 3 * 48 * 80 / 2 for rank in found)


def test_ranks_that_find_unequal_memory_take_the_least(ranks: Ranks) -> None:
    """`least` is what they agree by."""
    assert [answer["numbers"] for answer in ranks(2).do(do="numbers", number=7)] == [[7, 8]] * 2
    assert [answer["least"] for answer in ranks(2).do(do="numbers", number=7)] == [7, 7]
    assert [answer["neighbours"] for answer in ranks(4).do(do="numbers", number=1)] == [4] * 4


# ---- low-rank experts ------------------------------------------------------------------------------------------------

CHOICES = {
    "qwen": [Choice(17, 30, 20, "input"), Choice(25, 11, 13, "output")],  # 3 layers, the second one dense
    "mixtral": [Choice(20, 21, 9), Choice(31, 50, 12, "input")],
    "deepseek": [Choice(20, 21, 9), Choice(17, 30, 20, "input")],  # a shared MLP beside them
}
SOURCES = {"qwen": "qwen3-moe-dense-layers", "mixtral": "mixtral", "deepseek": "deepseek-v3"}


@pytest.fixture(scope="module")
def low_rank(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    built: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in built:
            built[name] = copy_model(tiny(SOURCES[name]).path, tmp_path_factory.mktemp("low-rank") / name)
            write_svd(built[name], CHOICES[name])
        return built[name]

    return get


LOW_RANK: dict[str, dict[str, Any]] = {
    "resident": {},
    "memory": {"expert_cache_gb": 5e-5, "expert_host_gb": 1.0},
    "disk": {"expert_cache_gb": 5e-5, "expert_host_gb": 0.0},
    "spread": {"expert_parallel_size": 2},
}


@pytest.mark.parametrize(
    ("name", "size", "place"),
    [
        ("qwen", 2, "resident"),
        ("mixtral", 4, "resident"),
        ("deepseek", 2, "resident"),
        ("deepseek", 2, "spread"),
        ("mixtral", 2, "memory"),
        ("qwen", 4, "memory"),
        ("qwen", 2, "disk"),
        ("mixtral", 2, "spread"),
        ("qwen", 4, "spread"),
    ],
)
def test_low_rank_experts(low_rank: Callable[[str], Path], ranks: Ranks, name: str, size: int, place: str) -> None:
    prompts = random_prompts((1, 2, 16, 33))
    job = {"do": "greedy", "path": str(low_rank(name)), "batches": [prompts, prompts[:1]], "num_tokens": NUM_TOKENS}
    alone = greedy({**job, "options": {}}, Parallel())
    said = agree(found := ranks(size).do(options=LOW_RANK[place], **job))
    assert said["tokens"] == alone["tokens"]
    assert said["describe"]["format"] == "low-rank"
    if place == "resident":  # V [r, d] is cut where it has the intermediate size: w2 on the input side is whole
        limit = 0.75 if size == 2 else 0.6
        assert all(rank["bytes_at_start"] < limit * alone["bytes_at_start"] for rank in found)
    if place in ("memory", "disk"):
        assert said["describe"]["placement"] == "offload"
        assert said["stats"][1] > 10
    assert (said["bytes_later"] > 0) == (place == "disk")


@pytest.mark.parametrize("name", ["dense", "dense deepseek", "mixtral", "qwen", "deepseek"])
def test_decodes_in_pieces(tiny: Tiny, low_rank: Callable[[str], Path], ranks: Ranks, name: str) -> None:
    """As on a GPU (runner/relay.py): the sum over the ranks is in the piece that follows the experts."""
    dense = {"dense": "mixtral", "dense deepseek": "deepseek-v3"}
    path = tiny(dense[name]).path if name in dense else low_rank(name)
    prompts = random_prompts((1, 5, 16, 33))
    job = {"do": "greedy", "path": str(path), "batches": [prompts, prompts[:1]], "num_tokens": NUM_TOKENS}
    alone = greedy({**job, "options": {}}, Parallel())
    options = {"expert_cache_gb": 1.5e-4, "expert_host_gb": 1.0}
    said = agree(ranks(2).do(options=options, in_pieces=True, **job))
    assert said["tokens"] == alone["tokens"]
    assert said["stats"][0] > 0


# ---- expert parallelism: whole experts are spread over ranks, tokens travel ------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "groups"),
    [("mixtral", 2, 2), ("mixtral", 4, 4), ("mixtral", 4, 2), ("qwen3-moe-dense-layers", 2, 2), ("qwen3-moe", 4, 2)],
)
def test_spread_experts_with_tensor_parallel_attention(
    tiny: Tiny, ranks: Ranks, name: str, size: int, groups: int
) -> None:
    model = tiny(name)
    found = ranks(size).do(options={"expert_parallel_size": groups}, **ask(model))
    assert agree(found)["tokens"] == wanted(model)
    assert found[0]["describe"] == {"placement": "resident", "spread_over": groups}
    moe = ModelConfig.from_hf(open_checkpoint(model.path).config).moe
    assert moe is not None
    each = moe.num_experts // groups
    for number, rank in enumerate(found):
        first = number // (size // groups) * each
        assert rank["experts_read"] == list(range(first, first + each)), "a rank reads its own experts alone"


SPREAD = {  # ids [tokens, choices] of 8 experts
    "one token": [[6, 1]],
    "fewer tokens than ranks": [[7, 0], [0, 7], [3, 4]],
    "as many as ranks": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "one more": [[0, 1], [2, 3], [4, 5], [6, 7], [1, 6]],
    "one expert takes all": [[5]] * 9,
    "the last rank gets none": [[0, 2], [1, 3], [2, 0], [3, 1], [0, 1], [1, 2]],
    "many": [[(3 * i) % 8, (3 * i + 1 + i % 5) % 8, (3 * i + 7) % 8] for i in range(37)],
}


@pytest.mark.parametrize("case", SPREAD)
def test_spread_experts_give_what_whole_ones_do(ranks: Ranks, case: str) -> None:
    """Experts without a token, ranks without a token or without a row, slices of unequal length."""
    for size, groups in ((2, 2), (4, 2), (4, 4)):
        for dtype, limit in (("float32", 2e-6), ("bfloat16", 2e-2)):
            found = ranks(size).do(do="spread", expert_size=groups, ids=SPREAD[case], dtype=dtype)
            assert all(rank["difference"] < limit for rank in found), (size, groups, dtype, found)
            assert len({rank["sum"] for rank in found}) == 1, "all ranks go on from the same numbers"


# ---- experts that move between ranks -----------------------------------------------------------------------------

EPLB = {"enable_eplb": True, "eplb_window_size": 3, "eplb_step_interval": 2}  # a pass every few tokens


@pytest.mark.parametrize(
    ("name", "size", "groups", "redundant"),
    [("mixtral", 2, 2, 2), ("mixtral", 4, 4, 4), ("mixtral", 4, 2, 8), ("mixtral", 2, 2, 0), ("qwen3-moe", 4, 2, 2)],
)
def test_experts_that_move_in_the_middle_of_a_text_change_no_token(
    tiny: Tiny, ranks: Ranks, name: str, size: int, groups: int, redundant: int
) -> None:
    model = tiny(name)
    options = {"expert_parallel_size": groups, "num_redundant_experts": redundant, **EPLB}
    said = agree(ranks(size).do(options=options, **ask(model)))
    assert said["tokens"] == wanted(model)
    assert said["describe"]["redundant"] == redundant
    assert said["moved"] > 4
    assert min(map(sum, said["load"])) > 0, "and all ranks have counted the same (`agree`)"


def test_low_rank_experts_move_too(low_rank: Callable[[str], Path], ranks: Ranks) -> None:
    prompts = random_prompts((1, 2, 16, 33))
    job = {"do": "greedy", "path": str(low_rank("qwen")), "batches": [prompts], "num_tokens": NUM_TOKENS}
    alone = greedy({**job, "options": {}}, Parallel())
    options = {"expert_parallel_size": 2, "num_redundant_experts": 4, **EPLB}
    said = agree(ranks(2).do(options=options, **job))
    assert said["tokens"] == alone["tokens"]
    assert said["moved"] > 0


@pytest.mark.parametrize(("quantization", "form"), [("auto", "int4-32"), ("int8", "int8-32"), ("fp8", "FP8")])
def test_experts_in_fewer_bits_move_too(tmp_path: Path, ranks: Ranks, quantization: str, form: str) -> None:
    """Those of an AWQ file, and those of 16 bits that are quantised while they are loaded."""
    awq, plain = write_folders(tmp_path, *MODELS4["mixtral"], FILES4["awq"])
    path, prompts = awq if quantization == "auto" else plain, random_prompts((1, 2, 16, 33))
    job = {"do": "greedy", "path": str(path), "batches": [prompts], "num_tokens": NUM_TOKENS, "as_on_a_gpu": True}
    options = {"attn_backend": "sdpa", "quantization": quantization, "expert_parallel_size": 2}
    resting = agree(ranks(2).do(options=options, **job))
    said = agree(ranks(2).do(options={**options, "num_redundant_experts": 2, **EPLB}, **job))
    assert form in said["quantization"]
    assert said["tokens"] == resting["tokens"]
    assert said["moved"] > 0


@pytest.mark.parametrize("scaled", [False, True], ids=["numbers", "8-bit floats"])
@pytest.mark.parametrize(("size", "groups", "redundant"), [(2, 2, 2), (4, 4, 8), (4, 2, 4), (4, 4, 0)])
def test_every_place_has_the_weights_of_its_expert(
    ranks: Ranks, size: int, groups: int, redundant: int, scaled: bool
) -> None:
    found = ranks(size).do(do="move", expert_size=groups, num_redundant=redundant, scaled=scaled)
    assert [rank["wrong"] for rank in found] == [[]] * size
    assert all(rank["tables"] == found[0]["tables"] for rank in found)
    assert found[0]["moved"] > 10


@pytest.mark.parametrize("late", [0, 1])
def test_launches_beside_an_exchange_do_not_wait_for_it(ranks: Ranks, late: int) -> None:
    """If one waited, the ranks would wait for each other until the test fails."""
    found = ranks(2).do(do="beside", late=late)
    assert [rank["wrong"] for rank in found] == [[], []]
    first, *others = found[0]["tables"][::2]  # of layer 0, at each launch
    assert others[:-1] == [first] * BESIDE
    assert others[-1] != first
    assert found[1]["tables"] == found[0]["tables"]


# ---- through the engine ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "name"),
    [
        ("spread", "mixtral"),
        ("spread", "deepseek-v3"),
        ("balanced", "mixtral"),
        ("balanced", "deepseek-v3"),
        ("low-rank", "mixtral"),
    ],
)
def test_options_of_the_engine(
    tiny: Tiny, low_rank: Callable[[str], Path], make_llm: Callable[..., LLM], way: str, name: str
) -> None:
    """LLM(..., tensor_parallel_size=2, ...): the rest of this file asks ranks directly, which is faster."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    model = tiny(name)
    path, options = model.path, {"expert_parallel_size": 2}
    if way == "low-rank":
        path, options = low_rank(name), LOW_RANK["disk"]
    if way == "balanced":  # in vLLM's words
        settings = {"window_size": 3, "step_interval": 2, "num_redundant_experts": 4}
        options |= {"enable_eplb": True, "eplb_config": settings}
    alone, several = make_llm(path), make_llm(path, tensor_parallel_size=2, **options)
    for llm in (alone, several):
        llm.engine.executor.expert_load()  # counted on rank 0 alone, unless experts move
    found = [
        [output.outputs[0].token_ids for output in llm.generate(model.prompts, params, use_tqdm=False)]
        for llm in (alone, several)
    ]
    assert several.engine.executor.expert_load() == alone.engine.executor.expert_load()
    assert found[1] == found[0]
    stats = several.engine.executor.expert_stats()
    assert (stats is None) == (way != "low-rank")
    if way == "balanced":
        assert several.engine.executor.balancer.num_moved > 4


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "groups"), [(2, 1), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize(
    "name", ["mixtral", "mixtral-window-sharded", "qwen3-moe-dense-layers", "llama-mqa-bias", "deepseek-v3"]
)
def test_bytes_that_are_planned_are_those_of_a_rank_as_built(tiny: Tiny, name: str, size: int, groups: int) -> None:
    """Tied heads, padded vocabularies, KV heads that ranks share, biases that every rank has, dense layers between."""
    config = ModelConfig.from_hf(open_checkpoint(tiny(name).path).config)
    if groups > 1 and (config.moe is None or config.moe.num_experts % groups):
        pytest.skip("refused")
    for rank in (0, size - 1):
        build = Build(torch.float32, torch.device("meta"), PLAIN, Parallel(rank, size, expert_size=groups))
        specs = attention_specs(config, torch.float32, build.parallel)
        backend = select_backend("auto", specs, Device.choose("cpu"), 16).backend
        built = find_family(config)(config, Parts(build, backend, 64))
        facts = ModelFacts(config, 4, num_ranks=size, expert_size=groups)
        num = sum(parameter.numel() for parameter in built.parameters())
        assert facts.dense_bytes + facts.all_experts_bytes == 4 * num
        assert facts.kv_bytes_per_token == block_bytes(built.specs, 1)


@pytest.mark.parametrize("redundant", [0, 4])
def test_redundant_experts_and_the_spare_buffer_are_planned(tiny: Tiny, redundant: int) -> None:
    config = ModelConfig.from_hf(open_checkpoint(tiny("mixtral").path).config)
    parallel = Parallel(1, 4, expert_size=2)
    build = Build(torch.float32, torch.device("meta"), PLAIN, parallel)
    built = find_family(config)(config, Parts(build, SdpaBackend(), 64))
    experts = [layer.mlp.experts for layer in built.layers]
    for layer in experts:
        add_places(layer, 8, redundant)
    load = ExpertLoad(len(experts), 8, torch.device("meta"), window_size=1)
    facts = ModelFacts(config, 4, num_ranks=4, expert_size=2, num_redundant=redundant)
    spare = Balancer(experts, load, parallel, 1)._spare.numel()
    assert facts.dense_bytes + facts.all_experts_bytes == 4 * sum(p.numel() for p in built.parameters()) + spare
    assert facts.num_experts == 2 * (8 + redundant) // 2


def test_spread_experts_that_do_not_fit_are_not_offloaded() -> None:
    """Two ranks: cut experts are offloaded on a card where spread ones are refused, in words that lead there."""
    path = Path(__file__).resolve().parents[1] / "fixtures/tiny-mixtral"
    config = ModelConfig.from_hf(open_checkpoint(path).config)
    memory, wants = Memory(6 << 20, 64 * GIB, 1.0, context_bytes=0), Wants(160, 128, 4, reserve_bytes=0)
    cut, spread = (ModelFacts(config, 4, num_ranks=2, expert_size=groups) for groups in (1, 2))
    assert cut.all_experts_bytes == spread.all_experts_bytes
    assert (cut.num_experts, spread.num_experts) == (32, 16)
    assert size_tiers(memory, cut, wants).placement == "offload"
    message = r"^expert_parallel_size=2: .* 16 experts .*; tensor_parallel_size=2 without it can offload$"
    with pytest.raises(DoesNotFit, match=message):
        size_tiers(memory, spread, replace(wants, placement="resident"))


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_parallel_size": 3}, r"expert_parallel_size=3: must divide tensor_parallel_size=4, .*: \[1, 2, 4\]"),
        ({"expert_parallel_size": 8}, r"expert_parallel_size=8: must divide tensor_parallel_size=4"),
        ({"enable_eplb": True}, r"enable_eplb=True: every rank has a share of each expert"),
        ({"expert_parallel_size": 2, "num_redundant_experts": 2}, r"num_redundant_experts=2: .* set enable_eplb=True"),
        (
            {"expert_parallel_size": 4, "enable_eplb": True, "num_redundant_experts": 6},
            r"num_redundant_experts=6: must be a multiple of expert_parallel_size=4, .*; possible: 4, 8",
        ),
        ({"eplb_window_size": 0}, r"eplb_window_size=0: must be an integer in"),
        ({"enable_eplb": "yes", "expert_parallel_size": 2}, r"enable_eplb='yes': must be True or False"),
        ({"expert_parallel_size": 0}, r"expert_parallel_size=0: must be an integer"),
        ({"expert_parallel_size": 2, "expert_placement": "offload"}, r"expert_parallel_size=2: .* stay on them; leave"),
        ({"expert_parallel_size": 4, "expert_cache_gb": 0.1}, r"tensor_parallel_size=4 alone offloads a share"),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(tensor_parallel_size=4, **options)


def test_models_that_cannot_be_divided_are_refused_with_the_sizes_that_would(tiny: Tiny, ranks: Ranks) -> None:
    model = tiny("qwen3-moe")  # 6 experts
    errors = [answer["error"] for answer in ranks(4).do(options={"expert_parallel_size": 4}, **ask(model))]
    refusal = "size=4: 6 experts in a layer do not divide; with tensor_parallel_size=4 possible: [1, 2]"
    assert all(refusal in error for error in errors)
    dense = ModelConfig.from_hf(open_checkpoint(tiny("qwen2").path).config)
    with pytest.raises(ConfigError, match=r"expert_parallel_size=2: Qwen2ForCausalLM has no experts to spread"):
        check_expert_ranks(dense, Parallel(0, 2, expert_size=2))
