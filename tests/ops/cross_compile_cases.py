"""Compiles every Triton kernel for every architecture without a GPU; prints one JSON line per compilation.

Run as a script (`python cross_compile_cases.py 90 120 ...`) in a process of its own: a process that interprets Triton
kernels cannot compile them. `test_cross_compile.py` runs it and judges the lines.
"""

import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nanovllm.ops.triton import (
    activation,
    decode_attention,
    decode_state,
    gemv,
    lanes,
    moe_align,
    moe_gemm,
    moe_gemv,
    moe_grouped,
    moe_route,
    moe_tiles,
    norm,
    prefill_attention,
    qk_norm_rope,
    sampling,
    sampling_report,
    sampling_search,
)
from nanovllm.ops.triton.common import next_power_of_2

ALL_ARCHES = (75, 80, 86, 89, 90, 100, 120)


def compile_kernel(kernel, types: list[str], consts: dict, arch: int, num_warps: int = 4, num_stages: int = 1):
    """types: one per argument that is not a constexpr. Pointers and types ending in ":16" are multiples of 16."""
    signature, attrs, given = {}, {}, iter(types)
    for i, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in consts else next(given)
        if signature[name].startswith("*") or signature[name].endswith(":16"):
            signature[name] = signature[name].removesuffix(":16")
            attrs[(i,)] = [["tt.divisibility", 16]]
    assert next(given, None) is None, f"{kernel.fn.__name__}: more types than arguments"
    constexprs = {(kernel.arg_names.index(name),): value for name, value in consts.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    target = GPUTarget("cuda", arch, 32)
    return triton.compile(source, target=target, options={"num_warps": num_warps, "num_stages": num_stages})


def capability_of(arch: int) -> tuple[int, int]:
    return divmod(arch, 10)


def prefill_case(dtype: str, head_dim: int, block_size: int, window: int, group: int):
    def run(arch: int):
        size = 4 if dtype == "fp32" else 2
        tile = prefill_attention.choose_tile(head_dim, size, block_size, capability_of(arch))
        cache = f"tensordesc<{dtype}[{tile.block_n}, {head_dim}]>" if tile.use_desc else f"*{dtype}"
        types = [f"*{dtype}"] * 3 + [cache] * 2 + [f"*{dtype}"] + ["*i32"] * 3
        types += ["fp32", "i32", "i32"] + ["i32:16"] * 4 + ["i32"]
        consts = {"NUM_KV_HEADS": 3, "GROUP": group, "HEAD_DIM": head_dim, "D": next_power_of_2(head_dim)}
        consts |= {"BLOCK_SIZE": block_size, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
        consts |= {"WINDOW": window, "USE_DESC": tile.use_desc}
        return compile_kernel(prefill_attention.prefill_kernel, types, consts, arch, tile.num_warps, tile.num_stages)

    return run


def decode_case(dtype: str, head_dim: int, block_size: int, window: int, batch: int = 1):
    def run(arch: int):
        size = 4 if dtype == "fp32" else 2
        launch = decode_attention.choose_launch(batch, 8, 4096, 132)
        fitted = decode_attention.fit_launch(launch, head_dim, size, capability_of(arch))
        types = [f"*{dtype}"] * 4 + ["*fp32", "*fp32", "*i32", "*i32"] + ["fp32"]
        types += ["i32:16"] * 4 + ["i32"] * 2
        consts = {"NUM_KV_HEADS": 3, "GROUP": 3, "ROWS": 16, "HEAD_DIM": head_dim, "D": next_power_of_2(head_dim)}
        consts |= {"BLOCK_SIZE": block_size, "BLOCK_N": fitted.block_n, "STEP": 64, "WINDOW": window}
        kernel = decode_attention.decode_kernel
        return compile_kernel(kernel, types, consts, arch, fitted.num_warps, fitted.num_stages)

    return run


def merge_case(dtype: str):
    consts = {"NUM_Q_HEADS": 9, "HEAD_DIM": 80, "D": 128, "STEP": 64, "WINDOW": 0, "TILE": 16}
    types = ["*fp32", "*fp32", f"*{dtype}", "*i32", "i32"]
    return lambda arch: compile_kernel(decode_attention.merge_kernel, types, consts, arch, 2)


def rope_case(dtype: str, head_dim: int, rot_dim: int, has_norm: bool):
    rest = next_power_of_2(head_dim - rot_dim) if rot_dim < head_dim else 0
    consts = {"NUM_Q_HEADS": 9, "NUM_KV_HEADS": 3, "HEAD_DIM": head_dim, "ROT_DIM": rot_dim, "BLOCK_SIZE": 16}
    consts |= {"HEADS": 8, "HALF": next_power_of_2(rot_dim // 2), "REST": rest, "HAS_NORM": has_norm}
    types = [f"*{dtype}"] * 3 + ["*fp32", "*i64", "*i64"] + [f"*{dtype}"] * 3 + ["i32:16"] * 4 + ["fp32"]
    return lambda arch: compile_kernel(qk_norm_rope.qk_norm_rope_kernel, types, consts, arch, 4)


def gemv_case(dtype: str, rows: int, size: int, fused: bool):
    consts = {"SIZE": size, "NUM_ROWS": rows, "ROWS": next_power_of_2(rows), "BLOCK_N": 2, "BLOCK_K": 512}
    consts |= {"HAS_BIAS": not fused, "HAS_NORM": fused, "GATED": fused, "HAS_RESIDUAL": not fused}
    types = [f"*{dtype}"] * 6 + ["i32:16", "i32:16", "i32", "fp32"]
    return lambda arch: compile_kernel(gemv.gemv_kernel, types, consts, arch, 1)


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def moe_cases(dtype: str, arch: int, sizes: tuple[int, ...], low_rank: bool = False) -> dict:
    """Both products of an expert as the rule cuts them for so many tokens: its tiles depend on shared memory. Of a
    low-rank expert: gate and up that read halves, and the product between."""
    d, cases, kind = f"*{dtype}", {}, " low-rank" if low_rank else ""
    hidden, size, down = (1024, 14336, (4096, 1024)) if low_rank else (4096, 14336, None)
    for num_tokens in sizes:
        shape = moe_tiles.MoeShape(hidden, size, 2, DTYPES[dtype], down)
        plan = moe_tiles.default_tiles(num_tokens, shape, capability_of(arch))
        if plan.kind == "grouped":  # what the rule would take without PyTorch's product
            plan = moe_tiles.default_tiles(num_tokens, moe_tiles.MoeShape(hidden, size, 2, torch.float16), (9, 0))
        for name, kernel, types, consts, tile in (
            (
                "gate_up",
                moe_gemm.gate_up_kernel,
                [d, d] + ["*i32"] * 3 + [d, "i32:16", "i32:16"],
                {"SIZE": hidden, "OUT_SIZE": size, "TOP_K": 2, "SPLIT": low_rank},
                plan.gate_up,
            ),
            (
                "down",
                moe_gemm.down_kernel,
                [d, d] + ["*i32"] * 3 + [d if low_rank else "*fp32", d, "i32:16"],
                {"SIZE": size, "OUT_SIZE": hidden, "SHARED": low_rank},
                plan.down,
            ),
        ):
            options = moe_gemm.launch_options(plan.block_m, consts["SIZE"], tile)
            stages = {"num_warps": options.pop("num_warps"), "num_stages": options.pop("num_stages")}
            cases[f"moe_{name}{kind} {dtype} {num_tokens}"] = (
                lambda arch, kernel=kernel, types=types, consts=consts | options, stages=stages: compile_kernel(
                    kernel, types, consts, arch, **stages
                )
            )
    return cases


def moe_small_cases(dtype: str) -> dict:
    d, ints = f"*{dtype}", ["*i32"] * 6 + ["i32"] * 3
    route = {"NUM_EXPERTS": 60, "E": 64, "TOP_K": 6, "K": 8, "RENORMALISE": True}
    sizes = {"BUFFERS": 128, "CHUNK": 64}
    place = sizes | {"ROWS": 16, "BLOCK_M": 16}
    blocks = {"BLOCK_N": 1, "BLOCK_K": 512}
    plain = {
        "moe_route": (moe_route.route_kernel, [d, "*i32", "*fp32", "i32"], route, 1),
        "moe_sum": (moe_route.sum_pairs_kernel, [d, d], {"SIZE": 4096, "TOP_K": 2, "TILE": 1024}, 4),
        "moe_count": (moe_align.count_kernel, ["*i32", "*i32", "i32", "i32", "i32"], sizes, 8),
        "moe_place": (moe_align.place_kernel, ints, place | {"COUNTED": True}, 8),
        "moe_place one": (moe_align.place_kernel, ints, place | {"COUNTED": False}, 8),
        "moe_gemv gate_up": (moe_gemv.gate_up_gemv_kernel, [d, d, "*i32", d, "i32:16", "i32:16"],
                             {"SIZE": 4096, "OUT_SIZE": 14336, "TOP_K": 2, "SPLIT": False} | blocks, 1),
        "moe_gemv split": (moe_gemv.gate_up_gemv_kernel, [d, d, "*i32", d, "i32:16", "i32:16"],
                           {"SIZE": 1024, "OUT_SIZE": 14336, "TOP_K": 2, "SPLIT": True} | blocks, 1),
        "moe_gemv down": (moe_gemv.down_gemv_kernel, [d, d, "*i32", "*fp32", d, "i32:16"],
                          {"SIZE": 14336, "OUT_SIZE": 4096, "SHARED": False} | blocks, 1),
        "moe_gemv between": (moe_gemv.down_gemv_kernel, [d, d, "*i32", d, d, "i32:16"],
                             {"SIZE": 14336, "OUT_SIZE": 1024, "SHARED": True} | blocks, 1),
        "moe_gather": (moe_grouped.gather_kernel, [d, "*i32", "*i32", d, "i32", "i32:16"],
                       {"SIZE": 4096, "TOP_K": 2, "TILE": 2048}, 4),
        "moe_scatter": (moe_grouped.scatter_kernel, [d, "*i32", "*i32", "*fp32", d, "i32"],
                        {"SIZE": 4096, "TILE": 2048}, 4),
    }  # fmt: skip
    return {
        f"{name} {dtype}": (lambda arch, case=case: compile_kernel(case[0], case[1], case[2], arch, case[3]))
        for name, case in plain.items()
    }


def small_cases(dtype: str, names: tuple[str, ...] = ()) -> dict:
    """The elementwise kernels, the sampler and the state updates; all, or those named."""
    d = f"*{dtype}"
    norm_consts = {"SIZE": 576, "TILE": 1024, "HAS_RESIDUAL": True}
    sampler = ["*fp32", "*i32", "*i32", "*i16", "*i32", "*i32", "*i64", "*i64"]  # the SamplerState
    sizes, tiles = ["i32", "i32", "i32"], ["*fp32", "*fp32"]
    lists = ["*i32", "*fp32", "*i32"]
    state = ["*i64", "*i64", "*i64", "*i32", "*i64", "*i32", "*i64", "*i32"] + ["i32"] * 5
    lane_types = ["*i32"] * 3 + ["*i64", "*i32", "*i64", "*i64", "*i32", "*i64", "*i32"] + ["i32"] * 3
    plain = {
        "norm": (norm.norm_kernel, [d] * 5 + ["i32", "i32", "fp32"], norm_consts),
        "silu": (activation.silu_mul_kernel, [d, d, "i32", "i32"], {"TILE": 1024}),
        "sample tiles": (sampling.tiles_kernel, [d, "*i32", "*i32", *tiles, *tiles, *sizes, *sampler], {"TILES": 16}),
        "sample pick": (
            sampling.pick_kernel,
            [d, "*i32", "*i32", *tiles, *lists, "*i64", *sizes, "*i64", *sampler],
            {"ALL_TILES": 1024},
        ),
        "sample search": (
            sampling_search.search_kernel,
            [d, "*i32", "*i32", *tiles, "*i64", *sizes, "*i64", *sampler],
            {"ALL_TILES": 1024, "BLOCK": 8192},
        ),
        "sample report": (
            sampling_report.report_kernel,
            [d, "*i32", "*i64", *tiles, *lists, "i32", "*fp32", "*i32", "i32", *sizes, "*i32"],
            {"ALL_TILES": 1024, "BLOCK": 4096, "WIDTH": 21},
        ),
        "advance": (decode_state.advance_kernel, state, {"BLOCK_SIZE": 16, "TILE": 256}),
        "begin": (lanes.begin_kernel, lane_types, {"BLOCK_SIZE": 16, "TILE": 128}),
        "keep": (lanes.keep_kernel, ["*i32", "*i64", "*i64", "i32"], {"TILE": 256}),
    }
    return {
        f"{name} {dtype}": (lambda arch, case=case: compile_kernel(case[0], case[1], case[2], arch))
        for name, case in plain.items()
        if not names or name in names
    }


def attention_shapes(arch: int) -> list[tuple[int, int, int]]:
    """(head_dim, block_size, window): first all at once, the largest tile, padded, gathered page by page, in a window.

    86 and 89 get no more shapes of attention: they run what 80 runs, in less shared memory. The other families also
    compile whole tiles, and the two with the most rules (90 has the copy engine) small and padded heads.
    """
    shapes = [(192, 16, 100)]
    if arch not in (86, 89):
        shapes.append((128, 256, 0))
    if arch in (80, 90):
        shapes.append((64, 64, 100))
    if arch == 90:
        shapes.append((80, 16, 0))
    return shapes


def cases_for(arch: int) -> dict:
    """name -> compile(arch). Turing has no bf16 arithmetic worth using: fp16 there, as engines do."""
    half = "fp16" if arch < 80 else "bf16"
    cases = {}
    for shape in attention_shapes(arch):
        cases[f"prefill {half} {shape}"] = prefill_case(half, *shape, 3)
        cases[f"decode {half} {shape}"] = decode_case(half, *shape)
    cases[f"decode 64 rows {half}"] = decode_case(half, 128, 64, 0, batch=64)
    cases["merge"] = merge_case(half)
    cases.update(moe_cases(half, arch, (3, 17, 65, 129, 513) if arch in (80, 90) else (17, 513)))
    cases.update(moe_cases(half, arch, (513,), low_rank=True))
    # The sampler's other kernels take most of the time, 20 s on two cores for each architecture, and neither their
    # tiles nor their instructions depend on it: one family on each side of bf16 and asynchronous copies stands for all.
    some = ("advance", "begin", "keep", "norm", "silu", "sample tiles")
    cases.update(small_cases(half, () if arch in (75, 90) else some))
    cases.update(moe_small_cases(half))
    cases[f"rope {half}"] = rope_case(half, 128, 128, True)
    cases[f"gemv {half}"] = gemv_case(half, 1, 1024, True)
    if arch in (75, 90):
        cases[f"rope partial {half}"] = rope_case(half, 80, 32, False)
        cases[f"gemv rows {half}"] = gemv_case(half, 3, 576, False)
    if arch == 90:
        cases.update(moe_cases("fp32", arch, (17,)))
        cases["prefill fp32"] = prefill_case("fp32", 64, 16, 0, 3)
        cases["decode fp32"] = decode_case("fp32", 64, 16, 0)
        cases.update(small_cases("fp32", ("norm", "silu", "sample tiles")))
    return cases


def run_one(job: tuple[int, str]) -> dict:
    arch, name = job
    start = time.perf_counter()
    result: dict = {"arch": arch, "name": name}
    try:
        kernel = cases_for(arch)[name](arch)
        result["shared"] = kernel.metadata.shared
        result["cubin_bytes"] = len(kernel.asm["cubin"])
    except Exception as error:  # every failure is a line of its own; the test judges them
        result["error"] = f"{type(error).__name__}: {error}"[:2000]
    result["seconds"] = round(time.perf_counter() - start, 2)
    return result


def main() -> None:
    arches = [int(a) for a in sys.argv[1:]] or list(ALL_ARCHES)
    jobs = [(arch, name) for arch in arches for name in cases_for(arch)]
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        for result in pool.map(run_one, jobs):
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
