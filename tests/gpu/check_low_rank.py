"""Low-rank experts on a real GPU: kernels against their twin, tokens wherever V lives, and speed against dense experts.

    python tests/gpu/check_low_rank.py [--out DIR] [--layers 8] [--only kernels,engine,speed]

Kernels: both sides of w2 around the boundaries of tiles, passes bit for bit, graphs replayed with another routing.
Engine: tiny-mixtral with made-up factors, ranks differ by layer; resident, captured pieces, kernel by kernel, disk.
Speed: Mixtral 8x7B's shapes with fewer layers and made-up weights, one sequence: low-rank (rank 1024, w2 on its output
side) against dense in the same memory for slots, and all-resident rank 256 against dense resident.
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

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from nanovllm import LLM, SamplingParams  # noqa: E402
from nanovllm.hardware.graphs import capture_graph  # noqa: E402
from nanovllm.lowrank.folder import write_metadata  # noqa: E402
from nanovllm.lowrank.format import SvdMetadata  # noqa: E402
from nanovllm.ops import moe  # noqa: E402
from nanovllm.ops.triton import moe_experts, moe_route  # noqa: E402
from tests.gpu.check_relay import spread_routing  # noqa: E402
from tests.lowrank.svd_folders import Choice, copy_model, write_svd  # noqa: E402

DEVICE = "cuda"
FIXTURE = ROOT / "tests/fixtures/tiny-mixtral"
MIXTRAL = ROOT / "benchmarks/models/mixtral-8x7b/config.json"
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 6e-3, torch.float32: 3e-5}
TOKENS = (1, 2, 3, 5, 15, 16, 17, 63, 64, 65, 130, 513, 2100)
# rank of w1 and w3, intermediate size, down [outputs, columns], rank of `between`
SHAPES = ((128, 384, (256, 64), 64), (128, 384, (64, 384), None), (40, 88, (200, 24), 24), (24, 88, (8, 88), None))
MIXED = [Choice(37, 100, 50, "input"), Choice(60, 41, 33, "output"), Choice(9, 20, 20, "input"), Choice(50, 9, 50)]
PROMPTS = ["The state of our union", "My fellow Americans, this", "We", "Tonight I want to"]


class Case:
    def __init__(self, shape: tuple, dtype: torch.dtype, num_slots: int = 8) -> None:
        self.rank, self.size, down, rank2 = shape
        self.num_slots, self.dtype = num_slots, dtype
        first, second = 2 * self.size * self.rank, down[0] * down[1]
        pool = (torch.randn(num_slots, first + second + 64, device=DEVICE) * self.rank**-0.5).to(dtype)
        self.gate_up = pool[:, :first].view(num_slots, 2 * self.size, self.rank)
        self.down = pool[:, first : first + second].view(num_slots, *down)
        between = None if rank2 is None else torch.randn(rank2, self.size, device=DEVICE) * self.size**-0.5
        self.between = None if between is None else between.to(dtype)

    def inputs(self, num_tokens: int) -> tuple[torch.Tensor, ...]:
        x = torch.randn(num_tokens, 2 * self.rank, device=DEVICE).to(self.dtype)
        return x, *moe_route.route(torch.randn(num_tokens, 8, device=DEVICE), 2, True)


def check_twin(shape: tuple, dtype: torch.dtype) -> float:
    case, worst = Case(shape, dtype), 0.0
    wide = [None if t is None else t.float() for t in (case.gate_up, case.down, case.between)]
    for num_tokens in TOKENS:
        x, ids, weights = case.inputs(num_tokens)
        for slots in (ids, torch.full_like(ids, 7)):
            slots = torch.where(torch.arange(slots.numel(), device=DEVICE).view_as(slots) % 5 == 4, -1, slots).int()
            out = torch.full((num_tokens, 2, case.down.shape[1]), 7.0, device=DEVICE, dtype=dtype)
            moe_experts.expert_pairs(x, case.gate_up, case.down, slots, weights, out, between=case.between)
            expected = torch.full(out.shape, 7.0, device=DEVICE)
            moe.expert_pairs(x.float(), wide[0], wide[1], slots, weights, expected, between=wide[2])
            error = ((out.float() - expected).abs() / (1 + expected.abs())).max().item()
            assert error <= TOLERANCE[dtype], f"{shape} {dtype} {num_tokens} tokens: {error:.2e}"
            assert (out[slots < 0] == 7.0).all()
            worst = max(worst, error)
    return worst


def check_passes(shape: tuple) -> None:
    for num_tokens in (1, 2, 3, 17, 64, 129, 600):
        case = Case(shape, torch.bfloat16)
        far = Case(shape, torch.bfloat16, 20)
        elsewhere = torch.tensor([17, 2, 19, 0, 4, 15, 6, 11], device=DEVICE)
        far.gate_up[elsewhere], far.down[elsewhere] = case.gate_up, case.down
        x, ids, weights = case.inputs(num_tokens)
        whole = moe_experts.expert_pairs(x, case.gate_up, case.down, ids, weights, between=case.between)
        out = torch.full_like(whole, float("nan"))
        for some in ([3], [0, 7, 5], [1, 2, 4, 6]):
            slots = torch.where(torch.isin(ids, torch.tensor(some, device=DEVICE)), elsewhere[ids.long()], -1).int()
            moe_experts.expert_pairs(x, far.gate_up, far.down, slots, weights, out, between=case.between)
        assert torch.equal(out, whole), f"{shape} {num_tokens}: {(out != whole).float().mean():.1%} differ"


def check_graph(shape: tuple) -> None:
    for num_tokens in (1, 4, 40):
        case = Case(shape, torch.bfloat16)
        x, _, _ = case.inputs(num_tokens)
        logits = torch.randn(num_tokens, 8, device=DEVICE)
        out = torch.empty(num_tokens, case.down.shape[1], device=DEVICE, dtype=x.dtype)

        def layer(case=case, x=x, logits=logits, out=out) -> torch.Tensor:
            ids, weights = moe_route.route(logits, 2, True)
            pairs = moe_experts.expert_pairs(x, case.gate_up, case.down, ids, weights, between=case.between)
            return out.copy_(moe_route.sum_pairs(pairs))

        replay, _ = capture_graph(layer, None)
        for _ in range(3):
            x.normal_()
            logits.normal_()
            replay()
            got = out.clone()
            assert torch.equal(got, layer()), "a replay differs from a run"


def check_kernels() -> list[dict]:
    rows = []
    for shape in SHAPES:
        worst = {str(dtype): check_twin(shape, dtype) for dtype in TOLERANCE}
        check_passes(shape)
        check_graph(shape)
        rows.append({"shape": shape, "max_error": worst})
        print(json.dumps(rows[-1]), flush=True)
    return rows


# ---- the engine ------------------------------------------------------------------------------------------------------


def tokens(folder: Path, dtype: str, **options) -> list[list[int]]:
    llm = LLM(str(folder), dtype=dtype, gpu_memory_utilization=0.2, max_num_seqs=8, **options)
    found = []
    for seed in (None, 5):
        params = SamplingParams(temperature=0 if seed is None else 0.8, seed=seed, max_tokens=32, ignore_eos=True)
        for count in (1, 2, 3, 4):
            found += [o.outputs[0].token_ids for o in llm.generate(PROMPTS[:count], params, use_tqdm=False)]
    llm.close()
    return found


def check_engine() -> list[dict]:
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = copy_model(FIXTURE, Path(place) / "model")
        write_svd(folder, MIXED)
        for dtype in ("float32", "bfloat16"):
            expected = tokens(folder, dtype)
            for gb, more in (
                (0.0004, {}),
                (0.001, {}),
                (0.01, {"expert_policy": "lru"}),
                (0.001, {"expert_host_gb": 0.0}),
                (0.001, {"enforce_eager": True}),
                (0.001, {"expert_prefetch": False}),
            ):
                found = tokens(folder, dtype, expert_placement="offload", expert_cache_gb=gb, **more)
                equal = sum(a == b for a, b in zip(found, expected))
                rows.append({"dtype": dtype, "cache_gb": gb, **more, "equal": equal, "of": len(expected)})
                print(json.dumps(rows[-1]), flush=True)
        eager = tokens(folder, "bfloat16", enforce_eager=True)
        rows.append({"resident, eager": sum(a == b for a, b in zip(eager, tokens(folder, "bfloat16"))), "of": 20})
    assert all(row.get("equal", row["of"]) == row["of"] for row in rows)
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
    ring = 4  # slots that copies go through: 2 x top_k

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
    parser.add_argument("--only", default="kernels,engine,speed")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    parts = {"kernels": check_kernels, "engine": check_engine, "speed": lambda: check_speed(args.layers)}
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
