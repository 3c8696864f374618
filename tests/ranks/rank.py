"""One rank of several, as a script: does the jobs that come as lines of JSON, all ranks the same ones, and prints what
it saw of each as one line. Starting a process costs more than most jobs, so a group of ranks does many.

    python rank.py RANK SIZE PORT

    {"do": "logits", "path": ...}                                  of a prompt, through its shards of the model
    {"do": "greedy", "path": ..., "options": {...}, "batches": ..., "num_tokens": ...}     a whole executor's tokens;
                                                                   "as_on_a_gpu": weights in the form they have there
    {"do": "spread", "expert_size": ..., "ids": ..., "dtype": ...}     spread experts against whole ones, one layer
    {"do": "move", "expert_size": ..., "num_redundant": ...}       experts between ranks, to random places
    {"do": "beside", "late": ...}                                  the same, while one rank is some launches behind
    {"do": "numbers", "number": ...}                               what ranks exchange at the start
"""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from nanovllm.attention.base import AttentionBatch, HostLens
from nanovllm.attention.latent import LatentBackend
from nanovllm.attention.sdpa import SdpaBackend
from nanovllm.config import EngineConfig
from nanovllm.errors import NanoVLLMError
from nanovllm.hardware.device import Device
from nanovllm.hardware.parallel import Parallel, connect, open_store
from nanovllm.layers.attention import Step
from nanovllm.layers.build import Build
from nanovllm.layers.scaled import Scales
from nanovllm.model_config import ModelConfig, MoeConfig
from nanovllm.models.registry import find_family
from nanovllm.models.transformer import Parts, Transformer
from nanovllm.moe.load import ExpertLoad
from nanovllm.moe.rebalance import BESIDE, Balancer, add_places
from nanovllm.moe.resident import ResidentExperts
from nanovllm.ops.opset import PLAIN
from nanovllm.ranks.local import LocalExecutor
from nanovllm.runner import build as runner_build
from nanovllm.runner.kv_cache import CacheLayout, allocate
from nanovllm.runner.limits import StepLimits
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.plan import Arrival, PlanEntry, StepPlan
from nanovllm.weights.checkpoint import open_checkpoint
from nanovllm.weights.loader import load_weights
from tests.moe.experts8 import as_on_a_gpu, twin_ops
from tests.runner.test_relay import InSegments

CPU = Device(torch.device("cpu"))
PROMPT = [5, 9, 2, 7, 1, 3, 8, 4, 6, 11, 12]
BLOCK = 4


