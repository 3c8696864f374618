"""`bench moe` on a CPU: the ablation table, exact slots, the bound, made-up routing, and what is refused at once."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm.bench import moe as lab
from nanovllm.bench import moe_kernels, report
from nanovllm.config import EngineConfig
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import ConfigError
from nanovllm.moe.layer import MoeLayer
from nanovllm.moe.offload.cache import ExpertStats
from nanovllm.ops.triton import moe_tiles
from nanovllm.ranks.local import LocalExecutor
from tests.cli.runner import SMALL, Result, Run

TINY = Path(__file__).resolve().parents[1] / "fixtures/tiny-mixtral"  # 4 layers, 8 experts, top 2
EXPERT_BYTES = 3 * 128 * 256 * 4
VARIANTS = ["none", "lru", "lfu", "lfu + prefetch"]
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture
def bench(run: Run) -> Any:
    def start(*options: Any, model: Path = TINY) -> Result:
        sizes = ("--tokens", 6, "--input-len", 9, "--parts", "offload")
        return run("bench", "moe", "--model", model, *SMALL, *sizes, *options)

    return start


@pytest.fixture
def dummy(tmp_path: Path) -> EngineConfig:
    """Two layers, the first of them dense, no weights: a Qwen3-MoE with 6 experts, of which a token takes 3."""
    facts = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 500, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "num_experts": 6,
        "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True, "mlp_only_layers": [0],
        "dtype": "bfloat16", "eos_token_id": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(facts))
    return EngineConfig(model=str(tmp_path), device="cpu", load_format="dummy", num_kvcache_blocks=32)


@pytest.fixture
def dummy_mixtral() -> EngineConfig:
    return EngineConfig(model=str(TINY), device="cpu", load_format="dummy", num_kvcache_blocks=32)


def cells(result: Result) -> list[list[str]]:
    return [[c.strip() for c in line.strip("│").split("│")] for line in result.out.splitlines() if line.startswith("│")]


# ---- the table -----------------------------------------------------------------------------------------------------


def test_ablation_of_real_weights(bench: Any) -> None:
    result = bench("--cached", "8,2,0,2")
    assert result.code == 0, result.err
    made = result.last_json
    rows = made["results"]["offload"]
    assert [(row["cached"], row["variant"]) for row in rows] == [(n, v) for n in (0, 2, 8) for v in VARIANTS]
    assert [row[:2] for row in cells(result)] == [[f"{row['cached']} of 8", row["variant"]] for row in rows]
    for row in rows:
        assert (row["cached_slots"], row["streaming_slots"], row["on_disk"]) == (4 * row["cached"], 4, 0)
        assert row["tokens_per_second"] > 0
        # No link: no bound, and nobody waits for one.
        assert row["bound_tokens_per_second"] is row["share_of_bound"] is row["stall_share"] is None
        assert row["missed_bytes_per_token"] == pytest.approx((1 - row["hit_rate"]) * 4 * 2 * EXPERT_BYTES)
        assert row["copied_bytes_per_token"] == row["missed_bytes_per_token"]
        assert row["same_output"]
        assert 2 <= row["distinct_experts"] <= 8
    assert all(row[5:8] == ["-"] * 3 for row in cells(result))
    rates = {(row["cached"], row["variant"]): row["hit_rate"] for row in rows}
    for variant in VARIANTS[1:]:
        assert rates[0, variant] == rates[0, "none"]  # nowhere to keep anything
        assert rates[2, variant] > rates[2, "none"]
        assert rates[8, variant] > rates[2, variant]
    assert rates[2, "none"] <= min(rates[2, v] for v in VARIANTS)
    assert (made["benchmark"], made["model"], made["link_bytes_per_second"]) == ("moe", str(TINY), None)
    assert made["offload"] == {"cached": [0, 2, 8], "num_tokens": 6, "input_len": 9, "routing": "model"}
    assert made["hardware"]
    assert made["versions"]["torch"]


def test_fewer_layers_of_dummy_weights(bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The title and the JSON say so; a given bandwidth makes a bound; plotted are tok/s with bounds, then shares."""
    drawn: list[Any] = []
    monkeypatch.setattr(report, "check_plot", lambda _: None)
    monkeypatch.setattr(lab, "plot_lines", lambda *args, **more: drawn.append((*args, more)))
    options = ("--load-format", "dummy", "--num-layers", 2, "--bandwidth-gbs", "0.5", "--plot", tmp_path / "x.png")
    result = bench("--cached", "1,3", *options)
    assert result.code == 0, result.err
    assert "2 layers of the model's 4, routing spread, link 0.5 GB/s" in " ".join(result.out.split())
    made = result.last_json
    assert (made["num_layers"], made["num_layers_of_model"]) == (2, 4)
    assert made["model"] == made["engine"]["model"] == str(TINY)
    assert made["offload"]["routing"] == "spread"
    for row in made["results"]["offload"]:
        assert row["cached_slots"] == 2 * row["cached"]
        assert row["bound_tokens_per_second"] == pytest.approx(0.5e9 / row["missed_bytes_per_token"])
        assert row["share_of_bound"] == pytest.approx(row["tokens_per_second"] / row["bound_tokens_per_second"])
        assert 0 <= row["stall_share"] < 1
        assert row["same_output"]
    [(path, _, grid, more)] = drawn
    assert path == tmp_path / "x.png"
    speed, share = (next(iter(charts.values())) for charts in grid.values())
    assert list(speed) == VARIANTS + [f"{v}: bound" for v in VARIANTS]
    assert list(share) == VARIANTS
    assert all([x for x, _ in points] == [1, 3] for points in [*speed.values(), *share.values()])
    assert more == {"log_x": False, "dashed": {f"{v}: bound": v for v in VARIANTS}}


