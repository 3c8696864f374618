"""Settings of an Estimate where PlanOptions leave them open: as many sequences, as long, as the memory holds."""

from __future__ import annotations

from dataclasses import replace

from nanovllm.memory.budget import (
    GIB,
    STEP_TOKENS,
    DoesNotFit,
    Memory,
    Tiers,
    Wants,
    default_step_tokens,
    size_tiers,
)
from nanovllm.memory.facts import ModelFacts
from nanovllm.memory.options import PlanOptions

MIN_LEN = 256  # a shorter context is of no use


def choose(memory: Memory, model: ModelFacts, options: PlanOptions) -> tuple[Wants, Tiers | None, DoesNotFit | None]:
    """Settings that fit. First few sequences and a short context, to see whether and how the model runs at all; then as
    much as that leaves room for."""
    trained = model.trained_len or model.config.max_position_embeddings
    refusal = None
    for length, most_tokens in ((2048, None), (MIN_LEN, STEP_TOKENS[0])):
        wants = _wants(memory, model, options, options.max_model_len or min(length, trained), 16, most_tokens)
        try:
            tiers = size_tiers(memory, model, wants)
        except DoesNotFit as error:
            refusal = error
            continue
        return _grow(memory, model, options, wants, tiers)
    return wants, None, refusal


def _wants(
    memory: Memory, model: ModelFacts, options: PlanOptions, length: int, num_seqs: int, most_tokens: int | None
) -> Wants:
    num_seqs = options.max_num_seqs or min(num_seqs, options.max_num_batched_tokens or num_seqs)
    num_tokens = options.max_num_batched_tokens
    if num_tokens is None:
        num_tokens = max(most_tokens, num_seqs) if most_tokens else default_step_tokens(memory, model, num_seqs)
    return Wants(
        max_model_len=length,
        max_num_batched_tokens=num_tokens,
        max_num_seqs=num_seqs,
        placement="resident" if model.expert_size > 1 else options.expert_placement,
        cache_gb=options.expert_cache_gb,
        host_gb=options.expert_host_gb,
    )


def _grow(
    memory: Memory, model: ModelFacts, options: PlanOptions, wants: Wants, tiers: Tiers
) -> tuple[Wants, Tiers | None, None]:
    """A resident model: as many sequences and as long as fit. An offloaded one stays with 16 sequences, which already
    touch nearly all experts, and gets the longest power of two whose KV cache is within its share."""
    tries: list[Wants] = []
    if tiers.placement == "resident":
        many = _wants(memory, model, options, wants.max_model_len, 256 if memory.gpu_bytes > 24 * GIB else 64, None)
        for base in (many, wants):
            longest = _longest(memory, model, base)
            tries.append(replace(base, max_model_len=options.max_model_len or max(longest, wants.max_model_len)))
    elif options.max_model_len is None:
        length = wants.max_model_len
        share = (tiers.gpu_expert_bytes + tiers.kv_bytes) // 10
        while length * 2 <= tiers.longest_context and length * 2 * model.kv_bytes_per_token <= share:
            length *= 2
        tries.append(replace(wants, max_model_len=length))
    for better in tries:
        try:
            found = size_tiers(memory, model, better)
        except DoesNotFit:
            continue
        if found.placement == tiers.placement:
            return better, found, None
    return wants, tiers, None


def _longest(memory: Memory, model: ModelFacts, wants: Wants) -> int:
    try:
        found = size_tiers(memory, model, wants)
    except DoesNotFit:
        return 0
    return found.longest_context if found.placement == "resident" else 0
