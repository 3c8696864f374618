"""How many KV blocks fit beside a model: measured, after it is loaded."""

from __future__ import annotations

from nanovllm.memory.budget import CONTEXT_BYTES, GRAPH_BYTES
from nanovllm.models.transformer import Transformer
from nanovllm.ops.sampler_state import SamplerState
from nanovllm.runner.build import Blueprint
from nanovllm.runner.captured_steps import TOKEN_BUCKETS
from nanovllm.runner.expert_memory import card_bytes
from nanovllm.runner.kv_cache import CacheLayout, block_bytes
from nanovllm.runner.model_runner import runs_on_device, try_largest_step
from nanovllm.runner.mtp import ring_bytes
from nanovllm.scheduling.drafts import MAX_ROWS


def fit_cache(blueprint: Blueprint, model: Transformer, draft: Transformer | None = None) -> CacheLayout:
    """A block has K and V of the draft model too, or of the MTP layer, if there is one."""
    specs = [*model.specs, *(draft.specs if draft is not None else ())]
    if model.mtp is not None:
        specs.append(model.mtp.spec)
    config, limits, size = blueprint.config, blueprint.limits, blueprint.limits.block_size
    # Every rank must have as many blocks: the one with the least room decides.
    spare = blueprint.parallel.gather_numbers(_spare_bytes(blueprint, model))
    layout = CacheLayout.fit(spare, specs, size, config.num_kvcache_blocks)
    most = config.max_num_seqs * -(-limits.max_model_len // size)
    if config.num_kvcache_blocks is None and layout.num_blocks > most and not blueprint.device.is_gpu:
        return CacheLayout(size, most, block_bytes(specs, size))  # more could never be used at once
    return layout


def _spare_bytes(blueprint: Blueprint, model: Transformer) -> int:
    """Memory for the cache. On a GPU: this engine's share of the card, less what its tensors hold, less what the
    largest step took when it was tried; and never more than is free now: there other processes' memory counts."""
    config, device, limits = blueprint.config, blueprint.device, blueprint.limits
    if not device.is_gpu:
        return int(config.cpu_kvcache_gb * 2**30)
    step_bytes = device.peak_bytes(lambda: try_largest_step(model, device, limits, config.max_num_seqs))
    free, _ = device.memory()
    card = card_bytes(config, device)
    ours = int(card * config.gpu_memory_utilization)
    if config.gpu_memory_gb is not None:
        ours = min(ours, card - CONTEXT_BYTES)  # on a real card of that size the context would take its part
    graphs = 0 if config.enforce_eager else GRAPH_BYTES
    if runs_on_device(model, device):
        num_guesses = MAX_ROWS if config.speculative_method is not None else 0
        graphs += SamplerState.num_bytes(config.max_num_seqs + 1, model.head.vocab_size, num_guesses)
    if model.mtp is not None:
        graphs += ring_bytes(model, config.max_num_seqs, config.num_guesses)
    if graphs and model.graph_safe:  # a captured step of up to 2,048 tokens keeps its scratch for ever
        num_tokens = limits.max_num_batched_tokens
        graphs += step_bytes * min(num_tokens, TOKEN_BUCKETS[-1]) // num_tokens
    return min(free, ours - device.allocated_bytes()) - step_bytes - graphs