@pytest.mark.parametrize("cached", [0, 1, 5, 6])
def test_slots_are_exact(dummy: EngineConfig, cached: int) -> None:
    """Also where only one layer of two has experts and an expert is no round number of bytes."""
    for dtype in ("float32", "bfloat16"):
        config = replace(dummy, dtype=dtype)
        with LLMEngine(lab.offload_config(config, lab.read_model(config), cached, "lru")) as engine:
            assert lab.check_slots(engine, cached) == {"cached_slots": cached, "streaming_slots": 6, "on_disk": 0}


def test_one_engine_is_as_good_as_many(dummy_mixtral: EngineConfig) -> None:
    """A row of an engine that served other rows before is the row of one that was opened for it."""
    model = lab.read_model(dummy_mixtral)
    sweep = lab.CacheSweep.parse(dummy_mixtral, model, ("1,4", 20, 20), None)
    with lab.one_engine(dummy_mixtral, model, sweep) as engine_for:
        _, rows = lab.measure_offload(sweep, 0, None, engine_for)
    for row in rows:
        with LLMEngine(lab.offload_config(dummy_mixtral, model, row["cached"], row["variant"])) as engine:
            engine.executor.probe().spread_routing(dummy_mixtral.seed)
            fresh, _ = lab.measure_decode(engine, sweep, 0, None)
            opened = engine.executor.describe()["experts"]
        timed = ("tokens_per_second",)
        assert {k: row[k] for k in fresh if k not in timed} == {k: v for k, v in fresh.items() if k not in timed}
        assert (opened["policy"], opened["prefetch"]) == (row["policy"], row["prefetch"])
    assert len({row["hit_rate"] for row in rows}) > 3