class CountingCheckpoint:
    """Counts the numbers that were read, and of which experts."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.num_read = 0
        self.experts: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _count(self, name: str, found: torch.Tensor) -> torch.Tensor:
        self.num_read += found.numel()
        if ".experts." in name:
            self.experts.add(int(name.partition(".experts.")[2].split(".")[0]))
        return found

    def read(self, name: str) -> torch.Tensor:
        return self._count(name, self._inner.read(name))

    def read_slice(self, name: str, *cut: int) -> torch.Tensor:
        return self._count(name, self._inner.read_slice(name, *cut))


def build(path: Path, parallel: Parallel) -> tuple[Transformer, int]:
    checkpoint = CountingCheckpoint(open_checkpoint(path))
    config = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config)
    backend = SdpaBackend() if config.mla is None else LatentBackend()
    parts = Parts(Build(torch.float32, CPU.torch_device, PLAIN, parallel), backend, 64)
    model = find_family(config)(config, parts)
    load_weights(model, checkpoint, model.rules)  # type: ignore[arg-type]
    return model, checkpoint.num_read


@torch.inference_mode()
def logits_of(model: Transformer) -> torch.Tensor:
    """[tokens, vocab] of the prompt, through a paged cache."""
    num, num_blocks = len(PROMPT), -(-len(PROMPT) // BLOCK)
    caches = allocate(CacheLayout(BLOCK, num_blocks, 0), model.specs, CPU)
    batch = AttentionBatch(
        query_starts=torch.tensor([0, num], dtype=torch.int32),
        context_lens=torch.tensor([num], dtype=torch.int32),
        block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
        slots=torch.arange(num),
        num_decodes=0,
        max_context_len=num,
        host=HostLens([num], [num], [slice(0, num)]),
    )
    step = Step(torch.tensor(PROMPT), torch.arange(num), None, batch)
    return model.logits(model(step, caches))


class Reads:
    """What a rank reads of files, besides what goes through the loader: bytes by `preadv`."""

    def __init__(self) -> None:
        self.num_bytes, self._preadv = 0, os.preadv
        os.preadv = self._count  # type: ignore[assignment]

    def _count(self, *args: Any) -> int:
        count = self._preadv(*args)
        self.num_bytes += count
        return count

    def close(self) -> None:
        os.preadv = self._preadv


def decode(executor: LocalExecutor, prompts: list[list[int]], num_tokens: int, block_size: int) -> list[list[int]]:
    """Greedy tokens of all prompts at once: a plan of prefills, then plans of decodes."""
    each = -(-(max(map(len, prompts)) + num_tokens) // block_size)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    arrivals = tuple(Arrival(i, tuple(prompt), len(prompt), params, i, ()) for i, prompt in enumerate(prompts))
    entries = tuple(
        PlanEntry(i, 0, len(prompt), 0, tuple(range(i * each, (i + 1) * each)), True)
        for i, prompt in enumerate(prompts)
    )
    first = executor.launch(StepPlan(0, entries, arrivals, tuple(range(16)))).result().token_ids
    found = [list(tokens) for tokens in first]
    for step in range(1, num_tokens):
        entries = tuple(PlanEntry(i, len(p) + step - 1, 1, 0, (), True) for i, p in enumerate(prompts))
        for tokens, new in zip(found, executor.launch(StepPlan(step, entries)).result().token_ids):
            tokens += new
    return found


def greedy(job: dict[str, Any], parallel: Parallel) -> dict[str, Any]:
    if job.get("as_on_a_gpu"):
        ops, patched = twin_ops(), {"choose_scales": as_on_a_gpu, "choose_packing": lambda *_: None}
        with patch.multiple(runner_build, choose_ops=lambda *_: ops, **patched):
            return greedy({**job, "as_on_a_gpu": False}, parallel)
    config = EngineConfig(
        model=job["path"],
        device="cpu",
        tensor_parallel_size=parallel.size,
        max_num_seqs=16,
        num_kvcache_blocks=128,
        **job["options"],
    )
    checkpoint, reads = CountingCheckpoint(open_checkpoint(Path(job["path"]))), Reads()
    model_config = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config)
    limits = StepLimits(160, 512, 16)
    executor = LocalExecutor(config, model_config, checkpoint, CPU, limits, parallel)  # type: ignore[arg-type]
    try:
        at_start = reads.num_bytes
        if job.get("in_pieces"):
            runner = executor.runner
            runner.model = runner._forward.model = InSegments(runner.model)  # type: ignore[assignment]
        tokens = [found for batch in job["batches"] for found in decode(executor, batch, job["num_tokens"], 16)]
        stats = executor.expert_stats()
        return {
            "tokens": tokens,
            "num_read": checkpoint.num_read,
            "experts_read": sorted(checkpoint.experts),
            "bytes_at_start": at_start,
            "bytes_later": reads.num_bytes - at_start,
            "num_parameters": executor.num_parameters,
            "describe": executor.describe().get("experts"),
            "quantization": executor.describe()["quantization"],
            "load": executor.expert_load(),  # zeros, unless it was counted all the time
            "moved": None if executor.balancer is None else executor.balancer.num_moved,
            "stats": None if stats is None else [stats.hits, stats.misses, stats.computed_on_cpu, stats.bytes_copied],
        }
    finally:
        executor.close()
        checkpoint.close()
        reads.close()


def spread(job: dict[str, Any], parallel: Parallel) -> dict[str, Any]:
    """One layer's experts, filled from the same random numbers; the largest difference and whether bits are equal."""
    ids, dtype = torch.tensor(job["ids"], dtype=torch.int32), getattr(torch, job["dtype"])
    ranks = replace(parallel, expert_size=job["expert_size"])
    moe = MoeConfig(8, ids.shape[1], 32, True, (True,))
    draw = torch.Generator().manual_seed(len(ids))
    experts = ResidentExperts(moe, 64, Build(dtype, CPU.torch_device, PLAIN, ranks))
    gate_up = torch.randn(8, 2, 32, 64, generator=draw).to(dtype)
    down = torch.randn(8, 64, 32, generator=draw).to(dtype)
    x, weights = torch.randn(len(ids), 64, generator=draw).to(dtype), torch.rand(ids.shape, generator=draw)
    here, cut = ranks.experts_here(8), ranks.shard_expert(32)
    here, cut = slice(here.start, here.stop), slice(cut.start, cut.start + cut.length)
    experts.gate_up.weight.copy_(gate_up[here, :, cut].flatten(0, 2))
    experts.down.weight.copy_(down[here, :, cut].flatten(0, 1))
    out = experts(x, ids, weights)
    whole = PLAIN.sum_pairs(PLAIN.expert_pairs(x, gate_up.flatten(1, 2), down, ids, weights))
    return {"difference": (out - whole).abs().max().item() / whole.abs().max().item(), "sum": out.sum().item()}


