"""Compiles every Triton kernel for every architecture without a GPU; prints one JSON line per compilation.

Run as a script (`python cross_compile_cases.py 90 120 ...`) in a process of its own: a process that interprets Triton
kernels cannot compile them. `test_cross_compile.py` runs it and judges the lines.
"""

import json
import os
import re
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
    drafts,
    few_rows,
    fp8,
    gemv,
    integers,
    integers_matmul,
    integers_round,
    lanes,
    matmul,
    mla_absorb,
    mla_decode,
    mla_prefill,
    mla_rope,
    moe_align,
    moe_gemm,
    moe_gemv,
    moe_grouped,
    moe_integers,
    moe_route,
    moe_tiles,
    norm,
    prefill_attention,
    qk_norm_rope,
    sampling,
    sampling_report,
    sampling_search,
    splits,
)
from nanovllm.ops.triton.common import next_power_of_2
from nanovllm.ops.triton.e4m3 import BY_CARD, BY_SHIFTS, PLAIN

ALL_ARCHES = (75, 80, 86, 89, 90, 100, 120)


def compile_kernel(kernel, types: list[str], consts: dict, arch: int, num_warps: int = 4, num_stages: int = 1):
    """types: one per argument that is not a constexpr. Pointers and types ending in ":16" are multiples of 16."""
    signature, attrs, given = {}, {}, iter(types)
    if "DEPENDENT" in kernel.arg_names:
        consts = {**consts, "DEPENDENT": arch >= 90}
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


def kv_form(arch: int, e4m3: bool) -> tuple[dict, str | None, list[str]]:
    """(constexprs, type of the caches where it is not the model's, types of the scales)."""
    if not e4m3:
        return {"FORM": PLAIN, "scales_ptr": None}, None, []
    return {"FORM": BY_CARD if arch >= 89 else BY_SHIFTS}, "*u8", ["*fp32"]