def test_only_decode_is_measured(dummy_mixtral: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics of the tokens after the first; a prompt's experts are not among them, nor those of the warm-up."""
    model = lab.read_model(dummy_mixtral)
    sweep = lab.CacheSweep.parse(dummy_mixtral, model, ("0", 5, 20), None)
    calls: list[ExpertStats] = []
    run_one = lab.run_one

    def spy(*args: Any) -> Any:
        found = run_one(*args)
        calls.append(found[1])
        return found

    monkeypatch.setattr(lab, "run_one", spy)
    with LLMEngine(lab.offload_config(dummy_mixtral, model, 0, "none")) as engine:
        row, token_ids = lab.measure_decode(engine, sweep, 0, None)
    assert [(stats.tokens, stats.hits, stats.misses) for stats in calls] == [(5, 0, 5 * 4 * 2)] * 2
    assert len(token_ids) == 6
    assert row["missed_bytes_per_token"] == 4 * 2 * EXPERT_BYTES


def test_the_bound_counts_what_had_to_travel() -> None:
    """A right guess is a miss; an expert that the CPU computed did not travel."""
    stats = ExpertStats(
        hits=6,
        misses=4,
        computed_on_cpu=1,
        bytes_copied=70,
        prefetched_bytes_useful=30,
        prefetched_bytes_wasted=10,
        stall_seconds=0.5,
        tokens=2,
    )
    row = lab.rates(stats, num_tokens=2, seconds=1.0, expert_bytes=10, link=60.0)
    assert row["missed_bytes_per_token"] == 15
    assert (row["bound_tokens_per_second"], row["share_of_bound"], row["stall_share"]) == (4.0, 0.5, 0.5)
    assert (row["hit_rate"], row["prefetch_precision"], row["copied_bytes_per_token"]) == (0.6, 0.75, 35)
    nothing = lab.rates(replace(stats, misses=1), num_tokens=2, seconds=1.0, expert_bytes=10, link=60.0)
    assert nothing["bound_tokens_per_second"] is nothing["share_of_bound"] is None


# ---- made-up routing -----------------------------------------------------------------------------------------------


def choices(engine: LLMEngine, num_tokens: int) -> tuple[list[Counter[int]], float]:
    """(how often each layer chose each expert, share of experts that the next layer's gate foretold)."""
    layers = [module for module in engine.executor.runner.model.modules() if isinstance(module, MoeLayer)]
    counts: list[Counter[int]] = [Counter() for _ in layers]
    foretold: list[bool] = []
    guess: set[int] = set()

    def best(layer: MoeLayer, x: torch.Tensor) -> set[int]:
        return set(layer.gate(x).topk(2).indices[0].tolist())

    def watch(number: int, forward: Any) -> Any:
        def call(x: torch.Tensor) -> torch.Tensor:
            if len(x) == 1:
                chosen = best(layers[number], x)
                counts[number].update(chosen)
                foretold.extend(expert in guess for expert in chosen if number)
                guess.clear()
                guess.update(best(layers[number + 1], x) if number + 1 < len(layers) else ())
            return forward(x)

        return call

    for number, layer in enumerate(layers):
        layer.forward = watch(number, layer.forward)  # type: ignore[method-assign]
    lab.run_one(engine, list(range(40)), num_tokens, temperature=1.0)
    return counts, sum(foretold) / len(foretold)


def test_spread_routing_is_like_a_trained_models(dummy_mixtral: EngineConfig) -> None:
    config, model = dummy_mixtral, lab.read_model(dummy_mixtral)
    found = {}
    for routing in lab.ROUTINGS:
        sweep = lab.CacheSweep.parse(config, model, ("2", 8, 10), routing)
        with lab.one_engine(config, model, sweep) as engine_for:
            found[routing] = choices(engine_for(2, "lfu"), 60)
    counts, accuracy = found["spread"]
    for layer in counts:
        assert len(layer) >= 6  # depends on the token
        assert sum(n for _, n in layer.most_common(4)) > 0.6 * layer.total()  # and some are popular
    assert 0.6 < accuracy < 1  # a guess is mostly right
    assert counts[0].most_common(2) != counts[1].most_common(2)


def test_spread_routing_repeats_by_seed(dummy: EngineConfig) -> None:
    sweep = lab.CacheSweep.parse(dummy, lab.read_model(dummy), ("2", 8, 10), None)
    tokens = []
    for seed in (0, 0, 1):
        config = replace(dummy, seed=seed)
        with lab.one_engine(config, lab.read_model(config), sweep) as engine_for:
            engine = engine_for(2, "lfu")
            gate = engine.executor.runner.model.layers[1].mlp.gate.weight.clone()
            tokens.append((lab.measure_decode(engine, sweep, 0, None), gate))
    assert torch.equal(tokens[0][1], tokens[1][1])
    assert not torch.equal(tokens[0][1], tokens[2][1])
    assert tokens[0][0][1] == tokens[1][0][1]
    assert tokens[0][0][0]["hit_rate"] == tokens[1][0][0]["hit_rate"]


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--cached", "2,9"), ("--cached 9", "8 experts")),
        (("--cached", "-1"), ("--cached", "at least 0")),
        (("--cached", "2;4"), ("--cached", "comma")),
        (("--num-layers", 2), ("--num-layers 2", "--load-format dummy")),
        (("--num-layers", 5, "--load-format", "dummy"), ("--num-layers 5", "1 to 4")),
        (("--num-layers", 0, "--load-format", "dummy"), ("--num-layers 0", "1 to 4")),
        (("--routing", "spread"), ("--routing spread", "dummy")),
        (("--routing", "even"), ("'even'", "model, spread")),
        (("--tokens", 0), ("--tokens 0", "at least 1")),
        (("--input-len", 0), ("--input-len 0", "at least 1")),
        (("--max-model-len", 15), ("16", "max_model_len=15")),
        (("--expert-cache-gb", 1), ("--expert-cache-gb 1", "--cached")),
        (("--parts", "offload,speed"), ("'speed'", "kernels, offload")),
        (("--shapes", "gpt"), ("'gpt'", "mixtral-8x22b")),
    ],
)
def test_refused_before_anything_is_loaded(
    bench: Any, monkeypatch: pytest.MonkeyPatch, options: tuple[Any, ...], words: tuple[str, ...]
) -> None:
    monkeypatch.setattr(LocalExecutor, "__init__", lambda *_: pytest.fail("a model was loaded"))
    result = bench(*options)
    assert result.code == 2
    for word in words:
        assert word in result.err
    assert result.out == ""


