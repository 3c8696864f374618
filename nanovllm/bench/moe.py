"""Offloaded experts at batch 1: what each idea is worth, and how near decode comes to what the link allows.

For every number of cached experts a layer, the same prompt is decoded to the same tokens in four ways:

    none             every chosen expert is copied; of no use but as the baseline
    lru, lfu         cached experts are kept by last use, by decayed frequency of use
    lfu + prefetch   and idle time of the link brings what the next layers will probably choose

The bound of each: what it missed had to travel, so   tokens / s <= link bandwidth / bytes missed a token.   An expert
that a right guess brought early is a miss too: prefetching can hide a copy behind computing, not save it. A policy
raises the bound, prefetching brings decode nearer to it.

Routing. Dummy weights (+-1e-3) send nearly every token to the same experts, and a cache looks perfect. "spread" gives
them routers that choose as those of a trained model do (Probe.spread_routing). "model" takes the weights as they are.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nanovllm.bench.report import Columns, Series, plot_lines, print_rows
from nanovllm.bench.throughput import engine_facts, read_config
from nanovllm.bench.workload import Lengths, make_workload, parse_counts
from nanovllm.config import EngineConfig
from nanovllm.engine.defaults import resolve_max_model_len
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import ConfigError, EngineDeadError
from nanovllm.hardware.bandwidth import host_to_device_bandwidth
from nanovllm.hardware.device import Device
from nanovllm.lowrank.folder import find_svd_folder, low_rank_forms, read_svd_metadata, write_metadata
from nanovllm.lowrank.format import FOLDER
from nanovllm.memory.budget import GIB
from nanovllm.memory.facts import ModelFacts
from nanovllm.model_config import ModelConfig
from nanovllm.moe.offload.cache import ExpertStats
from nanovllm.runner.quantization import choose_scales, scaled_facts
from nanovllm.sampling_params import SamplingParams
from nanovllm.weights.checkpoint import open_checkpoint
from nanovllm.weights.resolve import resolve_model

VARIANTS = {"none": ("none", False), "lru": ("lru", False), "lfu": ("lfu", False), "lfu + prefetch": ("lfu", True)}
PARTS = ("kernels", "offload")
ROUTINGS = ("model", "spread")
WARM_UP_TOKENS = 12  # enough for the medians of the link's idle time, which prefetching uses
Rows = list[dict[str, Any]]


def choose_parts(asked: str | None, has_gpu: bool, has_model: bool) -> list[str]:
    if asked is None:
        found = ["kernels"] * has_gpu + ["offload"] * has_model
        if not found:
            raise ConfigError("bench moe: nothing to measure here: kernels need a GPU, offload needs --model DIR")
        return found
    found = [word.strip() for word in asked.split(",")]
    if unknown := [word for word in found if word not in PARTS]:
        raise ConfigError(f"--parts {asked!r}: {unknown[0]!r} is none of {', '.join(PARTS)}")
    return [part for part in PARTS if part in found]


def read_model(config: EngineConfig) -> ModelConfig:
    model = read_config(config.model)
    if model.moe is None:
        raise ConfigError(
            f"--model {config.model}: {model.architecture} is dense, it has no experts to measure; give a "
            "mixture-of-experts model (Mixtral, Qwen3-MoE)"
        )
    return model


@dataclass(frozen=True)
class CacheSweep:
    """What is measured; lengths and counts already checked against the model."""

    cached: tuple[int, ...]  # experts a layer
    num_tokens: int  # decoded while the clock runs
    input_len: int
    routing: str

    @classmethod
    def parse(
        cls, config: EngineConfig, model: ModelConfig, sizes: tuple[str, int, int], routing: str | None
    ) -> CacheSweep:
        """sizes = (cached, tokens, input_len), as the options give them."""
        assert model.moe is not None
        cached, num_tokens, input_len = sizes
        counts = sorted(set(parse_counts("--cached", cached, 0)))
        if counts[-1] > model.moe.num_experts:
            raise ConfigError(f"--cached {counts[-1]}: a layer of this model has {model.moe.num_experts} experts")
        if config.expert_cache_gb is not None:
            raise ConfigError(f"--expert-cache-gb {config.expert_cache_gb}: here --cached says how many; leave it out")
        for option, value in (("--tokens", num_tokens), ("--input-len", input_len)):
            if value < 1:
                raise ConfigError(f"{option} {value}: must be at least 1")
        limit = resolve_max_model_len(config, model)
        if input_len + num_tokens + 1 > limit:
            raise ConfigError(
                f"--input-len {input_len} and --tokens {num_tokens}: with the first token that is "
                f"{input_len + num_tokens + 1}, over max_model_len={limit}"
            )
        dummy = config.load_format == "dummy"
        routing = routing or ("spread" if dummy else "model")
        if routing not in ROUTINGS:
            raise ConfigError(f"--routing {routing!r}: must be one of {', '.join(ROUTINGS)}")
        if routing == "spread" and not dummy:
            raise ConfigError("--routing spread: gives dummy weights other routers; real ones have theirs: use model")
        return cls(tuple(counts), num_tokens, input_len, routing)


@contextlib.contextmanager
def with_layers(config: EngineConfig, num_layers: int | None) -> Iterator[EngineConfig]:
    """The same model with fewer layers, for a host whose memory cannot hold all experts. All layers are alike, so the
    share of the bound is the same; tokens per second are not."""
    if num_layers is None:
        yield config
        return
    if config.load_format != "dummy":
        raise ConfigError(f"--num-layers {num_layers}: only of dummy weights; add --load-format dummy")
    model = read_model(config)
    if not 1 <= num_layers <= model.num_layers:
        raise ConfigError(f"--num-layers {num_layers}: must be from 1 to {model.num_layers}, as many as the model has")
    facts = {**model.hf, "num_hidden_layers": num_layers}
    if isinstance(facts.get("layer_types"), list):
        facts["layer_types"] = facts["layer_types"][:num_layers]
    if facts.get("mlp_only_layers"):
        facts["mlp_only_layers"] = [i for i in facts["mlp_only_layers"] if i < num_layers]
    with tempfile.TemporaryDirectory(prefix="nanovllm-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(facts))
        keep_low_rank(resolve_model(config.model), Path(folder), model, num_layers)
        yield replace(config, model=folder)


def keep_low_rank(source: Path, target: Path, model: ModelConfig, num_layers: int) -> None:
    """A model with low-rank experts has them with fewer layers too. Dummy weights need their sizes alone."""
    if (folder := find_svd_folder(source)) is None:
        return
    facts = read_svd_metadata(folder, model)
    if ids := tuple(i for i in facts.layer_ids if i < num_layers):
        (target / FOLDER).mkdir()
        write_metadata(
            target / FOLDER,
            replace(
                facts,
                layer_ids=ids,
                svd_ranks={i: facts.svd_ranks[i] for i in ids},
                w2_modes={i: facts.w2_modes[i] for i in ids},
            ),
        )


# ---- engines -------------------------------------------------------------------------------------------------------

EngineFor = Callable[[int, str], LLMEngine]


def offload_config(config: EngineConfig, model: ModelConfig, cached: int, variant: str) -> EngineConfig:
    """Buffers for `cached` experts of every layer and a ring of 2 x top_k, to the byte: powers of 2 divide exactly."""
    forms, device = low_rank_forms(Path(config.model), model), Device.choose(config.device)
    checkpoint = open_checkpoint(resolve_model(config.model))
    scales = choose_scales(config, model, checkpoint, device.is_gpu, forms is not None)
    checkpoint.close()
    facts = ModelFacts(model, _dtype(config, model).itemsize, forms=forms, **scaled_facts(scales))
    num_buffers = cached * facts.num_sparse_layers + 2 * facts.top_k
    policy, prefetch = VARIANTS[variant]
    return replace(
        config,
        expert_placement="offload",
        expert_cache_gb=num_buffers * facts.expert_bytes / GIB,
        expert_policy=policy,
        expert_prefetch=prefetch,
        enable_prefix_caching=False,  # a prompt found in the cache would compute no experts
        max_num_seqs=1,
        skip_tokenizer_init=True,
    )


def _dtype(config: EngineConfig, model: ModelConfig) -> torch.dtype:
    return Device.choose(config.device).resolve_dtype(config.dtype, model.dtype)


@contextlib.contextmanager
def one_engine(config: EngineConfig, model: ModelConfig, sweep: CacheSweep) -> Iterator[EngineFor]:
    """One engine serves all rows, with room for the most cached experts: to lock host memory for all experts takes
    longer than a row. With fewer cached the buffers beyond are not used."""
    assert model.moe is not None
    num_layers = sum(model.moe.layers)
    with LLMEngine(offload_config(config, model, sweep.cached[-1], "lfu + prefetch")) as engine:
        if sweep.routing == "spread":
            engine.executor.probe().spread_routing(config.seed)

        def engine_for(cached: int, variant: str) -> LLMEngine:
            engine.executor.probe().restart_experts(cached * num_layers, *VARIANTS[variant])
            return engine

        yield engine_for


# ---- measuring -----------------------------------------------------------------------------------------------------


def link_bandwidth(device: Device, given_gbs: float | None) -> float | None:
    """Bytes per second from host memory; None without a GPU: then there is no link."""
    if given_gbs is not None:
        if not given_gbs > 0:
            raise ConfigError(f"--bandwidth-gbs {given_gbs}: must be a positive number of gigabytes a second")
        return given_gbs * 1e9
    return host_to_device_bandwidth(device) if device.is_gpu else None


@contextlib.contextmanager
def prepared(
    config: EngineConfig, num_layers: int | None, sizes: tuple[str, int, int], routing: str | None
) -> Iterator[OffloadBench]:
    """Everything checked, nothing loaded."""
    all_layers = read_model(config).num_layers
    with with_layers(config, num_layers) as smaller:
        model = read_model(smaller)
        yield OffloadBench(smaller, config.model, model, CacheSweep.parse(smaller, model, sizes, routing), all_layers)


@dataclass(frozen=True)
class OffloadBench:
    config: EngineConfig
    name: str  # of the model, as the user called it
    model: ModelConfig  # with as many layers as are measured
    sweep: CacheSweep
    all_layers: int  # of the model as it is

    def run(self, bandwidth_gbs: float | None, plot: Path | None) -> tuple[dict[str, Any], Rows]:
        """(facts for the report, rows)."""
        assert self.model.moe is not None
        link = link_bandwidth(Device.choose(self.config.device), bandwidth_gbs)
        with one_engine(self.config, self.model, self.sweep) as engine_for:
            facts, rows = measure_offload(self.sweep, self.config.seed, link, engine_for)
        facts["engine"]["model"] = self.name  # not the folder that holds the one with fewer layers
        title = self.title(link)
        print_offload(title, self.model.moe.num_experts, rows)
        if plot:
            plot_offload(plot, title, rows)
        layers = {"num_layers": self.model.num_layers, "num_layers_of_model": self.all_layers}
        return {**facts, **layers, "link_bytes_per_second": link, "offload": asdict(self.sweep)}, rows

    def title(self, link: float | None) -> str:
        num, more = self.model.num_layers, self.all_layers
        fewer = "" if num == more else f" of the model's {more}"
        way = "no link here" if link is None else f"link {link / 1e9:.1f} GB/s"
        return f"offloaded experts, batch 1: {num} layers{fewer}, routing {self.sweep.routing}, {way}"


def measure_offload(
    sweep: CacheSweep, seed: int, link: float | None, engine_for: EngineFor
) -> tuple[dict[str, Any], Rows]:
    """(facts of the first engine, a row for each number of cached experts and each variant)."""
    facts: dict[str, Any] = {}
    rows: Rows = []
    expected: list[int] | None = None
    for cached in sweep.cached:
        for variant, (policy, prefetch) in VARIANTS.items():
            engine = engine_for(cached, variant)
            facts = facts or engine_facts(engine)
            row = {"cached": cached, "variant": variant, "policy": policy, "prefetch": prefetch}
            row |= check_slots(engine, cached)
            found, token_ids = measure_decode(engine, sweep, seed, link)
            expected = expected or token_ids
            rows.append({**row, **found, "same_output": token_ids == expected})
            share = found["share_of_bound"]
            print(
                f"  {cached} cached, {variant}: {found['tokens_per_second']:,.1f} tok/s, hits "
                f"{found['hit_rate']:.0%}, of the bound {_percent(share)}",
                flush=True,
            )
    return facts, rows


def check_slots(engine: LLMEngine, cached: int) -> dict[str, int]:
    """The number of cached experts in the table is that of the engine."""
    moe, experts = engine.model_config.moe, engine.describe()["runs_on"]["experts"]
    assert moe is not None
    found = {name: experts[name] for name in ("cached_slots", "streaming_slots", "on_disk")}
    assert (found["cached_slots"], found["streaming_slots"]) == (cached * sum(moe.layers), 2 * moe.top_k), found
    return found


def measure_decode(
    engine: LLMEngine, sweep: CacheSweep, seed: int, link: float | None
) -> tuple[dict[str, Any], list[int]]:
    """What one sequence's decode took, after another one has warmed everything up; and the tokens it gave."""
    length, vocab = sweep.input_len, engine.model_config.vocab_size
    work = make_workload(random.Random(seed), 2, Lengths(length, length), Lengths(1, 1), vocab)
    # Made-up logits are nearly equal: sampling draws ever new tokens, where greedy soon walks in a circle.
    temperature = 1.0 if sweep.routing == "spread" else 0.0
    run_one(engine, work.prompts[0], min(WARM_UP_TOKENS, sweep.num_tokens), temperature)
    probe = engine.executor.probe()
    with probe.chosen_experts() as chosen:
        seconds, stats, token_ids = run_one(engine, work.prompts[1], sweep.num_tokens, temperature, chosen.clear)
    row = rates(stats, sweep.num_tokens, seconds, probe.expert_bytes, link)
    return {**row, "distinct_experts": statistics.mean(map(len, chosen.values()))}, token_ids


