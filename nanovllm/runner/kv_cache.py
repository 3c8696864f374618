"""How large the KV cache is, and the cache itself.

`CacheLayout.fit` is arithmetic on numbers that were measured; `allocate` makes the tensors. The size is the *minimum*
over the ranks: a plan names block ids, so every rank must have every block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.attention.base import CacheSpec
from nanovllm.errors import ConfigError
from nanovllm.hardware.device import Device
from nanovllm.layers.attention import KVCache


@dataclass(frozen=True)
class CacheLayout:
    block_size: int
    num_blocks: int
    bytes_per_block: int

    @classmethod
    def fit(cls, free_bytes: list[int], specs: Sequence[CacheSpec], block_size: int, wanted: int | None) -> CacheLayout:
        """free_bytes: what each rank can spare. wanted: num_kvcache_blocks, or None for all that fits."""
        per_block = block_bytes(specs, block_size)
        left = max(min(free_bytes), 0)  # negative where other processes have filled the GPU
        most = left // per_block
        if most < 1:
            raise ConfigError(
                f"no room for the KV cache: {left / 2**20:.0f} MiB are left after the weights and one block "
                f"of {block_size} tokens needs {per_block / 2**20:.1f} MiB; raise gpu_memory_utilization (GPU) or "
                f"cpu_kvcache_gb (CPU), or lower max_num_batched_tokens"
            )
        if wanted is not None and wanted > most:
            raise ConfigError(
                f"num_kvcache_blocks={wanted} needs {wanted * per_block / 2**30:.2f} GiB, but "
                f"{left / 2**30:.2f} GiB are left: at most {most} blocks"
            )
        return cls(block_size, most if wanted is None else wanted, per_block)

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block


def block_bytes(specs: Sequence[CacheSpec], block_size: int) -> int:
    return sum(
        block_size * math.prod(shape) * spec.cache_dtype.itemsize for spec in specs for shape in spec.cache_shapes
    )


def allocate(layout: CacheLayout, specs: Sequence[CacheSpec], device: Device) -> list[KVCache]:
    try:
        return [tuple(_zeros(layout, shape, spec.cache_dtype, device) for shape in spec.cache_shapes) for spec in specs]
    except MemoryError:  # of a CPU: a limit of this process (ulimit -v), since free memory was asked for
        raise ConfigError(
            f"no memory for a KV cache of {layout.num_bytes / 2**30:.2f} GiB ({layout.num_blocks} blocks): set "
            f"cpu_kvcache_gb or num_kvcache_blocks to less, or raise the limit of this process (ulimit -v)"
        ) from None


def _zeros(layout: CacheLayout, per_token: tuple[int, ...], dtype: torch.dtype, device: Device) -> torch.Tensor:
    shape = (layout.num_blocks, layout.block_size, *per_token)
    if device.is_gpu:
        return torch.zeros(shape, dtype=dtype, device=device.torch_device)
    # numpy's zeros are untouched pages: the machine gives memory only to blocks that were really written.
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