def test_a_bandwidth_of_nothing(bench: Any) -> None:
    result = bench("--bandwidth-gbs", 0)
    assert result.code == 2
    assert "--bandwidth-gbs 0" in result.err


def test_the_longest_that_fits(bench: Any) -> None:
    result = bench("--max-model-len", 16, "--cached", 1)
    assert result.code == 0, result.err


def test_a_dense_model(bench: Any, llama: Any) -> None:
    result = bench(model=llama.path)
    assert result.code == 2
    assert "LlamaForCausalLM is dense" in result.err


@needs_no_gpu
@pytest.mark.parametrize(
    ("options", "word"),
    [
        ((), "nothing to measure"),
        (("--parts", "kernels"), "need a GPU"),
        (("--tune",), "need a GPU"),
        (("--model", TINY, "--parts", "kernels,offload"), "need a GPU"),
    ],
)
def test_without_a_gpu(run: Run, options: tuple[Any, ...], word: str) -> None:
    result = run("bench", "moe", *options)
    assert result.code == 2
    assert word in result.err
    assert result.out == ""


def test_which_parts() -> None:
    assert lab.choose_parts(None, True, True) == ["kernels", "offload"]
    assert lab.choose_parts(None, False, True) == ["offload"]
    assert lab.choose_parts(None, True, False) == ["kernels"]
    assert lab.choose_parts("offload, kernels", False, False) == ["kernels", "offload"]


def test_layers_left_out_of_the_lists(dummy: EngineConfig) -> None:
    """A config that names layers must not name those that are gone."""
    folder = Path(dummy.model)
    facts = json.loads((folder / "config.json").read_text())
    facts |= {"num_hidden_layers": 3, "mlp_only_layers": [0, 2], "layer_types": ["full_attention"] * 3}
    (folder / "config.json").write_text(json.dumps(facts))
    with lab.with_layers(dummy, 2) as smaller:
        model = lab.read_model(smaller)
        assert (model.num_layers, model.moe.layers) == (2, (False, True))
        assert smaller.model != dummy.model
    assert not Path(smaller.model).exists()
    with pytest.raises(ConfigError, match="dense"), lab.with_layers(dummy, 1) as smaller:
        lab.read_model(smaller)


