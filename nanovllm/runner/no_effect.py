"""Options that were given and change nothing on this machine with this model, each with the reason, which is logged as
a warning. No torch here."""

from __future__ import annotations

from dataclasses import fields

from nanovllm.config import EngineConfig

OF_GPUS = ("gpu_memory_utilization", "gpu_memory_gb", "enforce_eager")
OF_OFFLOADED_EXPERTS = ("expert_cache_gb", "expert_host_gb", "expert_policy", "expert_prefetch", "expert_cpu_misses")


def options_without_effect(config: EngineConfig, is_gpu: bool, placement: str | None) -> dict[str, str]:
    """Option -> why. `placement` of the experts: None = the model has none."""
    found: dict[str, str] = {}
    if not is_gpu:
        found = dict.fromkeys(OF_GPUS, "the model runs on a CPU")
    elif config.num_kvcache_blocks is None:
        found["cpu_kvcache_gb"] = "the model runs on a GPU, whose memory is filled (gpu_memory_utilization)"
    if config.num_kvcache_blocks is not None:
        found["cpu_kvcache_gb"] = f"num_kvcache_blocks={config.num_kvcache_blocks} decides"
    if config.scheduling_policy != "sjf":
        found["max_wait_steps"] = (
            f"scheduling_policy={config.scheduling_policy!r} lets no request pass another; 'sjf' does"
        )
    if config.tensor_parallel_size == 1:
        found["worker_timeout"] = "there is one rank, which waits for no other"
    if not config.enable_eplb:
        found |= dict.fromkeys(("eplb_window_size", "eplb_step_interval"), "experts do not move (enable_eplb)")
    if config.speculative_method is None:
        found["num_speculative_tokens"] = "nothing is guessed (speculative_method)"
    if config.speculative_method != "ngram":
        why = f"speculative_method={config.speculative_method!r} looks nothing up; 'ngram' does"
        found |= dict.fromkeys(("prompt_lookup_max", "prompt_lookup_min"), why)
    if placement is None:
        found |= dict.fromkeys(("expert_placement", *OF_OFFLOADED_EXPERTS), "the model has no experts")
    elif placement == "resident":
        found |= dict.fromkeys(
            OF_OFFLOADED_EXPERTS,
            "all experts stay on the device (expert_placement='offload' loads them as they are chosen)",
        )
    elif placement == "disk":
        why = "quantised experts are in a file, of which the operating system keeps in memory what fits"
        found |= dict.fromkeys(OF_OFFLOADED_EXPERTS, why)
    else:
        found.pop("gpu_memory_gb", None)  # on a CPU, too, it sets the number of expert buffers
    given = {field.name for field in fields(config) if getattr(config, field.name) != field.default}
    return {name: f"has no effect: {why}" for name, why in found.items() if name in given}