class LabelledExperts:
    """Two layers of 8 experts whose weights say whose they are, and of which share, with a Balancer. `scaled`: in 8-bit
    floats, where each byte says it, those of the scales too."""

    def __init__(self, ranks: Parallel, num_redundant: int, scaled: bool = False) -> None:
        self.ranks, self.tables, self.wrong = ranks, [], []
        self.group, self.share = divmod(ranks.rank, ranks.ranks_per_expert)
        scales = Scales(0, experts=True) if scaled else None
        build = Build(torch.float32, CPU.torch_device, PLAIN, ranks, scaling=scales)
        moe = MoeConfig(8, 2, 32, True, (True,))
        self.layers = [ResidentExperts(moe, size, build) for size in (64, 48)]  # unequal, as low-rank ones may be
        for number, layer in enumerate(self.layers):
            for rows in self.memory(layer, 8 // ranks.expert_size):
                for place, expert in enumerate(ranks.experts_here(8)):
                    rows[place] = 100 * number + 10 * expert + self.share
            add_places(layer, 8, num_redundant)
        self.balancer = Balancer(self.layers, ExpertLoad(2, 8, CPU.torch_device, window_size=1), ranks, step_interval=1)
        self.draw = torch.Generator().manual_seed(7)

    def memory(self, layer: ResidentExperts, here: int) -> list[torch.Tensor]:
        """[places, numbers or bytes]"""
        if layer.scaled is not None:
            return [layer.scaled.pool]
        return [stack.weight.view(here, -1) for stack in (layer.gate_up, layer.down)]

    def add_load(self) -> None:
        ids = (torch.rand(64, generator=self.draw) ** 3 * 8).int() * 5 % 8
        self.balancer.load.add([ids[:, None], (ids[:, None] + 3) % 8], 64)

    def launch(self) -> None:
        """And what a step would find then: the tables, and places with other weights than they say."""
        self.balancer.before_launch(1)
        for number, layer in enumerate(self.layers):
            experts = layer.spread.arrangement.experts
            here = len(experts) // self.ranks.expert_size
            for place, expert in enumerate(experts[self.group * here : (self.group + 1) * here]):
                for rows in self.memory(layer, here):
                    found = rows[place].unique().tolist()
                    if found != [100 * number + 10 * expert + self.share]:
                        self.wrong.append([number, place, expert, found])
            self.tables.append(experts)

    def found(self) -> dict[str, Any]:
        return {"wrong": self.wrong, "tables": self.tables, "moved": self.balancer.num_moved}


def move(job: dict[str, Any], parallel: Parallel) -> dict[str, Any]:
    ranks = replace(parallel, expert_size=job["expert_size"])
    labelled = LabelledExperts(ranks, job["num_redundant"], job["scaled"])
    for _ in range(6):
        labelled.add_load()
        for _ in range(6):  # the loads, then one layer after the other
            labelled.launch()
    return labelled.found()


def beside(job: dict[str, Any], parallel: Parallel) -> dict[str, Any]:
    """An exchange begins; one rank does not begin its part before all others have made the launches beside it. The
    meeting stands for the collectives of their steps."""
    labelled = LabelledExperts(replace(parallel, expert_size=parallel.size), 0)
    labelled.add_load()
    labelled.launch()  # the loads
    if parallel.rank == job["late"]:
        parallel.gather_numbers(0)
    for _ in range(BESIDE):
        labelled.launch()
    if parallel.rank != job["late"]:
        parallel.gather_numbers(0)
    labelled.launch()  # the switch
    return labelled.found()


def logits(job: dict[str, Any], parallel: Parallel) -> dict[str, Any]:
    model, num_read = build(Path(job["path"]), parallel)
    return {
        "logits": logits_of(model).tolist(),
        "num_read": num_read,
        "numbers": parallel.gather_numbers(parallel.rank * 10),
    }


def numbers(job: dict[str, Any], parallel: Parallel) -> dict[str, Any]:
    found = job["number"] + parallel.rank
    return {
        "numbers": parallel.gather_numbers(found),
        "least": parallel.least(found),
        "neighbours": parallel.count_neighbours(),
    }


JOBS = {"logits": logits, "greedy": greedy, "spread": spread, "move": move, "beside": beside, "numbers": numbers}


def main() -> None:
    rank, size, port = map(int, sys.argv[1:4])
    torch.set_num_threads(1)
    logging.getLogger("nanovllm").setLevel(logging.ERROR)  # the disk tier warns each time
    store = open_store(port, size, is_master=False, timeout=60)
    parallel = connect(store, rank, size, CPU.torch_device, timeout=60, background=True)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            with torch.inference_mode():
                found = JOBS[job["do"]](job, parallel)
        except NanoVLLMError as error:  # a refusal, which all ranks raise
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