# ---- kernels: what needs no GPU ------------------------------------------------------------------------------------


def test_shapes() -> None:
    assert moe_kernels.parse_shapes("Mixtral-8x7B, qwen3-30b-a3b,mixtral-8x7b") == moe_kernels.SHAPES
    shape = moe_kernels.shape_of(lab.read_model(EngineConfig(model=str(TINY))), str(TINY))
    assert shape == moe_kernels.KernelShape("tiny-mixtral", 128, 256, 8, 2)


def test_kernels_and_tuning_in_the_report(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command around them, on a device that says it is a GPU; what is measured is made up."""
    table, asked = tmp_path / "tiles.json", []
    shape = moe_tiles.MoeShape(4096, 14336, 2, torch.bfloat16)
    plans = [moe_tiles.TileChoice("gemv"), moe_tiles.TileChoice("tiles", 16)]
    entries = [moe_tiles.entry_of("card", shape, n, plan) for n, plan in zip((1, 8), plans)]
    moe_tiles.write_table(
        table,
        [
            entries[0],
            moe_tiles.entry_of("card", shape, 8, moe_tiles.TileChoice("tiles", 32)),
            moe_tiles.entry_of("other card", shape, 8, plans[1]),
        ],
    )
    monkeypatch.setattr(moe_tiles, "TABLE", table)
    monkeypatch.setattr(moe_kernels, "tune", lambda shapes, device: asked.append(shapes) or entries)
    monkeypatch.setattr(moe_kernels, "need_gpu", lambda _: None)
    limits = {"bytes_per_second": 4e12, "flops": 7e14}
    monkeypatch.setattr(moe_kernels, "measure", lambda device, shapes: {"limits": limits, "decode": [], "prefill": []})
    result = run("bench", "moe", "--tune", "--device", "cpu", "--shapes", "mixtral-8x7b")
    assert result.code == 0, result.err
    assert asked == [(moe_kernels.MIXTRAL,)]
    assert "1 of 2 entries changed" in result.out
    [changed] = cells(result)
    assert changed[:2] == ["Mixtral-8x7B", "8"]
    assert "m32" in changed[2]
    assert "m16" in changed[3]
    tuned = result.last_json["results"]["tuned"]
    assert [(row["tokens"], row["plan"] == row["before"]) for row in tuned] == [(1, True), (8, False)]
    assert len(moe_tiles.read_table(table)) == 3
    assert "kernels" not in result.last_json["results"]  # --tune alone only tunes
    again = run("bench", "moe", "--tune", "--parts", "kernels", "--device", "cpu", "--shapes", "mixtral-8x7b")
    assert "0 of 2 entries changed" in " ".join(again.out.split())
    assert again.last_json["results"]["kernels"]["limits"] == limits


def test_dashed_lines_take_the_colour_of_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    kept: list[Any] = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path: kept.append(self))
    rows = [
        {
            "cached": n,
            "variant": v,
            "tokens_per_second": 9.0 * n,
            "bound_tokens_per_second": 10.0 * n,
            "share_of_bound": 0.9,
        }
        for v in lab.VARIANTS
        for n in (2, 4)
    ]
    lab.plot_offload(tmp_path / "x.png", "title: of it, routing model", rows)
    above, below = kept[0].axes
    lines = {line.get_label(): line for line in above.get_lines()}
    assert [line.get_linestyle() for line in lines.values()] == ["-"] * 4 + ["--"] * 4
    assert all(lines[v].get_color() == lines[f"{v}: bound"].get_color() for v in VARIANTS)
    assert above.get_xscale() == "linear"
    assert len(below.get_lines()) == 4


def test_a_link_is_measured_only_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "host_to_device_bandwidth", lambda device: 55e9)
    cpu, gpu = (SimpleNamespace(is_gpu=is_gpu) for is_gpu in (False, True))
    assert lab.link_bandwidth(cpu, None) is None
    assert lab.link_bandwidth(gpu, None) == 55e9
    assert lab.link_bandwidth(cpu, 20.0) == lab.link_bandwidth(gpu, 20.0) == 20e9
