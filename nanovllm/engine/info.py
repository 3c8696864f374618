"""Facts of a running engine, for users, the page and traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanovllm import __version__

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine


def describe(engine: LLMEngine) -> dict[str, Any]:
    config, limits = engine.config, engine.scheduler.limits
    speculation: dict[str, Any] = {}
    if limits.num_drafts:
        speculation = {"speculative_method": config.speculative_method, "num_speculative_tokens": limits.num_drafts}
        if config.speculative_method == "ngram":
            speculation["prompt_lookup"] = list(config.prompt_lookup)
        elif config.speculative_model is not None:
            speculation["speculative_model"] = config.speculative_model
    return {
        "model": config.model,
        "architecture": engine.model_config.architecture,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "scheduling_policy": engine.scheduler.policy.name,
        **speculation,
        "runs_on": engine.executor.describe(),
    }


def engine_info(engine: LLMEngine, model: str) -> dict[str, Any]:
    """The header of a trace and of the page's feed: what stays the same while an engine runs, except the policy."""
    scheduler = engine.scheduler
    return {
        "version": __version__,
        "model": model,
        "policy": scheduler.policy.name,
        "num_blocks": scheduler.blocks.num_blocks,
        "block_size": scheduler.blocks.block_size,
        "max_num_seqs": scheduler.limits.max_num_seqs,
        "max_num_batched_tokens": scheduler.limits.max_num_batched_tokens,
        "max_model_len": scheduler.limits.max_model_len,
        "prefix_caching": scheduler.blocks.enable_prefix_caching,
        "paused": engine.watch.is_paused,
        "device": str(engine.describe()["runs_on"]["device"]),
    }
