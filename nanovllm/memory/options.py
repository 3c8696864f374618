"""PlanOptions: the options of `nanovllm plan`, from which an Estimate is made. No torch here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from nanovllm.config import EngineConfig
from nanovllm.memory.speed import DISK_BANDWIDTH


@dataclass(frozen=True)
class PlanOptions:
    model: str = "smollm2"
    gpu_memory_gb: float | None = None
    host_memory_gb: float | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_utilization: float = 0.9
    dtype: str = "auto"
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    expert_placement: str = "auto"
    expert_cache_gb: float | None = None
    expert_host_gb: float | None = None
    bandwidth_gbs: float | None = None
    disk_gbs: float = DISK_BANDWIDTH / 1e9
    gpu_read_gbs: float | None = None
    measure: bool = False
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    enable_eplb: bool = False
    num_redundant_experts: int = 0
    hosts: int = 1
    link: str = "nvlink"
    link_gbs: float | None = None
    link_us: float | None = None
    network: str = "ethernet"
    network_gbs: float | None = None
    network_us: float | None = None
    gpu_tflops: float | None = None
    table: bool = False

    def engine_config(self) -> EngineConfig:
        """The options that the engine has too, checked as it checks them."""
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        given = {name: value for name, value in dataclasses.asdict(self).items() if name in known and value is not None}
        return EngineConfig.from_options(**given)
