"""From a checkpoint to a model that can compute: placed, loaded, its kernels compiled.

A `Blueprint` holds what is decided before anything is allocated; `build_model` follows it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from nanovllm.attention.base import attention_specs, expanded_bytes
from nanovllm.attention.native_backend import NativeBackend
from nanovllm.attention.select import BackendChoice, select_backend
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.hardware.device import Device
from nanovllm.hardware.disk_memory import DiskMemory
from nanovllm.hardware.host import cache_folder
from nanovllm.hardware.huge_pages import HugePages, has_huge_pages
from nanovllm.hardware.parallel import Parallel
from nanovllm.hardware.side_stream import side_stream
from nanovllm.layers.build import Build
from nanovllm.layers.integers import IntegerForm, expect_types
from nanovllm.layers.packed import Packing, mean_bytes
from nanovllm.layers.parted import PartedLoading, check_products
from nanovllm.layers.scaled import Scales
from nanovllm.layers.scaled_attention import scaled_layers
from nanovllm.lowrank.checkpoint import RULES as SVD_RULES
from nanovllm.model_config import ModelConfig
from nanovllm.models.registry import find_family
from nanovllm.models.transformer import Parts, Transformer
from nanovllm.moe.check import check_experts
from nanovllm.moe.layer import MakeExperts, MoeLayer
from nanovllm.moe.load import ExpertLoad
from nanovllm.moe.offload.offload import Offload
from nanovllm.moe.rebalance import Balancer, add_places
from nanovllm.moe.scaled import scaled_expert_targets
from nanovllm.ops.opset import Ops, choose_ops
from nanovllm.runner.draft_model import DraftModel
from nanovllm.runner.drafter import Drafter, NgramDrafter
from nanovllm.runner.expert_memory import check_expert_ranks, open_offload, size_experts
from nanovllm.runner.kv_cache import CacheLayout, block_bytes
from nanovllm.runner.limits import StepLimits
from nanovllm.runner.low_rank import LowRank, open_low_rank
from nanovllm.runner.model_runner import ModelRunner, captures_attention, captures_prompts, runs_on_device
from nanovllm.runner.mtp import MtpDrafter, check_mtp
from nanovllm.runner.no_effect import options_without_effect
from nanovllm.runner.quantization import (
    choose_kv_dtype,
    choose_packing,
    choose_scales,
    load_kv_scales,
    report_experts,
    report_stored,
    scaled_facts,
)
from nanovllm.weights.checkpoint import Checkpoint, open_checkpoint
from nanovllm.weights.loader import check_weights, load_dummy, load_weights
from nanovllm.weights.resolve import resolve_model

logger = logging.getLogger("nanovllm")


@contextlib.contextmanager
def logged(what: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    logger.info("%s in %.1f s", what, time.perf_counter() - started)


@dataclass(frozen=True)
class Blueprint:
    config: EngineConfig
    model_config: ModelConfig
    device: Device
    limits: StepLimits
    parallel: Parallel
    dtype: torch.dtype
    kv_dtype: torch.dtype | None  # of the KV cache, where it is not dtype
    selection: BackendChoice  # of the attention backend
    low_rank: LowRank | None
    checkpoint: Checkpoint  # with low-rank experts, if there are
    is_draft: bool = False  # of the model that guesses for another

    @classmethod
    def draw(
        cls,
        config: EngineConfig,
        model_config: ModelConfig,
        checkpoint: Checkpoint,
        device: Device,
        limits: StepLimits,
        parallel: Parallel,
    ) -> Blueprint:
        if config.expert_parallel_size > 1:
            parallel = replace(parallel, expert_size=config.expert_parallel_size)
        check_expert_ranks(model_config, parallel)
        dtype = device.resolve_dtype(config.dtype, model_config.dtype)
        kv_dtype = choose_kv_dtype(config, model_config, device.is_gpu, dtype)
        specs = attention_specs(model_config, dtype, parallel, kv_dtype)
        selection = select_backend(config.attn_backend, specs, device, limits.block_size)
        others = {name: reason for name, reason in selection.reasons.items() if reason.startswith("refused")}
        logger.info("attention backend %s on %s; %s", selection.backend.name, device.name, others)
        if expanded := expanded_bytes(specs):
            latent = block_bytes(specs, 1)
            logger.info("KV cache: %d bytes a token, expanded %d (%.1f x)", latent, expanded, expanded / latent)
        low_rank = open_low_rank(config, model_config, checkpoint)
        if config.speculative_method == "mtp":
            check_mtp(config, model_config, checkpoint, low_rank)
        files = checkpoint if low_rank is None else low_rank.checkpoint
        return cls(config, model_config, device, limits, parallel, dtype, kv_dtype, selection, low_rank, files)

    def make_model(self, build: Build, experts: MakeExperts | None) -> Transformer:
        backend = self.selection.backend
        if isinstance(backend, NativeBackend):
            backend = NativeBackend(build.ops.kernels)
        parts = Parts(build, backend, self.limits.max_model_len, experts, self.config.speculative_method == "mtp")
        return find_family(self.model_config)(self.model_config, parts).eval()

    def make_runner(self, model: Transformer, layout: CacheLayout, draft: Transformer | None = None) -> ModelRunner:
        """`draft`: the model that guesses."""
        on_device, config = runs_on_device(model, self.device), self.config
        drafter: Drafter | None = None
        sizes = (self.limits, config.max_num_seqs, config.num_guesses)
        if draft is not None:
            drafter = DraftModel(draft, layout, self.device, *sizes, reads_host=not captures_prompts(draft))
        elif model.mtp is not None:
            drafter = MtpDrafter(model, layout, self.device, *sizes)
        elif config.speculative_method is not None:
            drafter = NgramDrafter(config.prompt_lookup, config.num_guesses)
        return ModelRunner(model, layout, self.device, self.limits, self.config.max_num_seqs, on_device, drafter)


@contextlib.contextmanager
def open_draft(
    config: EngineConfig, vocab_size: int, offline: bool = False, progress: bool = True
) -> Iterator[tuple[EngineConfig, ModelConfig, Checkpoint]]:
    """The model that guesses for one of so many tokens: its own options, its config and its files. Errors name it."""
    name = config.speculative_model
    assert name is not None
    try:
        with contextlib.closing(open_checkpoint(resolve_model(name, offline=offline, progress=progress))) as checkpoint:
            model = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config)
            if model.vocab_size != vocab_size:
                raise ConfigError(
                    f"it has {model.vocab_size} tokens, the model that it guesses for {vocab_size}: a guess is a token "
                    f"of both, so take a smaller model of the same family"
                )
            if model.moe is not None:
                raise ConfigError("it is a mixture of experts: take a dense, smaller model")
            own = replace(config, model=name, speculative_method=None, speculative_model=None)
            yield replace(own, kv_cache_dtype="auto", expert_parallel_size=1, enable_eplb=False), model, checkpoint
    except ConfigError as error:  # or a ModelError, which is one
        raise type(error)(f"speculative_model={name!r}: {error}") from None


def build_draft(blueprint: Blueprint) -> Transformer | None:
    """The model that guesses for that of the blueprint, if there is one."""
    if blueprint.config.speculative_model is None:
        return None
    with open_draft(blueprint.config, blueprint.model_config.vocab_size) as (own, model, checkpoint):
        parallel = replace(blueprint.parallel, expert_size=1)
        draft = Blueprint.draw(own, model, checkpoint, blueprint.device, blueprint.limits, parallel)
        return build_model(replace(draft, is_draft=True), lambda _: None)


def build_model(blueprint: Blueprint, own: Callable[[Offload], None], draft: Transformer | None = None) -> Transformer:
    """`own` gets the Offload as soon as it has memory: the caller closes it, also if this function fails. `draft`:
    whose kernels are compiled too."""
    device, dtype = blueprint.device, blueprint.dtype
    ops, alone = choose_ops(device.is_gpu, dtype), blueprint.parallel.size == 1
    packing = choose_packing(blueprint.config, blueprint.checkpoint, device.is_gpu, ops)
    has_low_rank = blueprint.low_rank is not None
    choice = (blueprint.config, blueprint.model_config, blueprint.checkpoint, device.is_gpu, has_low_rank)
    scales = choose_scales(*choice)
    side = side_stream(device) if alone else None
    packs, kv_dtype = packing is not None, blueprint.kv_dtype
    memory = HugePages() if not device.is_gpu and has_huge_pages() else None
    build = Build(dtype, device.torch_device, ops, blueprint.parallel, side, packs, kv_dtype, memory, scales)
    placement, offload = _place_experts(blueprint, build)
    if offload is not None:
        own(offload)
    _warn(blueprint, placement)
    experts = None if blueprint.low_rank is None else blueprint.low_rank.resident
    model = blueprint.make_model(build, experts if offload is None else offload.experts)
    expect_types(model, blueprint.checkpoint, model.rules)
    with logged("weights loaded and kernels compiled"):
        wait_for_kernels = _compile_ahead(blueprint, model, draft)
        disk = DiskMemory(cache_folder()) if placement == "disk" else None
        _load(blueprint, model, offload, packing, disk, scales)
        wait_for_kernels()
    if scales is not None and (why := _check_products(model, ops, blueprint.model_config.hidden_size)):
        logger.warning("%s: all matrices are expanded to %s", why, str(dtype).removeprefix("torch."))
    moe = blueprint.model_config.moe
    if scales is not None and moe and (why := check_experts(model, moe.top_k, dtype, build.device, ops.expert_pairs)):
        raise ConfigError(
            f"quantization={blueprint.config.quantization!r}: on this device {why}; set quantization='none', which "
            f"expands experts to 16 bits"
        )
    return model


def _check_products(model: Transformer, ops: Ops, hidden: int) -> str:
    """Norms are inside of products only where these read the hidden state."""
    return check_products(model, ops.linear, ops.linear_parts) or check_products(
        model, ops.normed_linear, columns=hidden
    )


def open_balancer(blueprint: Blueprint, model: Transformer) -> Balancer | None:
    """Before the cache is sized: redundant experts and the spare buffer take their room first."""
    config, moe, parallel = blueprint.config, blueprint.model_config.moe, blueprint.parallel
    if not config.enable_eplb or moe is None:
        return None
    layers: list[Any] = [layer.mlp.experts for layer in model.layers if isinstance(layer.mlp, MoeLayer)]
    for layer in layers:
        add_places(layer, moe.num_experts, config.num_redundant_experts)
    load = ExpertLoad(len(layers), moe.num_experts, blueprint.device.torch_device, config.eplb_window_size)
    return Balancer(layers, load, parallel, config.eplb_step_interval)


def _place_experts(blueprint: Blueprint, build: Build) -> tuple[str | None, Offload | None]:
    """(where they are, None: there are none; what brings them, None: nothing has to). "disk": quantised ones on a CPU,
    in memory that the operating system reads from a file. Buffers and copies would only divide the same memory."""
    config, model_config, low_rank = blueprint.config, blueprint.model_config, blueprint.low_rank
    device, limits = blueprint.device, blueprint.limits
    if model_config.moe is None:
        return None, None
    forms = None if low_rank is None else low_rank.forms
    stored = scaled_facts(build.scaling)
    if build.packs and config.quantization == "auto":
        stored = {"stored_bytes": mean_bytes(blueprint.checkpoint)}
    uses_mtp = config.speculative_method == "mtp"
    sized = model_config.with_mtp_layer() if uses_mtp else model_config
    tiers = size_experts(config, sized, device, blueprint.dtype, limits, forms, blueprint.parallel, stored)
    if uses_mtp and tiers.placement == "offload":
        raise ConfigError(
            "speculative_method='mtp': the experts are offloaded, because expert_placement says so or they do not fit, "
            "and this layer guesses in steps that do not wait for experts; take a device or ranks that hold all of "
            "them, or leave speculative_method out"
        )
    if tiers.placement == "offload" and build.packs and low_rank is None:
        return "disk", None
    if tiers.placement == "offload" and config.load_format != "dummy":
        # Locking host memory takes long: a checkpoint that is not whole is refused before.
        nowhere = replace(build, device=torch.device("meta"), packs=False, scaling=None)
        empty = blueprint.make_model(nowhere, None if low_rank is None else low_rank.resident)
        check_weights(empty, blueprint.checkpoint, empty.rules + SVD_RULES)
    return tiers.placement, open_offload(config, model_config, device, build, tiers, blueprint.checkpoint, forms)


def _warn(blueprint: Blueprint, placement: str | None) -> None:
    """Of low-rank experts and of options without effect, on rank 0 only."""
    config = blueprint.config
    if blueprint.parallel.rank > 0 or blueprint.is_draft:
        return
    if blueprint.low_rank is not None:
        logger.warning("%s", blueprint.low_rank.notice)
    num_mtp, first = blueprint.model_config.num_mtp_layers, f"model.layers.{blueprint.model_config.num_layers}."
    is_used = config.speculative_method == "mtp"
    if num_mtp > is_used and any(name.startswith(first) for name in blueprint.checkpoint.names()):
        text = "%d layer(s) for multi-token prediction (MTP) after the last are not used and not loaded"
        logger.info(text, num_mtp - is_used)
    for name, why in options_without_effect(config, blueprint.device.is_gpu, placement).items():
        logger.warning("%s=%r %s", name, getattr(config, name), why)


def _load(
    blueprint: Blueprint,
    model: Transformer,
    offload: Offload | None,
    packing: str | None,
    disk: DiskMemory | None,
    scales: Scales | IntegerForm | None,
) -> None:
    places: dict[str, Any] = {} if offload is None else offload.places()
    checkpoint, scaled = blueprint.checkpoint, scaled_layers(model.layers)
    stored = {**checkpoint.packed_forms(), **checkpoint.quantised_types()}
    packed: Packing | PartedLoading | None = None if packing is None else Packing(model, packing, stored, disk)
    if scales is not None:
        packed = PartedLoading(model)
        places |= scaled_expert_targets(model)
    if packed is not None:
        places = {**places, **packed.targets()}
    if blueprint.config.load_format == "dummy":
        load_dummy(model, blueprint.config.seed, places)
    else:
        load_weights(model, checkpoint, model.rules + SVD_RULES, places)
        load_kv_scales(scaled, checkpoint)
        if blueprint.parallel.rank == 0:
            report_stored(checkpoint, packing, scales, blueprint.dtype, bool(scaled) and scaled[0].from_checkpoint)
    if scaled and blueprint.parallel.rank == 0:
        source = "from the checkpoint" if scaled[0].from_checkpoint else "measured on the first prompts"
        logger.info("KV cache in 8-bit floats (e4m3); scales of keys and values, by layer, are %s", source)
    if packed is not None and blueprint.parallel.rank == 0:
        packed.report()
        if scales is not None and blueprint.low_rank is None:
            report_experts(scales, blueprint.model_config, blueprint.parallel)
        if blueprint.low_rank is not None:
            logger.info("experts stay in %s: low-rank ones are not quantised", blueprint.dtype)
    if offload is not None:
        offload.watch_gates(model.router_weights())


def _compile_ahead(blueprint: Blueprint, model: Transformer, draft: Transformer | None) -> Callable[[], None]:
    """Kernels are compiled in threads while weights load: start-up of Qwen3-0.6B on an H200 with an empty kernel cache
    took 23.6 s without. Not with offloaded experts: uninitialised router outputs would choose them."""
    if not (runs_on_device(model, blueprint.device) and captures_attention(model) and model.graph_safe):
        return lambda: None
    from nanovllm.ops.triton.compile_ahead import compile_ahead

    trial = blueprint.make_runner(model, CacheLayout(blueprint.limits.block_size, 1, 0), draft)
    return compile_ahead(trial.launch_every_kernel, blueprint.device.torch_device)