def rates(
    stats: ExpertStats, num_tokens: int, seconds: float, expert_bytes: int, link: float | None
) -> dict[str, float | None]:
    rate = num_tokens / seconds
    missed = (stats.misses - stats.computed_on_cpu) * expert_bytes / num_tokens
    bound = link / missed if link and missed else None
    guessed = stats.prefetched_bytes_useful + stats.prefetched_bytes_wasted
    return {
        "tokens_per_second": rate,
        "hit_rate": stats.hit_rate,
        "missed_bytes_per_token": missed,
        "copied_bytes_per_token": stats.bytes_copied / num_tokens,
        "bound_tokens_per_second": bound,
        "share_of_bound": None if bound is None else rate / bound,
        "stall_share": stats.stall_seconds / seconds if link else None,
        "prefetch_precision": stats.prefetch_precision if guessed else None,
    }


def run_one(
    engine: LLMEngine, prompt: list[int], num_tokens: int, temperature: float, begin: Callable[[], Any] = lambda: None
) -> tuple[float, ExpertStats, list[int]]:
    """(seconds, statistics, token ids) of the tokens after the first, which comes with the prompt. `begin` is called
    when the clock starts."""
    params = SamplingParams(temperature=temperature, max_tokens=num_tokens + 1, ignore_eos=True, seed=0)
    engine.add_request("bench", {"prompt_token_ids": prompt}, params)
    token_ids: list[int] = []
    while not token_ids:
        token_ids += _step(engine)
    probe = engine.executor.probe()
    before, started = probe.expert_stats(), time.perf_counter()
    begin()
    while engine.has_unfinished_requests():
        token_ids += _step(engine)
    seconds = time.perf_counter() - started
    assert len(token_ids) == num_tokens + 1
    return seconds, probe.expert_stats() - before, token_ids


