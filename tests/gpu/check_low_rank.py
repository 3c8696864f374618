"""Low-rank experts on a real GPU: tokens wherever V lives, and speed against dense experts.

    python tests/gpu/check_low_rank.py [--out DIR] [--layers 8] [--only engine,speed]

Kernels: tests/gpu/check_moe.py.
Engine: tiny-mixtral with made-up factors, ranks differ by layer; resident, captured segments, kernel by kernel, disk.
Speed: Mixtral 8x7B's shapes with fewer layers and made-up weights, one sequence: low-rank (rank 1024, w2 on its output
side) against dense in the same memory for buffers, and all-resident rank 256 against dense resident.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from nanovllm import LLM, SamplingParams  # noqa: E402
from nanovllm.lowrank.folder import write_metadata  # noqa: E402
from nanovllm.lowrank.format import SvdMetadata  # noqa: E402
from nanovllm.moe.layer import MoeLayer  # noqa: E402
from tests.gpu.check_offload import FIXTURE, check_tokens, tokens  # noqa: E402
from tests.lowrank.svd_folders import Choice, copy_model, write_svd  # noqa: E402

MIXTRAL = ROOT / "benchmarks/models/mixtral-8x7b/config.json"
MIXED = [Choice(37, 100, 50, "input"), Choice(60, 41, 33, "output"), Choice(9, 20, 20, "input"), Choice(50, 9, 50)]


def check_engine() -> list[dict]:
    with tempfile.TemporaryDirectory() as place:
        folder = copy_model(FIXTURE, Path(place) / "model")
        write_svd(folder, MIXED)
        variants: list[tuple[float, dict]] = [(0.0004, {}), (0.001, {}), (0.01, {"expert_policy": "lru"})]
        changes = ({"expert_host_gb": 0.0}, {"enforce_eager": True}, {"expert_prefetch": False})
        rows = check_tokens(folder, [*variants, *((0.001, more) for more in changes)])
        eager = tokens(folder, "bfloat16", enforce_eager=True)
        rows.append({"resident, eager": sum(a == b for a, b in zip(eager, tokens(folder, "bfloat16"))), "of": 20})
    return rows


# ---- speed -----------------------------------------------------------------------------------------------------------


def made_up(place: Path, layers: int, rank: int | None) -> Path:
    """config.json and, for low-rank experts, metadata.json: dummy weights need no more."""
    folder = place / f"{layers}-{rank}"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "svd_experts").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**json.loads(MIXTRAL.read_text()), "num_hidden_layers": layers}))
    if rank is None:
        (folder / "svd_experts").rmdir()
        return folder
    ids = tuple(range(layers))
    write_metadata(folder / "svd_experts", SvdMetadata(
        method="pca", dtype="bfloat16", layer_ids=ids, num_experts=8, hidden_size=4096,
        intermediate_size=14336, svd_ranks={i: {"w1": rank, "w2": rank, "w3": rank} for i in ids},
        w2_modes=dict.fromkeys(ids, "output"), ridge=0.0, teacher_hash="", calibration_hash=None, kept=rank / 4096,
    ))  # fmt: skip
    return folder


def spread_routing(model: Any) -> None:
    """Made-up weights make all routers alike and the norms tiny. Here logits have a spread of about 1.5 a token."""
    generator = torch.Generator(model.embed.weight.device).manual_seed(0)
    for layer in model.layers:
        if isinstance(layer.mlp, MoeLayer):
            layer.mlp_norm.weight.data.fill_(1.0)
            gate = layer.mlp.gate.weight
            gate.data.normal_(0.0, 1.5 / gate.shape[1] ** 0.5, generator=generator)


def open_engine(folder: Path, num_seqs: int = 1, **options) -> LLM:
    """Made-up low-rank weights are all but zero after four products, so routers hardly see what experts did: hit rates
    say little, times of hits and misses do. The dense run has the same seed."""
    llm = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=1024,
        **options,
    )
    model, offload = llm.engine.executor.runner.model, llm.engine.executor.offload
    spread_routing(model)
    if offload is not None:
        offload.watch_gates(model.router_weights())
    return llm


def decode(llm: LLM, num_seqs: int = 1, num_tokens: int = 72) -> dict:
    engine = llm.engine
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=num_tokens, ignore_eos=True)
    generator = torch.Generator().manual_seed(0)
    for number in range(num_seqs):
        prompt = torch.randint(3, 30000, (64,), generator=generator).tolist()
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    counts, longest, began, skipped, before = Counter(), 0, 0.0, 0, None
    while engine.has_unfinished_requests():
        for delta in engine.step():
            counts[delta.request_id] += len(delta.outputs[0].token_ids)
            longest = max(counts.values())
        if not began and longest >= 8:
            torch.cuda.synchronize()
            began, skipped, before = time.perf_counter(), longest, engine.executor.expert_stats()
    seconds = time.perf_counter() - began
    after = engine.executor.expert_stats()
    experts = engine.describe()["runs_on"].get("experts", {})
    row = {
        "ms_per_token": seconds / (num_tokens - skipped) * 1e3,
        "expert_bytes": experts.get("expert_bytes"),
        "cached_slots": experts.get("cached_slots"),
    }
    if after is not None and before is not None:
        stats = after - before
        row |= {"hit_rate": stats.hit_rate, "bytes_per_token": stats.bytes_per_token}
    return row


def check_speed(layers: int) -> list[dict]:
    """Two readings of "the same memory": that of 4 of 8 dense experts a layer, which holds every low-rank one, and that
    of 4 of 8 low-rank ones, which holds few dense ones."""
    rows: list[dict] = []
    dense_bytes, low_bytes = 3 * 4096 * 14336 * 2, 3 * 1024 * 14336 * 2
    ring = 4  # buffers that copies go through: 2 x top_k

    def add(name: str, row: dict) -> None:
        rows.append({"name": name, **row})
        print(json.dumps(rows[-1]), flush=True)

    def cap(size: int) -> dict:
        return {"expert_placement": "offload", "expert_cache_gb": (4 * layers + ring) * size * 1.0001 / 2**30}

    with tempfile.TemporaryDirectory() as place:
        dense, low, small = (made_up(Path(place), layers, rank) for rank in (None, 1024, 256))
        for name, folder in (("dense", dense), ("rank 1024", low), ("rank 256", small)):
            for num_seqs in (1, 16):
                llm = open_engine(folder, num_seqs, expert_placement="resident")
                add(f"{name}, resident, {num_seqs} sequences", decode(llm, num_seqs, 256))
                llm.close()
        for name, size in (("the same memory", dense_bytes), ("4 of 8 cached", low_bytes)):
            llm = open_engine(low, **cap(size))
            add(f"rank 1024, {name}", decode(llm))
            llm.close()
        llm = open_engine(dense, **cap(dense_bytes))  # one engine: to lock all experts takes longer than to decode
        add("dense, 4 of 8 cached", decode(llm))
        fewer = (4 * layers + ring) * low_bytes // dense_bytes - ring
        llm.engine.executor.offload.restart(fewer, "lfu", True)
        add("dense, memory of 4 of 8 of rank 1024", decode(llm))
        llm.close()
    ms = {row["name"]: row["ms_per_token"] for row in rows}
    for name, slow, fast, aim in (
        ("offloaded, 4 of 8 dense", "dense, 4 of 8 cached", "rank 1024, the same memory", 3.5),
        ("offloaded, 4 of 8 low-rank", "dense, memory of 4 of 8 of rank 1024", "rank 1024, 4 of 8 cached", 3.5),
        ("resident", "dense, resident, 1 sequences", "rank 256, resident, 1 sequences", 2.0),
    ):
        rows.append({"name": f"ratio: {name}", "times": ms[slow] / ms[fast], "aim": aim})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--only", default="engine,speed")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    parts = {"engine": check_engine, "speed": lambda: check_speed(args.layers)}
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "layers": args.layers}
    failed = []
    for name in args.only.split(","):  # what one part found is kept if the next fails, and the next runs all the same
        try:
            found[name] = parts[name]()
        except Exception:
            traceback.print_exc()
            failed.append(name)
        (args.out / "low_rank.json").write_text(json.dumps({**found, "failed": failed}, indent=1))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
