"""How often a kernel is compiled for one model: steps of any shape must reuse what start-up compiled.

Triton compiles anew for every combination of argument types, constexprs, and of what it specialises on: integers that
are 1 or multiples of 16, pointers aligned to 16 bytes. The wrappers are called here with JITFunction.run replaced by a
recorder of that combination, over the shapes that an engine's steps have. Nothing is compiled or run.
"""

import itertools

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import jit

from nanovllm.layers.integers import IntegerForm, IntegerWeight
from nanovllm.moe.scaled import expert_views
from nanovllm.ops.sampler_state import SamplerState
from nanovllm.ops.triton import (
    activation,
    decode_attention,
    decode_state,
    few_rows,
    gemv,
    integers,
    integers_matmul,
    lanes,
    matmul,
    mla_decode,
    mla_prefill,
    mla_rope,
    moe_experts,
    moe_gemm,
    moe_route,
    moe_tiles,
    norm,
    prefill_attention,
    qk_norm_rope,
    sampling,
    sampling_report,
)
from nanovllm.weights.expert_form import ExpertForm

if triton.knobs.runtime.interpret:
    pytest.skip("this process interprets kernels", allow_module_level=True)

HIDDEN, NUM_Q, NUM_KV, HEAD_DIM, VOCAB, BLOCK_SIZE, MAX_BLOCKS = 1024, 16, 8, 128, 5300, 64, 40
BATCHES = (1, 2, 3, 4, 5, 8, 15, 16, 17, 32, 100, 256, 257)
BF16 = torch.bfloat16


@pytest.fixture
def compiled(monkeypatch) -> dict[str, set]:
    """kernel -> the combinations it would have been compiled for, on an H200."""
    seen: dict[str, set] = {}
    backend = CUDABackend(GPUTarget("cuda", 90, 32))

    def record(self, *args, grid, warmup, **kwargs):
        bind = jit.create_function_from_signature(self.signature, self.params, backend)
        _, specialisation, options = bind(*args, **kwargs)
        seen.setdefault(self.fn.__name__, set()).add(f"{specialisation} {sorted(options.items())}")

    monkeypatch.setattr(jit.JITFunction, "run", record)
    for module in (decode_attention, prefill_attention, mla_decode, mla_prefill):
        monkeypatch.setattr(module, "capability", lambda device: (9, 0))
    for module in (decode_attention, mla_decode):
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: 132)
    return seen


def empty(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype)


def ints(*shape, dtype=torch.int32):
    return torch.zeros(shape, dtype=dtype)


def caches(by_head: bool):
    middle = (NUM_KV, BLOCK_SIZE) if by_head else (BLOCK_SIZE, NUM_KV)
    pair = [empty(10, *middle, HEAD_DIM) for _ in range(2)]
    return [cache.transpose(1, 2) for cache in pair] if by_head else pair


@pytest.mark.parametrize(("by_head", "scales"), [(False, None), (True, None), (False, torch.ones(2))])
def test_attention(compiled, by_head, scales):
    cache = caches(by_head)
    if scales is not None:  # 8-bit floats
        cache = [tensor.to(torch.uint8) for tensor in cache]
    for batch, skipped, width, context in itertools.product(BATCHES, (0, 1, 4), (1, 7, 16, MAX_BLOCKS), (64, 4096)):
        lens, tables = ints(batch + skipped)[skipped:], ints(batch + skipped, width)[skipped:]
        q = empty(batch, NUM_Q, HEAD_DIM)
        launch = decode_attention.launch_for(q, NUM_KV, context, scales is not None)
        decode_attention.decode_attention(q, *cache, lens, tables, 0.1, launch, scales=scales)
        starts = ints(batch + 1 + skipped)[skipped:]
        prefill_attention.prefill_attention(q, *cache, starts, lens, tables, 0.1, scales=scales)
    assert {name: len(keys) for name, keys in compiled.items()} == {
        "decode_kernel": 2 if scales is None else 3,  # one or two rows ask for keys ahead; small tiles in 8 bits
        "merge_kernel": 1,
        "prefill_kernel": 1,
    }