def prefill_case(dtype: str, head_dim: int, block_size: int, window: int, group: int, e4m3: bool = False):
    def run(arch: int):
        size = 4 if dtype == "fp32" else 2
        tile = prefill_attention.choose_tile(head_dim, size, block_size, capability_of(arch))
        form, cache, scales = kv_form(arch, e4m3)
        use_desc = tile.use_desc and not e4m3
        read = f"tensordesc<{dtype}[{tile.block_n}, {head_dim}]>" if use_desc else cache or f"*{dtype}"
        types = [f"*{dtype}"] + [cache or f"*{dtype}"] * 2 + [read] * 2 + scales + [f"*{dtype}"] + ["*i32"] * 3
        types += ["fp32", "i32", "i32"] + ["i32:16"] * 4 + ["i32"]
        consts = {"NUM_KV_HEADS": 3, "GROUP": group, "HEAD_DIM": head_dim, "D": next_power_of_2(head_dim)}
        consts |= {"BLOCK_SIZE": block_size, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
        consts |= {"WINDOW": window, "USE_DESC": use_desc, **form}
        return compile_kernel(prefill_attention.prefill_kernel, types, consts, arch, tile.num_warps, tile.num_stages)

    return run


def decode_case(dtype: str, head_dim: int, block_size: int, window: int, batch: int = 1, e4m3: bool = False):
    def run(arch: int):
        size = 4 if dtype == "fp32" else 2
        launch = decode_attention.choose_launch(batch, 8, 4096, 132)
        fitted = decode_attention.fit_launch(launch, head_dim, size, capability_of(arch))
        form, cache, scales = kv_form(arch, e4m3)
        types = [f"*{dtype}"] + [cache or f"*{dtype}"] * 2 + scales + [f"*{dtype}", "*fp32", "*fp32", "*i32", "*i32"]
        types += ["fp32"]
        types += ["i32:16"] * 4 + ["i32"] * 2
        consts = {"NUM_KV_HEADS": 3, "GROUP": 3, "ROWS": 16, "HEAD_DIM": head_dim, "D": next_power_of_2(head_dim)}
        consts |= {"BLOCK_SIZE": block_size, "BLOCK_N": fitted.block_n, "STEP": 64, "WINDOW": window, **form}
        consts |= {"PREFETCH": launch.prefetch}
        kernel = decode_attention.decode_kernel
        return compile_kernel(kernel, types, consts, arch, fitted.num_warps, fitted.num_stages)

    return run


def merge_case(dtype: str):
    consts = {"NUM_Q_HEADS": 9, "HEAD_DIM": 80, "D": 128, "STEP": 64, "WINDOW": 0, "TILE": 16}
    types = ["*fp32", "*fp32", f"*{dtype}", "*i32", "i32"]
    kernel = decode_attention.merge_kernel
    return lambda arch: compile_kernel(kernel, types, consts, arch, 2)


def rope_case(dtype: str, head_dim: int, rot_dim: int, has_norm: bool, e4m3: bool = False, parts: int = 1):
    rest = next_power_of_2(head_dim - rot_dim) if rot_dim < head_dim else 0
    consts = {"NUM_Q_HEADS": 9, "NUM_KV_HEADS": 3, "HEAD_DIM": head_dim, "ROT_DIM": rot_dim, "BLOCK_SIZE": 16}
    consts |= {"HEADS": 8, "HALF": next_power_of_2(rot_dim // 2), "REST": rest, "HAS_NORM": has_norm, "PARTS": parts}
    consts |= {"E4M3": e4m3} if e4m3 else {"E4M3": e4m3, "scales_ptr": None}
    stored = [f"*{dtype}"] + (["*u8", "*u8", "*fp32"] if e4m3 else [f"*{dtype}"] * 2)
    product = f"*{dtype}" if parts == 1 else "*fp32"
    types = [product] + [f"*{dtype}"] * 2 + ["*fp32", "*i64", "*i64"] + stored + ["i32:16"] * 5 + ["fp32"]
    kernel = qk_norm_rope.qk_norm_rope_kernel
    return lambda arch: compile_kernel(kernel, types, consts, arch, 4)


def mla_cases(dtype: str, arch: int, heads: int) -> dict:
    """Latent attention of the published models: 512 + 64 numbers a token, heads of 128 + 64 and 128."""
    d, size = f"*{dtype}", 4 if dtype == "fp32" else 2
    launch = mla_decode.fit_launch(mla_decode.choose_launch(32, 4096, 132), size, capability_of(arch))
    sizes = (128, 64, 128, 128, 64, 128)
    tile = mla_prefill.choose_tile(sizes, size, capability_of(arch))
    decode = {"NUM_HEADS": heads, "ROWS": 16, "RANK": 512, "C": 512, "ROPE": 64, "R": 64, "BLOCK_SIZE": 64}
    decode |= {"BLOCK_N": launch.block_n, "STEP": 64}
    decode_types = [d] * 4 + ["*fp32", "*fp32", "*i32", "*i32", "fp32"] + ["i32:16"] * 6 + ["i32"] * 2
    rope = {"NUM_HEADS": heads, "RANK": 512, "C": 512, "HALF": 32, "H": 32, "BLOCK_SIZE": 64, "HEADS": 16}
    rope |= {"INTERLEAVED": True}
    rope_types = [d] * 3 + ["*fp32", "*i64", "*i64"] + [d] * 3 + ["i32:16"] * 5 + ["fp32"]
    piece = {"NUM_HEADS": heads, "SIZES": sizes, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    piece_types = [d] * 5 + ["*fp32", "*i32", "*i32", "fp32", "i32", "i32"] + ["i32:16"] * 6
    absorb = {"NUM_HEADS": heads, "NOPE": 128, "N": 128, "RANK": 512, "COLUMNS": 64}
    project = {"NUM_HEADS": heads, "V": 128, "RANK": 512, "C": 512, "OUTPUTS": 16, "STEP": 64, "TILE": 8}
    project_types = ["*fp32", "*fp32", "*i32", d, d, "i32", "i32:16"]
    plain = {
        "mla_decode": (mla_decode.latent_decode_kernel, decode_types, decode, launch.num_warps, launch.num_stages),
        "mla_absorb": (mla_absorb.absorb_kernel, [d] * 3 + ["i32:16"] * 3, absorb, 4, 1),
        "mla_project": (mla_absorb.project_kernel, project_types, project, 4, 1),
        "mla_rope": (mla_rope.latent_rope_kernel, rope_types, rope, 4, 1),
        "mla_piece": (
            mla_prefill.latent_piece_kernel,
            piece_types,
            piece | {"CAUSAL": True},
            tile.num_warps,
            tile.num_stages,
        ),
    }
    return {
        f"{name} {dtype}": (lambda arch, case=case: compile_kernel(case[0], case[1], case[2], arch, case[3], case[4]))
        for name, case in plain.items()
    }


def gemv_case(dtype: str, rows: int, size: int, fused: bool, weight: str = "", scaled: int = 0):
    consts = {"SIZE": size, "NUM_ROWS": rows, "ROWS": next_power_of_2(rows), "BLOCK_N": 2, "BLOCK_K": 512}
    consts |= {"HAS_BIAS": not fused, "HAS_NORM": fused, "GATED": fused, "HAS_RESIDUAL": not fused, "SCALED": scaled}
    d = f"*{dtype}"
    types = [d, f"*{weight or dtype}", "*fp32" if scaled else d, d, d, d, d, "i32:16", "i32:16", "i32", "fp32"]
    return lambda arch: compile_kernel(gemv.gemv_kernel, types, consts, arch, 1)


def few_rows_case(dtype: str, size: int, gated: bool):
    block_n, block_k, slices = few_rows.choose_tile(1024, size)
    consts = {"SIZE": size, "BLOCK_M": 8, "BLOCK_N": block_n, "BLOCK_K": block_k, "SLICES": slices}
    consts |= {"HAS_BIAS": not gated, "HAS_NORM": gated, "GATED": gated, "HAS_RESIDUAL": not gated}
    types = [f"*{dtype}"] * 6 + ["i32", "i32:16", "i32:16", "i32:16", "fp32"]
    return lambda arch: compile_kernel(few_rows.few_rows_kernel, types, consts, arch, slices)


def matmul_case(dtype: str, rows: int, gated: bool = False):
    """As the rule cuts it for Qwen3-0.6B."""
    launch = matmul.choose_launch(rows, 1024, 2048, gated)
    tiles = [f"tensordesc<{dtype}[{n}, {launch.block_k}]>" for n in (launch.block_m, matmul.BLOCK_N)]
    out = f"*{dtype}" if launch.splits == 1 else "*fp32"
    consts = {"BLOCK_M": launch.block_m, "BLOCK_N": matmul.BLOCK_N, "BLOCK_K": launch.block_k, "HAS_BIAS": True}
    types = [*tiles, f"*{dtype}", out, "i32", "i32:16", "i32"]
    options = (4, launch.num_stages)
    return lambda arch: compile_kernel(matmul.matmul_kernel, types, {**consts, "GATED": gated}, arch, *options)


def quantise_case(dtype: str, groups: int, group: int):
    consts = {"SIZE": 4096, "GROUPS": groups, "GROUP": group, "MOST": 448.0, "TINY": 1e-12}
    types = [f"*{dtype}", "*fp8e4nv", "*fp32", "i32:16", "i32"]
    return lambda arch: compile_kernel(fp8.quantise_kernel, types, consts, arch, 8)


def integer_gemv_case(dtype: str, rows: int, size: int, fused: bool, bits: int, groups: int):
    form = (size, bits, groups, *integers.dot_code(bits, groups))
    block_n, block_w, warps = integers.choose_block(form, rows, fused)
    consts = {"FORM": form, "NUM_ROWS": rows, "BLOCK_N": block_n, "BLOCK_W": block_w, "HAS_BIAS": not fused}
    consts |= {"GATED": fused, "HAS_RESIDUAL": not fused}
    d = f"*{dtype}"
    types = ["*i32", "*fp32", "*fp32", "*i64", "*i32", d, d, d, "i32:16"]
    return lambda arch: compile_kernel(integers.integer_gemv_kernel, types, consts, arch, warps)


def unpacking(dtype: str, bits: int, groups: int) -> dict:
    return {"FORM": (4096, bits, groups, *integers_matmul.unpack_code(bits, groups, DTYPES[dtype]))}


def integer_cases(dtype: str, arch: int) -> dict:
    """With tensor cores: as the rule cuts them. The largest tile everywhere, for its shared memory; the rest where all
    kernels are compiled."""
    d, cases, is_all = f"*{dtype}", {}, arch in (80, 90)
    types = [d, "*i32", "*i32", d, d, "i32", "i32:16", "i32:16", "i32"]
    for rows, form in ((256, (4, 1)), (8, (4, 4)), (64, (8, 4))) if is_all else ((256, (4, 1)),):
        block_m, block_n, *options = integers_matmul.choose_tile(rows, 4096, 4096)
        consts = {**unpacking(dtype, *form), "BLOCK_M": block_m, "BLOCK_N": block_n, "HAS_BIAS": True}
        use_desc = arch >= 90 and block_m >= integers_matmul.DESC_ROWS
        x = f"tensordesc<{dtype}[{block_m}, {512 // form[0]}]>" if use_desc else d
        case = ([x, *types[1:]], {**consts, "USE_DESC": use_desc}, arch, *options)
        cases[f"integer_matmul {dtype} {rows}"] = lambda arch, case=case: compile_kernel(
            integers_matmul.integer_matmul_kernel, *case
        )
    pair_types = [d, "*i32", "*i32", "*i32", "*i32", "*i32", "*fp32", d] + ["i32:16"] * 3
    for tokens, form in ((512, (4, 1)), (8, (4, 4))) if is_all else ((512, (4, 1)),):
        block_m, block_n, *options = moe_integers.choose_tile(tokens, 2)
        consts = {**unpacking(dtype, *form), "OUT_SIZE": 14336, "TOP_K": 2, "GATED": True, "GROUP": 8}
        consts |= {"BLOCK_M": block_m, "BLOCK_N": block_n}
        cases[f"moe_integers {dtype} {tokens}"] = lambda arch, consts=consts, options=options: compile_kernel(
            moe_integers.pair_matmul_kernel, pair_types, consts, arch, *options
        )
    return cases


def integer_small_cases(dtype: str, arch: int) -> dict:
    d = f"*{dtype}"
    pairs = {"FORM": (4096, 4, 4, *integers.dot_code(4, 4)), "OUT_SIZE": 14336, "PAIRS_PER_ROW": 2, "GATED": True}
    pairs |= {"BLOCK_N": 4, "BLOCK_W": 64}
    pair_types = ["*i32", "*fp32", "*fp32", "*i64", "*i32", "*i32", "*fp32", d, "i32:16", "i32:16"]
    rounding = {"SIZE": 4096, "BITS": 4, "GROUPS": 4, "BLOCKS": 8, "ROW": 4096, "HAS_NORM": True, "HAS_ORDER": True}
    expanding = {**unpacking(dtype, 8, 2), "BLOCK_N": 64}
    if arch < 80:  # tensor cores are not used there, nor is bfloat16, whose PTX is of sm_80 and later
        expanding = {**unpacking(dtype, 4, 2), "BLOCK_N": 64}
    return {
        f"integer_gemv {dtype}": integer_gemv_case(dtype, 1, 1024, True, 4, 1),
        f"integer_gemv rows {dtype}": integer_gemv_case(dtype, 2, 4096 + 32, False, 8, 2),
        f"moe_integer_gemv {dtype}": lambda arch: compile_kernel(
            moe_integers.pair_gemv_kernel, pair_types, pairs, arch, 1
        ),
        f"integer_round {dtype}": lambda arch: compile_kernel(
            integers_round.round_kernel, [d, d, "*i64", "*i8", "*fp32", "*fp32", "i32:16", "fp32"], rounding, arch
        ),
        f"integer_expand {dtype}": lambda arch: compile_kernel(
            integers_matmul.expand_kernel, ["*i32", "*i32", d, "i32", "i32:16", "i32:16"], expanding, arch
        ),
        f"integer_splits {dtype}": lambda arch: compile_kernel(
            splits.add_splits_kernel, ["*fp32", d, "i32", "i32"], {"TILE": 512}, arch
        ),
    }


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def weight_form(dtype: str, arch: int, scaled: int) -> tuple[list[str], dict, str]:
    """(types of a weight and its scales, constexprs, words). `scaled`: 0 = numbers; 1, 128 = 8-bit floats."""
    if not scaled:
        return [f"*{dtype}"] * 2, {"FORM": PLAIN, "SCALED": 0}, ""
    return ["*u8", "*fp32"], {"FORM": BY_CARD if arch >= 89 else BY_SHIFTS, "SCALED": scaled}, f" e4m3 by {scaled}"


def moe_cases(dtype: str, arch: int, sizes: tuple[int, ...], low_rank: bool = False, scaled: int = 0) -> dict:
    """Both products of an expert as the rule cuts them for so many tokens: its tiles depend on shared memory. Of a
    low-rank expert: gate and up that read halves, and the product between."""
    weight, form, words = weight_form(dtype, arch, scaled)
    d, cases, kind = f"*{dtype}", {}, " low-rank" if low_rank else words
    hidden, size, down = (1024, 14336, (4096, 1024)) if low_rank else (4096, 14336, None)
    for num_tokens in sizes:
        shape = moe_tiles.MoeShape(hidden, size, 2, DTYPES[dtype], down, scaled > 0)
        plan = moe_tiles.default_tiles(num_tokens, shape, capability_of(arch))
        if plan.kind == "grouped":  # what the rule would take without PyTorch's product
            plan = moe_tiles.default_tiles(num_tokens, moe_tiles.MoeShape(hidden, size, 2, torch.float16), (9, 0))
        for name, kernel, types, consts, tile in (
            (
                "gate_up",
                moe_gemm.gate_up_kernel,
                [d, *weight] + ["*i32"] * 3 + [d] + ["i32:16"] * 3,
                {"SIZE": hidden, "OUT_SIZE": size, "TOP_K": 2, "SPLIT": low_rank, **form},
                plan.gate_up,
            ),
            (
                "down",
                moe_gemm.down_kernel,
                [d, *weight] + ["*i32"] * 3 + [d if low_rank else "*fp32", d] + ["i32:16"] * 2,
                {"SIZE": size, "OUT_SIZE": hidden, "SHARED": low_rank, **form},
                plan.down,
            ),
        ):
            options = moe_gemm.launch_options(plan.block_m, consts["SIZE"], tile, scaled)
            stages = {"num_warps": options.pop("num_warps"), "num_stages": options.pop("num_stages")}
            cases[f"moe_{name}{kind} {dtype} {num_tokens}"] = (
                lambda arch, kernel=kernel, types=types, consts=consts | options, stages=stages: compile_kernel(
                    kernel, types, consts, arch, **stages
                )
            )
    return cases


def moe_small_cases(dtype: str) -> dict:
    d, ints = f"*{dtype}", ["*i32"] * 6 + ["i32"] * 3
    route = {"NUM_EXPERTS": 60, "NUM_GROUPS": 1, "TOP_GROUPS": 1, "GROUPS": 1, "SIZE": 64, "TOP_K": 6, "K": 8}
    route |= {"RENORMALISE": True, "SIGMOID": False}
    groups = route | {"NUM_GROUPS": 5, "TOP_GROUPS": 2, "GROUPS": 8, "SIZE": 16, "SIGMOID": True}
    routed = [d, "*fp32", "*i32", "*fp32", "i32", "fp32"]
    sizes = {"BUFFERS": 128, "CHUNK": 64}
    place = sizes | {"ROWS": 16, "BLOCK_M": 16}
    plain = {
        "moe_route": (moe_route.route_kernel, routed, route, 1),
        "moe_route groups": (moe_route.route_kernel, routed, groups, 1),
        "moe_sum": (moe_route.sum_pairs_kernel, [d] * 3, {"SIZE": 4096, "TOP_K": 2, "TILE": 1024, "HAS_MORE": True}, 4),
        "moe_count": (moe_align.count_kernel, ["*i32", "*i32", "i32", "i32", "i32"], sizes, 8),
        "moe_place": (moe_align.place_kernel, ints, place | {"COUNTED": True}, 8),
        "moe_place one": (moe_align.place_kernel, ints, place | {"COUNTED": False}, 8),
        "moe_gather": (moe_grouped.gather_kernel, [d, "*i32", "*i32", d, "i32", "i32:16"],
                       {"SIZE": 4096, "TOP_K": 2, "TILE": 2048}, 4),
        "moe_scatter": (moe_grouped.scatter_kernel, [d, "*i32", "*i32", "*fp32", d, "i32"],
                        {"SIZE": 4096, "TILE": 2048}, 4),
    }  # fmt: skip
    return {
        f"{name} {dtype}": (lambda arch, case=case: compile_kernel(case[0], case[1], case[2], arch, case[3]))
        for name, case in plain.items()
    }


def moe_gemv_cases(dtype: str, arch: int) -> dict:
    """Mixtral's experts as numbers and as 8-bit floats, and low-rank ones."""
    d, cases = f"*{dtype}", {}
    for scaled in (0, 1, 128):
        weight, form, words = weight_form(dtype, arch, scaled)
        blocks = {"BLOCK_N": 2, "BLOCK_K": 2048, **form} if scaled else {"BLOCK_N": 1, "BLOCK_K": 512, **form}
        gate_up = [d, *weight, "*i32", d] + ["i32:16"] * 3
        whole = {"SIZE": 4096, "OUT_SIZE": 14336, "TOP_K": 2, "SPLIT": False} | blocks
        cases[f"gate_up{words}"] = (moe_gemv.gate_up_gemv_kernel, gate_up, whole)
        down = [d, *weight, "*i32", "*fp32", d] + ["i32:16"] * 2
        cases[f"down{words}"] = (
            moe_gemv.down_gemv_kernel,
            down,
            {"SIZE": 14336, "OUT_SIZE": 4096, "SHARED": False} | blocks,
        )
        if not scaled:
            cases["split"] = (moe_gemv.gate_up_gemv_kernel, gate_up, whole | {"SIZE": 1024, "SPLIT": True})
            between = [*down[:4], d, d, *down[6:]]
            sizes = {"SIZE": 14336, "OUT_SIZE": 1024, "SHARED": True} | blocks
            cases["between"] = (moe_gemv.down_gemv_kernel, between, sizes)
    return {
        f"moe_gemv {name} {dtype}": (lambda arch, case=case: compile_kernel(*case, arch, 1))
        for name, case in cases.items()
    }


def small_cases(dtype: str, names: tuple[str, ...] = ()) -> dict:
    """The elementwise kernels, the sampler and the state updates; all, or those named."""
    d = f"*{dtype}"
    norm_consts = {"SIZE": 576, "TILE": 1024, "HAS_RESIDUAL": True}
    norm_types = [*[d] * 4, "i32", "i32", "i32", "fp32"]
    sampler = ["*fp32", "*i32", "*i32", "*i16", "*i32", "*i32", "*i64", "*i64"]  # the SamplerState
    sizes, tiles = ["i32", "i32", "i32"], ["*fp32", "*fp32"]
    lists = ["*i32", "*fp32", "*i32"]
    state = ["*i64", "*i64", "*i64", "*i32", "*i64", "*i32", "*i64", "*i32", "*i32", "*i32"] + ["i32"] * 5
    lane_types = ["*i32"] * 3 + ["*i64", "*i32", "*i32", "*i64", "*i64", "*i32", "*i64", "*i32"] + ["i32"] * 3
    proposed = ["*i32", "*i64", "*i32", "*i32", "*i32", "*i32", "*i64", "*i64", "*i32", "*i64"] + ["i32"] * 3
    accepted = ["*i32", "*i64", "*i32", "*i32", "*i32", *["*i64"] * 3, *["*i32"] * 3, "*i16", *["i32"] * 4]
    fed = ["*i32", "*i64", "*i32", "*i32", "*i64", "*i32", "*i64", "*i64", "*i32", "*i64"] + ["i32"] * 4
    feeding = {"FIRST": 0, "COUNT": 5, "GROUP": 8, "HAS_DRAWN": True, "BLOCK_SIZE": 16}
    guesses = {"NUM": 4, "GROUP": 8}
    lookup = {"SHORTEST": 2, "LONGEST": 5, "BLOCK_SIZE": 16, "TILE": drafts.TILE}
    warps = {"sample tiles": 2, "sample pick": 8, "sample search": sampling_search.SEARCH_WARPS, "sample report": 8}
    draws = {}
    for kind, masks in (("", []), (" guesses", ["*i32"])):
        facts = {} if masks else {"masks_ptr": None}
        drawn, rest = [d, "*i32", *masks, "*i32", *tiles], [*sizes, "*i64", *sampler]
        draws |= {
            f"sample tiles{kind}": (sampling.tiles_kernel, [*drawn, *tiles, *sizes, *sampler], {"TILES": 4, **facts}),
            f"sample pick{kind}": (sampling.pick_kernel, [*drawn, *lists, "*i64", *rest], {"ALL_TILES": 1024, **facts}),
            f"sample search{kind}": (
                sampling_search.search_kernel,
                [*drawn, "*i64", *rest],
                {"ALL_TILES": 1024, "BLOCK": sampling_search.SEARCH_BLOCK, **facts},
            ),
        }
    plain = {
        "norm": (norm.norm_kernel, [d, *norm_types], {**norm_consts, "PARTS": 1}),
        "norm parts": (norm.norm_kernel, ["*fp32", *norm_types], {**norm_consts, "PARTS": 8}),
        "silu": (activation.silu_mul_kernel, [d, d, "i32", "i32", "i32"], {"TILE": 1024, "PARTS": 1}),
        "silu parts": (activation.silu_mul_kernel, ["*fp32", d, *["i32:16"] * 3], {"TILE": 1024, "PARTS": 2}),
        **draws,
        "sample report": (
            sampling_report.report_kernel,
            [d, "*i32", "*i64", *tiles, *lists, "i32", "*fp32", "*i32", "i32", *sizes, "*i32"],
            {"ALL_TILES": 1024, "BLOCK": 4096, "WIDTH": 21},
        ),
        "propose": (drafts.propose_kernel, proposed, {**guesses, **lookup}),
        "feed": (drafts.feed_kernel, fed, feeding),
        "accept": (drafts.accept_kernel, accepted, guesses),
        "advance": (decode_state.advance_kernel, state, {"BLOCK_SIZE": 16, "TILE": 256}),
        "begin": (lanes.begin_kernel, lane_types, {"BLOCK_SIZE": 16, "TILE": 128}),
        "keep": (lanes.keep_kernel, ["*i32", "*i64", "*i64", "i32"], {"TILE": 256}),
    }
    return {
        f"{name} {dtype}": (
            lambda arch, case=case, name=name: compile_kernel(*case, arch, warps.get(name.removesuffix(" guesses"), 4))
        )
        for name, case in plain.items()
        if not names or name in names
    }


def attention_shapes(arch: int) -> list[tuple[int, int, int]]:
    """(head_dim, block_size, window): first all at once, the largest tile, padded, gathered page by page, in a window.

    86 and 89 get no more shapes of attention: they run what 80 runs, in less shared memory. The other families also
    compile whole tiles, and the one with the most rules (90 has the copy engine) small and padded heads.
    """
    shapes = [(192, 16, 100)]
    if arch not in (86, 89):
        shapes.append((128, 256, 0))
    if arch == 90:
        shapes += [(64, 64, 100), (80, 16, 0)]
    return shapes


def tiled_cases(half: str, arch: int) -> dict:
    """The kernels with matrix products: instructions and tiles depend on the architecture and its shared memory."""
    cases = {}
    for shape in attention_shapes(arch):
        cases[f"prefill {half} {shape}"] = prefill_case(half, *shape, 3)
        cases[f"decode {half} {shape}"] = decode_case(half, *shape)
    cases[f"decode 64 rows {half}"] = decode_case(half, 128, 64, 0, batch=64)
    for head_dim in (128, 256) if arch == 90 else (128,):
        cases[f"prefill {half} e4m3 {head_dim}"] = prefill_case(half, head_dim, 64, 0, 3, e4m3=True)
        cases[f"decode {half} e4m3 {head_dim}"] = decode_case(half, head_dim, 64, 0, e4m3=True)
    cases.update(moe_cases(half, arch, (3, 17, 65, 129, 513) if arch == 90 else (17, 513)))
    cases.update(moe_cases(half, arch, (513,), low_rank=True))
    if arch in (75, 80, 90):  # the others have their tiles
        cases.update(moe_cases(half, arch, (17, 513) if arch == 90 else (513,), scaled=128))
        cases.update(moe_cases(half, arch, (513,) if arch == 90 else (17,), scaled=1))
    if arch >= 80:  # what TritonLatentBackend takes, and `integer_linear`
        cases.update(mla_cases(half, arch, 16))
        cases.update(integer_cases(half, arch))
    return cases


def cases_for(arch: int) -> dict:
    """name -> compile(arch). Turing has no bf16 arithmetic worth using: fp16 there, as engines do."""
    half = "fp16" if arch < 80 else "bf16"
    cases = tiled_cases(half, arch)
    if arch == 89:  # the tiles, shared memory and instructions of 86: some stand for all
        some = (
            "prefill bf16",
            "decode bf16",
            "moe_gate_up bf16 513",
            "moe_down bf16 513",
            "integer_matmul",
            "moe_integers",
        )
        return {name: case for name, case in cases.items() if name.startswith(some)}
    if arch in (86, 100, 120):
        return cases
    # The other kernels are the same everywhere, but for bf16 (from 80) and for launches before the end of the kernel
    # before (from 90). The sampler's take most of the time: once without both and once with both.
    some = (
        "advance",
        "propose",
        "feed",
        "accept",
        "begin",
        "keep",
        "norm",
        "norm parts",
        "silu",
        "silu parts",
        "sample tiles",
    )
    cases.update(small_cases(half, () if arch in (75, 90) else some))
    cases.update(moe_small_cases(half))
    cases.update(moe_gemv_cases(half, arch))
    cases.update(integer_small_cases(half, arch))
    cases["merge"] = merge_case(half)
    cases[f"rope {half}"] = rope_case(half, 128, 128, True)
    cases[f"rope {half} e4m3"] = rope_case(half, 128, 128, True, e4m3=True)
    cases[f"gemv {half}"] = gemv_case(half, 1, 1024, True)
    byte = "fp8e4nv" if arch >= 89 else "u8"  # older cards cannot convert 8-bit floats
    cases[f"gemv fp8 {half}"] = gemv_case(half, 1, 1024, True, byte, 128)
    cases[f"gemv fp8 rows {half}"] = gemv_case(half, 2, 1024, False, byte, 1)
    if arch >= 89:
        cases[f"fp8_quantise {half}"] = quantise_case(half, 32, 128)
        rescale = {"SIZE": 4096, "TILE": 1024, "HAS_BIAS": True}
        types = [f"*{half}", "*fp32", "*fp32", f"*{half}"]
        cases[f"fp8_rescale {half}"] = lambda arch: compile_kernel(fp8.rescale_kernel, types, rescale, arch)
    if arch >= 80:
        for scaled, rows in ((1, 16), (128, 64)):
            block_m, block_k, stages = fp8.choose_tile(rows, 4096)
            facts = {"SIZE": 4096, "SCALED": scaled, "BLOCK_M": block_m, "BLOCK_N": fp8.TILE_N, "BLOCK_K": block_k}
            facts |= {"HAS_BIAS": True, "FORM": BY_CARD if arch >= 89 else BY_SHIFTS}
            kinds = [f"*{half}", "*u8", "*fp32", f"*{half}", "*fp32", "i32", "i32:16", "i32:16", "i32"]
            cases[f"fp8_weights {half} by {scaled}"] = lambda arch, kinds=kinds, facts=facts, stages=stages: (
                compile_kernel(fp8.weight_only_kernel, kinds, facts, arch, 4, stages)
            )
    if arch in (75, 90):
        cases[f"rope partial {half}"] = rope_case(half, 80, 32, False)
        cases[f"gemv rows {half}"] = gemv_case(half, 3, 576, False)
    if arch >= 80:
        cases[f"few_rows {half}"] = few_rows_case(half, 1024, True)
        cases[f"few_rows long {half}"] = few_rows_case(half, 3072, False)
    if arch == 90:
        cases[f"rope parts {half}"] = rope_case(half, 128, 128, True, parts=4)
        for rows in (8, 24, 64, 128):
            cases[f"matmul {half} {rows}"] = matmul_case(half, rows)
        cases[f"matmul {half} gated"] = matmul_case(half, 64, gated=True)
        cases.update(moe_cases("fp32", arch, (17,)))
        cases["prefill fp32"] = prefill_case("fp32", 64, 16, 0, 3)
        cases.update(mla_cases("fp32", arch, 16))
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
        result["waits"] = sorted(set(re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", kernel.asm["ptx"])))
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
