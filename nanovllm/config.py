"""EngineConfig: the options of an engine, checked once and then frozen.

Values computed later (how many blocks fit, which backend runs) are in other objects: nothing here is ever overwritten.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, fields
from typing import Any

from nanovllm.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "float16", "bfloat16")
DTYPE_ALIASES = {"half": "float16", "float": "float32"}
LOAD_FORMATS = ("auto", "dummy")
KV_CACHE_DTYPES = ("auto", "float16", "int8", "fp8", "fp8_e4m3")
STORED_FORMATS = ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "gguf")  # vLLM's names
QUANTIZATIONS = ("auto", "none", "int8", "int4", "fp8")
SPECIAL_TOKENS_IN_TEXT = ("allow", "refuse", "escape")
POLICIES = ("fcfs", "sjf", "priority")
EXPERT_PLACEMENTS = ("auto", "resident", "offload")
EXPERT_POLICIES = ("lfu", "lru", "none")
SPECULATIVE_METHODS = ("ngram", "draft_model", "mtp")
EXECUTORS = ("local", "mp", "multiprocess", "ray", "torchrun")
LATENT_BACKENDS = ("triton.mla", "torch.mla")  # for latent attention (DeepSeek), which the others do not compute
ATTN_BACKENDS = ("auto", "triton", "flash", "flashinfer", "flash1", "native", "sdpa", "sdpa.math", *LATENT_BACKENDS)
# Options of vLLM that scripts often set: (name, values that mean what this engine does anyway, why there are no
# others). None is always accepted.
VLLM_OPTIONS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("trust_remote_code", (False,), "code that comes with a model is never run"),
    ("enable_chunked_prefill", (True,), "prompts longer than max_num_batched_tokens are always computed in pieces"),
    ("swap_space", (0,), "a preempted sequence is computed again and never swapped to host memory"),
    ("revision", ("main",), "download another revision and give its folder as model"),
    ("disable_log_stats", (True, False), "no statistics are logged; RequestOutput.metrics is always filled"),
    ("max_logprobs", (-1,), "logprobs may always be up to 1000, or -1 for the whole vocabulary"),
)


def _choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r}: must be one of {', '.join(allowed)}")


def _count(name: str, value: Any, low: int, high: int, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name}={value!r}: must be an integer in [{low}, {high}]; {remedy}")


def _fraction(name: str, value: Any, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:  # NaN fails too
        raise ConfigError(f"{name}={value!r}: must be a number in (0, 1]; {remedy}")


def _gigabytes(name: str, value: Any, remedy: str, zero: bool = False) -> None:
    number = not isinstance(value, bool) and isinstance(value, (int, float))
    if not number or not 0 <= value < 2**20 or (value == 0 and not zero):  # NaN fails too
        wanted = "a number of gigabytes from 0" if zero else "a positive number of gigabytes"
        raise ConfigError(f"{name}={value!r}: must be {wanted} below {2**20}; {remedy}")


EPLB_NAMES = {
    "window_size": "eplb_window_size",
    "step_interval": "eplb_step_interval",
    "num_redundant_experts": "num_redundant_experts",
}


def _flat_eplb(given: Any, options: dict[str, Any]) -> dict[str, Any]:
    """vLLM's eplb_config, a dictionary, as the options of this engine."""
    if not isinstance(given, dict) or not given.keys() <= EPLB_NAMES.keys():
        raise ConfigError(f"eplb_config={given!r}: must be a dictionary with some of {', '.join(EPLB_NAMES)}")
    found = {EPLB_NAMES[name]: value for name, value in given.items() if value is not None}
    for name, value in found.items():
        if options.get(name) not in (None, value):
            raise ConfigError(f"{name}={options[name]!r} and eplb_config={given!r} differ: give one")
    return found