def test_latent_attention(compiled):
    """DeepSeek-V2-Lite: one compilation for any context, table and step. Of decodes two, with tiles of 32 and of 64
    keys; of prompts two, causal or not."""
    cache, table = empty(10, BLOCK_SIZE, 576), torch.zeros(4096, 64)
    for batch, skipped, width, context in itertools.product(BATCHES, (0, 1, 4), (1, 7, 16, MAX_BLOCKS), (64, 4096)):
        lens, tables = ints(batch + skipped)[skipped:], ints(batch + skipped, width)[skipped:]
        q = empty(batch + skipped, 16, 192)[skipped:]
        q_latent = empty(16, batch, 512).transpose(0, 1)
        mla_decode.latent_decode(q_latent, q[..., 128:].contiguous(), cache, lens, tables, 0.1, context)
        index = ints(batch + skipped, dtype=torch.int64)[skipped:]
        kv = empty(batch, 3072 + 576)[:, 3072:]
        mla_rope.latent_rope(q[..., 128:], kv, empty(512), 1e-6, table, index, cache, index, True)
        starts = ints(batch + 1 + skipped)[skipped:]
        for causal in (True, False):
            q_pe, keys, k_pe = empty(batch, 16, 64), empty(batch, 16, 256), empty(batch, 576)[:, 512:]
            mla_prefill.latent_piece(q[..., :128], q_pe, keys, k_pe, starts, starts, 0.1, causal)
    found = {name: len(keys) for name, keys in compiled.items()}
    assert found == {
        "latent_decode_kernel": 2,
        "merge_kernel": 1,
        "latent_rope_kernel": 1,
        "latent_piece_kernel": 2,
    }


def test_everything_else(compiled):
    cache = caches(True)
    norm_weight, cos_sin = empty(HIDDEN), torch.zeros(4096, HEAD_DIM)
    sampler_state = SamplerState.allocate(2, VOCAB, torch.device("cpu"))
    for rows, skipped in itertools.product((*BATCHES, 1024), (0, 1)):
        x = empty(rows, HIDDEN)
        norm.rms_norm(x, norm_weight, 1e-6)
        norm.add_rms_norm(x, x, norm_weight, 1e-6)
        activation.silu_mul(empty(rows, 2 * 3072))
        index = ints(rows + skipped, dtype=torch.int64)[skipped:]
        qkv = empty(rows, (NUM_Q + 2 * NUM_KV) * HEAD_DIM)
        heads = (empty(HEAD_DIM), empty(HEAD_DIM))
        qk_norm_rope.qk_norm_rope(qkv, heads, 1e-6, cos_sin, index, *cache, index, NUM_Q)
        drawn = sampling.draw(empty(rows, VOCAB), index.int(), index.int(), sampler_state)
        sampling.draw(empty(rows, VOCAB), index.int(), index.int(), sampler_state, index.int())
        reports = sampling_report.Reports.allocate(rows, 1 + rows % 3, torch.device("cpu"))
        sampling_report.report(empty(rows, VOCAB), index.int(), drawn, sampler_state, reports, rows % 3)
        state = [ints(rows, dtype=torch.int64) for _ in range(3)]
        tables = ints(rows, MAX_BLOCKS)
        ended = (ints(rows), sampler_state.ints, 64)
        out = ints(rows, 64, dtype=torch.int64)
        decode_state.advance(*state, ints(rows), index.clone(), tables, out, ints(1), *ended)
        sent = [ints(rows + skipped)[skipped:] for _ in range(3)]
        lane_state = (state[0], state[1], ints(rows), state[2], tables)
        for width in (1, 3, 16, MAX_BLOCKS):
            row_state = (ints(300, dtype=torch.int64), ints(300, MAX_BLOCKS), sampler_state.ints)
            lanes.begin(*sent, row_state, lane_state, BLOCK_SIZE, width)
        lanes.keep_tokens(sent[0], state[0], ints(300, dtype=torch.int64))
    assert {name: len(keys) for name, keys in compiled.items()} == {
        "norm_kernel": 2,  # with and without a residual
        "silu_mul_kernel": 1,
        "qk_norm_rope_kernel": 2,  # few and many tokens
        "tiles_kernel": 2,  # without and with guesses
        "pick_kernel": 2,
        "search_kernel": 2,
        "report_kernel": 1,
        "advance_kernel": 1,
        "begin_kernel": 1,
        "keep_kernel": 1,
    }


def test_gemv(compiled):
    """One for each of the five projections and each of the rows 1, 2 and, for two of them, 4."""
    shapes = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)]
    used = set()
    for rows, (out_size, size) in itertools.product(range(1, 300), shapes):
        if gemv.prefers_gemv(rows, out_size, size):
            used.add((rows, out_size, size))
            gemv.gemv(empty(rows, size), torch.empty(out_size, size, dtype=BF16, device="cpu"))
    assert {rows for rows, _, _ in used} == {1, 2, 4}
    assert len(used) == 12
    assert len(compiled["gemv_kernel"]) <= len(used)