def _step(engine: LLMEngine) -> list[int]:
    """The new tokens of the only request."""
    delta = next(iter(engine.step()), None)
    if delta is not None and delta.error:
        raise EngineDeadError(f"the benchmark's step failed: {delta.error}")
    return [] if delta is None else delta.outputs[0].token_ids


# ---- tables and plots ----------------------------------------------------------------------------------------------


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def print_offload(title: str, num_experts: int, rows: Rows) -> None:
    columns: Columns = [
        ("cached", "cached", f"{{}} of {num_experts}"),
        ("variant", "variant"),
        ("tok/s", "tokens_per_second"),
        ("hits", "hit_rate", "{:.1%}"),
        ("MB missed/token", "missed_bytes_per_token", 1e-6),
        ("bound tok/s", "bound_tokens_per_second"),
        ("of the bound", "share_of_bound", "{:.0%}"),
        ("stalled", "stall_share", "{:.0%}"),
        ("prefetch right", "prefetch_precision", "{:.0%}"),
        ("distinct", "distinct_experts"),
    ]
    print_rows(title, rows, columns)
    if not all(row["same_output"] for row in rows):
        print("the variants did not all give the same tokens")


def plot_offload(path: Path, title: str, rows: Rows) -> None:
    """Speed against cached experts, a line for each variant and its bound dashed; below, the share of the bound."""

    def series(key: str, name: str = "{}") -> Series:
        found = {
            name.format(variant): [
                (row["cached"], row[key]) for row in rows if row["variant"] == variant and row[key] is not None
            ]
            for variant in VARIANTS
        }
        return {line: points for line, points in found.items() if points}

    bounds = series("bound_tokens_per_second", "{}: bound")
    title = title.replace(": ", "\n").replace(", routing", "\nrouting")  # a chart is not as wide as a table
    grid = {"decode tokens per second": {title: series("tokens_per_second") | bounds}}
    if bounds:
        grid["share of the bound"] = {"": series("share_of_bound")}
    plot_lines(path, "experts cached in a layer", grid, log_x=False, dashed={f"{v}: bound": v for v in VARIANTS})