DEFAULT_GUESSES: dict[str | None, int] = {"mtp": 1}  # the layer was trained to make one
SPECULATIVE_NAMES = {
    "method": "speculative_method",
    "model": "speculative_model",
    **{name: name for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")},
}


# Others that vLLM has there, as VLLM_OPTIONS
SPECULATIVE_OPTIONS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("revision", ("main",), "download another revision and give its folder as model"),
    ("quantization", (), "a draft model is computed as its file has it"),
    ("max_model_len", (), "guesses are made up to the engine's own max_model_len"),
    ("enforce_eager", (False,), "guesses are made inside the captured steps of the engine; set its own enforce_eager"),
    ("disable_by_batch_size", (), "whether guesses pay is measured, and more than 16 sequences get none"),
    ("parallel_drafting", (False,), "a draft model writes one token after another"),
    ("disable_padded_drafter_batch", (True, False), ""),
)


def _take_vllm(options: dict[str, Any], table: tuple[tuple[str, tuple[Any, ...], str], ...]) -> None:
    """Takes out what vLLM has and this engine does anyway; other values are refused."""
    for name, harmless, why in table:
        if (value := options.pop(name, None)) is not None and value not in harmless:
            may = " or ".join(map(repr, harmless)) or "None"
            raise ConfigError(f"{name}={value!r}: only {may} is possible; {why}")