def test_matmul(compiled, monkeypatch):
    """Four tiles of rows in parts, and three with a gate. Every number of rows of a tile is served by the same
    compilation, as is every weight of the same dtype."""
    monkeypatch.setattr(matmul, "capability", lambda device: (9, 0))
    for rows, (out_size, size) in itertools.product(
        range(1, 300), [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]
    ):
        x, weight = empty(rows, size), torch.empty(out_size, size, dtype=BF16, device="cpu")
        for gated in (False, True) if out_size == 6144 else (False,):
            if (launch := matmul.launch_for(x, weight, gated)) is not None:
                matmul.matmul(x, weight, launch, gated=gated)
    assert len(compiled["matmul_kernel"]) == 4 + 3


def test_few_rows(compiled):
    """Each of the four projections of a layer, and the head: one for all numbers of rows."""
    norm_of = (empty(1024), 1e-6)
    for rows in range(3, 9):
        x, heads, middle = empty(rows, 1024), empty(rows, 2048), empty(rows, 3072)
        few_rows.few_rows_linear(x, empty(4096, 1024), norm=norm_of)
        few_rows.few_rows_linear(heads, empty(1024, 2048), residual=x)
        few_rows.few_rows_linear(x, empty(6144, 1024), norm=norm_of, gated=True)
        few_rows.few_rows_linear(middle, empty(1024, 3072), residual=x)
        few_rows.few_rows_linear(x, empty(70000, 1024))
    assert len(compiled["few_rows_kernel"]) == 5


def test_integers(compiled, monkeypatch):
    """Of each of three projections: rounding and a matrix-vector product for 1 and 2 rows, five tiles of rows with and
    without splits, one expansion. More splits of one tile are no new variant."""
    monkeypatch.setattr(integers_matmul, "num_multiprocessors", lambda _: 132)
    monkeypatch.setattr(integers.F, "linear", lambda x, *_: x)
    device = torch.device("cpu")
    for out_size, size in ((1024, 2048), (6144, 1024), (1024, 3072)):
        weight = IntegerWeight({"": out_size}, size, IntegerForm(4, 128), BF16, device)
        for rows in range(1, 300, 3 if out_size == 6144 else 1):
            integers.integer_linear(empty(rows, size), weight)
        integers.integer_linear(empty(2, size), weight)
    assert len(compiled["integer_gemv_kernel"]) == 3 * 2
    assert len(compiled["round_kernel"]) == 3
    assert len(compiled["integer_matmul_kernel"]) <= 3 * 5 * 2
    assert len(compiled["add_splits_kernel"]) <= 2
    assert len(compiled["expand_kernel"]) == 3


@pytest.mark.parametrize("block", [None, 0, 128])
def test_experts(compiled, monkeypatch, block):
    """Decode and prefill of any size run what `sizes_to_warm` has compiled; so does a pool with its own stride. Beyond:
    one variant of the sorting kernels each for few and for many pairs, per BLOCK_M."""
    for module in (moe_tiles, moe_gemm):
        name = "capability" if module is moe_tiles else "num_multiprocessors"
        monkeypatch.setattr(module, name, lambda device, name=name: (9, 0) if name == "capability" else 132)
    hidden, size, experts, top_k = 64, 96, 8, 2
    gate_up, down = empty(experts, 2 * size, hidden), empty(experts, hidden, size)
    if block is not None:  # 8-bit floats
        form = ExpertForm.dense(hidden, size, block)
        gate_up, down = expert_views(form, torch.zeros(experts, form.length, dtype=torch.uint8))

    def run(rows, skipped=0):
        x, logits = empty(rows, hidden), empty(rows, experts)
        ids, weights = moe_route.route(logits, top_k, True)
        ids, weights = ints(rows + skipped, top_k)[skipped:], torch.zeros(rows + skipped, top_k)[skipped:]
        moe_route.sum_pairs(moe_experts.expert_pairs(x, gate_up, down, ids, weights))

    def counts():
        return {name: len(keys) for name, keys in compiled.items()}

    shape = moe_tiles.MoeShape(hidden, size, top_k, BF16, eight_bits=block is not None)
    for rows in moe_tiles.sizes_to_warm(2000, shape, torch.device("cpu")):
        run(rows)
    warm = counts()
    for rows, skipped in itertools.product((*BATCHES, 64, 512, 513, 1024, 2000), (0, 1)):
        run(rows, skipped)
    now = counts()
    assert now.pop("count_kernel") == 1
    assert now.pop("place_kernel") <= warm.pop("place_kernel") + 2
    warm.pop("count_kernel")
    assert now == warm
    assert (warm["gate_up_kernel"], warm["down_kernel"]) == (4, 5 if block is None else 4)
    assert warm["gate_up_gemv_kernel"] == warm["down_gemv_kernel"] == warm["route_kernel"] == 1