def _flat_speculation(given: Any, options: dict[str, Any]) -> dict[str, Any]:
    """vLLM's speculative_config, a dictionary, as the options of this engine."""
    if not isinstance(given, dict):
        raise ConfigError(
            f"speculative_config={given!r}: must be a dictionary; possible: {', '.join(SPECULATIVE_NAMES)}"
        )
    written = given
    given = {name: value for name, value in given.items() if value is not None}
    ranks = options.get("tensor_parallel_size") or 1
    draft_ranks = ("draft_tensor_parallel_size", (ranks,), "a draft model is cut over the ranks as the large one is")
    try:
        _take_vllm(given, (*SPECULATIVE_OPTIONS, draft_ranks))
    except ConfigError as error:
        raise ConfigError(f"speculative_config: {error}") from None
    if unknown := given.keys() - SPECULATIVE_NAMES.keys():
        raise ConfigError(
            f"speculative_config={given!r}: {min(map(str, unknown))!r} is unknown; possible: "
            f"{', '.join(SPECULATIVE_NAMES)}"
        )
    lookup = ("ngram", "[ngram]", "ngram_gpu")
    if given.get("model") in lookup and given.get("method", "ngram") in lookup:  # older scripts name the method so
        given["method"] = given.pop("model")
    aliases = {"[ngram]": "ngram", "ngram_gpu": "ngram", "deepseek_mtp": "mtp"}
    if isinstance(method := given.get("method"), str):
        given["method"] = aliases.get(method, method)
    own = str(options.get("model") or EngineConfig.model)
    if given.get("method") == "mtp" and "model" in given and str(given["model"]) == own:
        del given["model"]  # vLLM's scripts may name the model itself
    if "method" not in given and "model" not in given:
        raise ConfigError(f"speculative_config={written!r}: has no method; possible: {', '.join(SPECULATIVE_METHODS)}")
    found = {SPECULATIVE_NAMES[name]: value for name, value in {"method": "draft_model", **given}.items()}
    for name, value in found.items():
        if options.get(name) not in (None, value):
            raise ConfigError(f"{name}={options[name]!r} and speculative_config={given!r} differ: give one")
    return found


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of `LLM(...)`. docs/options.md explains each in plain words."""

    model: str = "smollm2"
    tokenizer: str | None = None  # another folder to take the tokenizer from
    generation_config: str = "auto"  # sampling defaults: the model's own, "vllm" = neutral, or a folder with others
    device: str = "auto"
    dtype: str = "auto"  # the checkpoint's own on a GPU, float32 on the CPU
    quantization: str = "auto"  # of matrices: auto = as the file has them where that can be computed, none = expanded
    max_model_len: int | None = None  # None = what the model was trained for
    max_num_seqs: int = 256  # sequences running at once
    max_num_batched_tokens: int | None = None  # tokens computed in one step; None = a default for the device
    gpu_memory_utilization: float = 0.9
    gpu_memory_gb: float | None = None  # behave as on a card of this size; None = the card's own
    kvcache_block_size: int | None = None  # tokens per block; None = a default for the device
    num_kvcache_blocks: int | None = None  # None = as many as fit
    cpu_kvcache_gb: float = 2.0  # KV cache on the CPU, unless num_kvcache_blocks is set
    kv_cache_dtype: str = "auto"  # of keys and values: auto = the model's, float16 and int8 on a CPU, fp8 on a GPU
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    max_wait_steps: int | None = 64  # sjf: a waiting request is passed over for at most so many steps; None = no aging
    decode_steps: int | None = None  # decode steps per launch when no request waits; None = a default for the device
    speculative_method: str | None = None  # guess tokens and verify them: by lookup, a smaller model or an own layer
    speculative_model: str | None = None  # draft_model: that model; it has the same vocabulary
    num_speculative_tokens: int | None = None  # most guesses for a sequence in one step; None = 4, with mtp 1
    prompt_lookup_max: int | None = None  # ngram: most tokens that are compared; None = prompt_lookup_min, or 5
    prompt_lookup_min: int | None = None  # ngram: fewest that must be the same; None = prompt_lookup_max, or 5
    expert_placement: str = "auto"  # of a mixture of experts: resident if all fit, else offload
    expert_cache_gb: float | None = None  # GPU memory for experts when they are offloaded; None = what is left
    expert_host_gb: float | None = None  # host memory for experts; None = what is free
    expert_policy: str = "lfu"  # which expert stays on the GPU
    expert_prefetch: bool = True  # copy experts that the next layer will probably choose, while the link is idle
    expert_cpu_misses: bool = False  # compute a missing expert on the CPU if few tokens need it
    enforce_eager: bool = False
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1  # groups of ranks with whole experts; 1 = every rank has a share of each expert
    enable_eplb: bool = False  # move experts between the ranks they are spread over, so that all have as much to do
    num_redundant_experts: int = 0  # of each layer: places for second copies of popular experts, on all ranks together
    eplb_window_size: int = 1000  # steps whose load decides
    eplb_step_interval: int = 3000  # steps between two times that experts move
    distributed_executor_backend: str | None = None  # where the ranks are; None = here, or where torchrun put them
    worker_timeout: float = 60.0  # seconds after which a rank that does not answer is given up
    attn_backend: str = "auto"
    seed: int = 0
    load_format: str = "auto"
    skip_tokenizer_init: bool = False
    special_tokens_in_text: str = "allow"  # control tokens in a user's text are allowed, refused or escaped

    def __post_init__(self) -> None:
        for name in ("model", "tokenizer", "generation_config", "speculative_model"):
            if isinstance(path := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(path))
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model={self.model!r}: give a folder, a .gguf file, an alias or a repository id")
        if self.tokenizer is not None and (not isinstance(self.tokenizer, str) or not self.tokenizer):
            raise ConfigError(f"tokenizer={self.tokenizer!r}: give the folder of another tokenizer, or None")
        if not isinstance(self.generation_config, str) or not self.generation_config:
            raise ConfigError(f"generation_config={self.generation_config!r}: give 'auto', 'vllm' or a folder")
        _choice("device", self.device, DEVICES)
        _choice("dtype", self.dtype, DTYPES)
        if self.quantization in STORED_FORMATS:
            raise ConfigError(
                f"quantization={self.quantization!r}: such files are recognised by themselves; leave it out"
            )
        _choice("quantization", self.quantization, QUANTIZATIONS)
        _choice("load_format", self.load_format, LOAD_FORMATS)
        _choice("special_tokens_in_text", self.special_tokens_in_text, SPECIAL_TOKENS_IN_TEXT)
        _choice("scheduling_policy", self.scheduling_policy, POLICIES)
        _choice("attn_backend", self.attn_backend, ATTN_BACKENDS)
        if self.max_model_len is not None:
            _count("max_model_len", self.max_model_len, 2, 2**24, "prompt and output together")
        _count("max_num_seqs", self.max_num_seqs, 1, 65536, "256 suits a large GPU, 16 a CPU")
        if self.max_num_batched_tokens is not None:
            _count("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**20, "2048 is a good start")
            if self.max_num_batched_tokens < self.max_num_seqs:
                # Every running sequence must be able to decode one token in each step, or the last ones starve.
                raise ConfigError(
                    f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
                    f"raise the former or lower the latter"
                )
        _fraction("gpu_memory_utilization", self.gpu_memory_utilization, "0.9 leaves a tenth for others")
        if self.kvcache_block_size is not None:
            _count("kvcache_block_size", self.kvcache_block_size, 16, 256, "16, 32, 64, 128 or 256")
            if self.kvcache_block_size & (self.kvcache_block_size - 1):
                near = 1 << (self.kvcache_block_size.bit_length() - 1)
                raise ConfigError(f"kvcache_block_size={self.kvcache_block_size}: must be a power of two (try {near})")
        if self.num_kvcache_blocks is not None:
            _count("num_kvcache_blocks", self.num_kvcache_blocks, 1, 2**31 - 1, "leave it out to fill the memory")
        _gigabytes("cpu_kvcache_gb", self.cpu_kvcache_gb, "2 holds 46,000 tokens of a small model")
        _choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if self.max_wait_steps is not None:
            _count("max_wait_steps", self.max_wait_steps, 0, 2**31 - 1, "None turns aging off")
        if self.decode_steps is not None:
            _count("decode_steps", self.decode_steps, 1, 64, "1 visits the scheduler for every token")
        self._check_speculation()
        _count("tensor_parallel_size", self.tensor_parallel_size, 1, 1024, "the number of GPUs to split over")
        self._check_experts()
        if self.distributed_executor_backend is not None:
            _choice("distributed_executor_backend", self.distributed_executor_backend, EXECUTORS)
        if not isinstance(self.worker_timeout, (int, float)) or not 1 <= self.worker_timeout <= 86400:
            raise ConfigError(f"worker_timeout={self.worker_timeout!r}: must be 1 to 86400 seconds; 60 suits most")
        _count("seed", self.seed, -(2**63), 2**64 - 1, "any 64-bit integer")
        switches = ("enable_prefix_caching", "enable_eplb", "expert_prefetch", "expert_cpu_misses", "enforce_eager")
        for name in (*switches, "skip_tokenizer_init"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be True or False")

    @property
    def prompt_lookup(self) -> tuple[int, int]:
        """(fewest, most) tokens that are compared; with vLLM's defaults."""
        given = [size for size in (self.prompt_lookup_min, self.prompt_lookup_max) if size is not None] or [5]
        return given[0], given[-1]

    @property
    def num_guesses(self) -> int:
        """Most of them for a sequence in one step."""
        given = self.num_speculative_tokens
        return DEFAULT_GUESSES.get(self.speculative_method, 4) if given is None else given

    def _check_speculation(self) -> None:
        method, model = self.speculative_method, self.speculative_model
        if method is not None:
            _choice("speculative_method", method, SPECULATIVE_METHODS)
        if model is not None and (not isinstance(model, str) or not model):
            raise ConfigError(f"speculative_model={model!r}: give a folder, a .gguf file, an alias or a repository id")
        if (method == "draft_model") != (model is not None):
            raise ConfigError(
                f"speculative_method={method!r}, speculative_model={model!r}: a model that guesses goes with the "
                f"method 'draft_model', and that method needs one; give both or neither"
            )
        _count("num_speculative_tokens", self.num_guesses, 1, 16, f"{DEFAULT_GUESSES.get(method, 4)} is a good start")
        for name in ("prompt_lookup_max", "prompt_lookup_min"):
            if getattr(self, name) is not None:
                _count(name, getattr(self, name), 1, 32, "3 is a good start")
        fewest, most = self.prompt_lookup
        if fewest > most:
            raise ConfigError(f"prompt_lookup_min={fewest} is above prompt_lookup_max={most}: lower the former")

    def _check_experts(self) -> None:
        _choice("expert_placement", self.expert_placement, EXPERT_PLACEMENTS)
        _choice("expert_policy", self.expert_policy, EXPERT_POLICIES)
        if self.gpu_memory_gb is not None:
            _gigabytes("gpu_memory_gb", self.gpu_memory_gb, "leave it out to use the whole card")
        if self.expert_cache_gb is not None:
            _gigabytes("expert_cache_gb", self.expert_cache_gb, "leave it out to use what the card has left")
            if self.expert_placement == "resident":
                raise ConfigError(
                    f"expert_cache_gb={self.expert_cache_gb} limits offloaded experts, but expert_placement='resident' "
                    f"keeps all on the GPU: leave one of the two out"
                )
            if self.gpu_memory_gb is not None and self.expert_cache_gb > self.gpu_memory_gb:
                raise ConfigError(
                    f"expert_cache_gb={self.expert_cache_gb} is more than gpu_memory_gb={self.gpu_memory_gb}: "
                    f"lower the former, or leave it out to use what is left"
                )
        self._check_spread()
        self._check_balancing()
        if self.expert_host_gb is not None:
            _gigabytes("expert_host_gb", self.expert_host_gb, "0 reads all experts from disk", zero=True)

    def _check_spread(self) -> None:
        size, ranks = self.expert_parallel_size, self.tensor_parallel_size
        _count("expert_parallel_size", size, 1, 1024, "the number of ranks to spread experts over")
        if ranks % size:
            raise ConfigError(
                f"expert_parallel_size={size}: must divide tensor_parallel_size={ranks}, whose ranks have the experts; "
                f"possible: {[n for n in range(1, ranks + 1) if ranks % n == 0]}"
            )
        if size > 1 and (self.expert_placement == "offload" or self.expert_cache_gb is not None):
            raise ConfigError(
                f"expert_parallel_size={size}: experts that are spread over ranks stay on them; leave expert_placement "
                f"and expert_cache_gb out, or expert_parallel_size: tensor_parallel_size={ranks} alone offloads a "
                f"share of each expert on every rank"
            )

    def _check_balancing(self) -> None:
        size, count = self.expert_parallel_size, self.num_redundant_experts
        _count("num_redundant_experts", count, 0, 65536, "a quarter of the experts of a layer is plenty")
        _count("eplb_window_size", self.eplb_window_size, 1, 2**20, "1000 is a good start")
        _count("eplb_step_interval", self.eplb_step_interval, 1, 2**31 - 1, "3000 is a good start")
        if self.enable_eplb and size == 1:
            raise ConfigError(
                f"enable_eplb=True: every rank has a share of each expert (expert_parallel_size={size}), so all have "
                f"as much to do; leave it out, or set expert_parallel_size to spread whole experts"
            )
        if count and not self.enable_eplb:
            raise ConfigError(f"num_redundant_experts={count}: nothing would use them; set enable_eplb=True too")
        if count % size:
            near = count // size * size
            raise ConfigError(
                f"num_redundant_experts={count}: must be a multiple of expert_parallel_size={size}, all ranks have as "
                f"many; possible: {near}, {near + size}"
            )

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """None is the default, and vLLM's options are accepted where they mean what this engine does. An unknown option
        is an error with the nearest known name."""
        _take_vllm(options, VLLM_OPTIONS)
        if (size := options.pop("block_size", None)) is not None:
            if options.get("kvcache_block_size") not in (None, size):
                raise ConfigError(f"block_size={size!r} is another name of kvcache_block_size, which differs: give one")
            options["kvcache_block_size"] = size
        if (eplb := options.pop("eplb_config", None)) is not None:
            options |= _flat_eplb(eplb, options)
        if (speculation := options.pop("speculative_config", None)) is not None:
            options |= _flat_speculation(speculation, options)
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known)}"
                raise ConfigError(f"unknown option {name!r}: {hint}")
        options = {name: value for name, value in options.items() if value is not None or name in NULLABLE}
        # torch.bfloat16 prints as "torch.bfloat16": accepted, so that vLLM scripts run unchanged
        for name in options.keys() & {"dtype", "kv_cache_dtype"}:
            dtype = re.sub(r"^torch\.", "", str(options[name]))
            options[name] = DTYPE_ALIASES.get(dtype, dtype)
        return cls(**options)


NULLABLE = {f.name for f in fields(EngineConfig) if "None" in str(f.type)}  # where None has a meaning of its own
Config = EngineConfig  # its name in the other small engines of this family
