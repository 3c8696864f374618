"""Command-line options, each declared once.

Names, types and defaults come from EngineConfig and SamplingParams themselves, so the command line can neither lag
behind them nor disagree with them; this file only adds help in plain words. A command gets a group by naming it:

    @with_options(config=ENGINE, sampling=SAMPLING)
    def generate(prompts: list[str], config: EngineConfig, sampling: dict[str, Any]) -> None: ...

and is called with the checked objects. Those of SAMPLING are the options that were given: the others come from the
model's generation_config.json, and the model is not loaded yet. No torch here: `nanovllm --help` must be instant.

`--help` fits a screen: of each group it shows only the `common` options. `--help-all` shows the others too.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from nanovllm.config import (
    ATTN_BACKENDS,
    DEVICES,
    DTYPES,
    EXECUTORS,
    EXPERT_PLACEMENTS,
    EXPERT_POLICIES,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    POLICIES,
    QUANTIZATIONS,
    SPECIAL_TOKENS_IN_TEXT,
    SPECULATIVE_METHODS,
    EngineConfig,
)
from nanovllm.errors import ConfigError, RequestError
from nanovllm.sampling_params import SamplingParams


def int_or_none(value: Any) -> int | None:
    return None if str(value).lower() == "none" else int(str(value))


METAVARS: dict[Any, str] = {
    str: "TEXT",
    str | None: "TEXT",
    list[str]: "TEXT",
    int: "INT",
    int | None: "INT|none",
    list[int]: "INT",
    float: "FLOAT",
    float | None: "FLOAT",
}


@dataclass(frozen=True)
class OptionGroup:
    """The options that make one object."""

    title: str
    of: type  # a dataclass: one option for each of its fields
    help: Mapping[str, str]
    build: Callable[[dict[str, Any]], Any] = None  # type: ignore[assignment]  # default: of(**options)
    defaults: Mapping[str, Any] = field(default_factory=dict)  # where the terminal has another one
    types: Mapping[str, type] = field(
        default_factory=dict
    )  # where the field takes more kinds than a command line can express
    skipped: frozenset[str] = frozenset()
    common: frozenset[str] | None = None  # what --help shows; None = all
    only_given: bool = False  # `build` gets the options of the command line and no defaults
    others: Mapping[str, Any] = field(default_factory=dict)  # options of `build` that are no fields, and their kinds

    def __post_init__(self) -> None:
        if self.build is None:
            object.__setattr__(self, "build", lambda values: self.of(**values))

    def parameters(self) -> list[inspect.Parameter]:
        hints = get_type_hints(self.of, include_extras=True)
        return [
            self._parameter(f.name, self.types.get(f.name, hints[f.name]), self.defaults.get(f.name, f.default))
            for f in dataclasses.fields(self.of)
            if f.name not in self.skipped
        ] + [self._parameter(name, kind, None) for name, kind in self.others.items()]

    def _parameter(self, name: str, kind: Any, default: Any) -> inspect.Parameter:
        if get_origin(kind) is Annotated:  # the field declares its option itself
            return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        settings: dict[str, Any] = {"help": self.help.get(name, ""), "rich_help_panel": self.title}
        settings["hidden"] = self.common is not None and name not in self.common
        settings["metavar"] = None if kind is bool else METAVARS[kind]
        if kind == (int | None):
            settings["parser"], kind = int_or_none, int
        elif name in self.types:
            default = None  # a list: empty unless given
        if kind is bool:
            dashed = name.replace("_", "-")
            option = typer.Option(f"--{dashed}/--no-{dashed}", show_default=default is True, **settings)
        else:
            option = typer.Option(f"--{name.replace('_', '-')}", **settings)
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
        )


class Command(TyperCommand):
    """Help in plain text, a section for each group of options: in tables of 80 columns long names were cut."""

    def get_short_help_str(self, limit: int = 45) -> str:
        """In the list of commands: whole, in several lines if need be."""
        return super().get_short_help_str(200)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            own = "Arguments" if param.param_type_name == "argument" else "Options"
            if record := param.get_help_record(ctx):  # None: hidden
                sections.setdefault(getattr(param, "rich_help_panel", None) or own, []).append(record)
        sections["Options"] = sections.pop("Options")  # last; there is always --help
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records, col_max=28)


def _help_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        for param in ctx.command.params:
            param.hidden = False  # type: ignore[attr-defined]
        typer.echo(ctx.get_help())
        raise typer.Exit


HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool, typer.Option("--help-all", callback=_help_all, is_eager=True, help="Show every option and exit.")
    ],
)


CONTEXT = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)


def is_given(ctx: typer.Context, option: str) -> bool:
    source = ctx.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"


def with_options(**groups: OptionGroup) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace each named parameter of a command by the options of its group. A command may have a `ctx` too."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        added = {name: group.parameters() for name, group in groups.items()}

        @functools.wraps(command)
        def run(ctx: typer.Context, **values: Any) -> None:
            built = {}
            for name, group in groups.items():
                chosen = {option.name: values.pop(option.name) for option in added[name]}
                if group.only_given:
                    chosen = {option: value for option, value in chosen.items() if is_given(ctx, option)}
                built[name] = group.build(chosen)
            values.pop(HELP_ALL.name, None)
            if CONTEXT.name in own:
                values[CONTEXT.name] = ctx
            command(**values, **built)

        kept = [p for p in own.values() if p.name not in groups and p.name != CONTEXT.name]
        shown = [CONTEXT, *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in kept)]
        shown += [option for options in added.values() for option in options]
        shown += [HELP_ALL] if any(group.common is not None for group in groups.values()) else []
        run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in shown}  # what typer reads
        return run

    return decorate


def _one_of(names: tuple[str, ...]) -> str:
    return f"One of: {', '.join(names)}."


def _engine_config(values: dict[str, Any]) -> EngineConfig:
    if values.get("speculative_method") == "none":
        values["speculative_method"] = None
    text = values.pop("speculative_config", None)
    if text is not None:
        try:
            values["speculative_config"] = json.loads(text)
        except ValueError as error:
            example = """'{"method": "ngram", "num_speculative_tokens": 4}'"""
            raise ConfigError(f"speculative_config={text!r}: no JSON ({error}); write for example {example}") from None
    return EngineConfig.from_options(**values)


ENGINE = OptionGroup(
    title="Engine",
    of=EngineConfig,
    build=_engine_config,
    others={"speculative_config": str | None},
    common=frozenset({"model", "device", "dtype", "max_model_len", "gpu_memory_gb", "tensor_parallel_size", "seed"}),
    help={
        "model": "A folder in Hugging Face format, a .gguf file, a repository id, or smollm2.",
        "tokenizer": "Take the tokenizer from another model (same kinds of names).",
        "generation_config": "Sampling defaults: auto = the model's generation_config.json, vllm = not those, or a "
        "folder with another such file.",
        "device": _one_of(DEVICES),
        "dtype": f"{_one_of(DTYPES)} auto is float32 on a CPU.",
        "quantization": "Weights: auto keeps a GGUF, AWQ, GPTQ or (on a GPU) FP8 file quantised; int8, int4 and (on a "
        f"GPU) fp8 quantise other models; none computes in dtype. {_one_of(QUANTIZATIONS)}",
        "max_model_len": "Longest prompt plus output, in tokens; none = what the model was trained for.",
        "max_num_seqs": "How many sequences may run at the same time; the others wait.",
        "max_num_batched_tokens": "How many tokens one step may compute; long prompts are cut into such pieces.",
        "gpu_memory_utilization": "Share of the GPU's memory that this engine may fill with weights and cache.",
        "gpu_memory_gb": "Behave as a card of so many GB; default: all.",
        "kvcache_block_size": "Tokens per block of the KV cache (16 to 256): small wastes less.",
        "num_kvcache_blocks": "Blocks in the KV cache; none = as many as fit.",
        "cpu_kvcache_gb": "Gigabytes for the KV cache on a CPU.",
        "kv_cache_dtype": "Number format of the KV cache: auto is the model's; float16 and int8 are for CPUs, fp8 for "
        f"GPUs. {_one_of(KV_CACHE_DTYPES)}",
        "enable_prefix_caching": "Reuse the computed beginning of prompts that begin alike.",
        "scheduling_policy": f"Who is served first: first come, shortest, or by priority. {_one_of(POLICIES)}",
        "max_wait_steps": "sjf: a waiting request is passed over for at most so many steps; none = no limit.",
        "decode_steps": "Decode steps per launch while no request waits; same output for all.",
        "speculative_method": "Guess several tokens and verify them in one step, same output: ngram guesses what "
        f"followed the same tokens before, draft_model asks a smaller model, mtp the layer of DeepSeek-V3 for it. "
        f"{_one_of(('none', *SPECULATIVE_METHODS))}",
        "speculative_config": "The five options of speculation in vLLM's form, a JSON object: "
        """'{"method": "ngram", "num_speculative_tokens": 4}'.""",
        "speculative_model": "draft_model: a smaller model with the same vocabulary, as --model.",
        "num_speculative_tokens": "Speculation: most guesses for a sequence in one step; none = 4, with mtp 1.",
        "prompt_lookup_max": "ngram: most tokens that are compared; none = prompt-lookup-min, or 5.",
        "prompt_lookup_min": "ngram: fewest tokens that must be the same; none = prompt-lookup-max, or 5.",
        "expert_placement": "Mixture of experts: keep all experts on the GPU, or load them as they are chosen; auto "
        f"offloads only what does not fit. {_one_of(EXPERT_PLACEMENTS)}",
        "expert_cache_gb": "Gigabytes of GPU memory for offloaded experts; default: what is left.",
        "expert_host_gb": "Gigabytes of host memory for experts, the others are read from disk; default: what is free.",
        "expert_policy": f"Which expert stays on the GPU: often used, last used, or none. {_one_of(EXPERT_POLICIES)}",
        "expert_prefetch": "Copy the experts that the next layer will probably choose while the link is idle.",
        "expert_cpu_misses": "Compute a missing expert on the CPU if one or two tokens chose it; changes last digits.",
        "enforce_eager": "Do not capture GPU graphs: starts faster, runs slower.",
        "tensor_parallel_size": "GPUs (or CPU processes) to split the model over.",
        "expert_parallel_size": "Over how many groups to spread whole experts; 1: each has a share of all.",
        "enable_eplb": "Move spread experts between their groups, so that all have as much to do.",
        "num_redundant_experts": "eplb: places of each layer for second copies of popular experts, in all.",
        "eplb_window_size": "eplb: steps whose load decides.",
        "eplb_step_interval": "eplb: steps between two times that experts move.",
        "distributed_executor_backend": "Where the ranks run: in this process, in processes of this machine, on a Ray "
        f"cluster, or where torchrun started them; default: the simplest that does. {_one_of(EXECUTORS)}",
        "worker_timeout": "Seconds after which a rank that does not answer is given up.",
        "attn_backend": f"How attention is computed; auto takes the best that works here. {_one_of(ATTN_BACKENDS)}",
        "seed": "The same seed repeats a run.",
        "load_format": f"dummy = random weights from config.json alone. {_one_of(LOAD_FORMATS)}",
        "skip_tokenizer_init": "Work on token ids only; no text.",
        "special_tokens_in_text": "Special tokens that users write, say <|im_end|>: read as control tokens, refuse "
        f"the request, or make them plain text. {_one_of(SPECIAL_TOKENS_IN_TEXT)}",
    },
)


def _checked_sampling(given: dict[str, Any]) -> dict[str, Any]:
    if "logit_bias" in given:
        given["logit_bias"] = dict(_bias(text) for text in given["logit_bias"])
    SamplingParams(**{"max_tokens": None, **given})  # the model may set a limit that min_tokens must not exceed
    return given


def _bias(text: str) -> tuple[int, float]:
    try:
        token, _, value = text.partition("=")
        return int(token), float(value)
    except ValueError:
        raise RequestError(f"logit_bias={text!r}: write TOKEN_ID=NUMBER, for example 42=-5") from None


_LISTS: dict[str, Any] = {
    "stop": list[str],
    "stop_token_ids": list[int],
    "allowed_token_ids": list[int],
    "bad_words": list[str],
    "logit_bias": list[str],
}

SAMPLING = OptionGroup(
    title="Sampling (the model's generation_config.json comes before these defaults)",
    of=SamplingParams,
    build=_checked_sampling,
    only_given=True,
    defaults={"temperature": 0.0, "max_tokens": 256},
    types=_LISTS,
    # One --seed is enough here, the engine's: it decides the tokens of every request whatever else is in the batch.
    # A terminal without text is of no use, so there is no --no-detokenize.
    skipped=frozenset({"seed", "detokenize", "structured_outputs"}),
    common=frozenset({"n", "temperature", "top_p", "top_k", "stop", "max_tokens"}),
    help={
        "n": "Completions of each prompt.",
        "temperature": "0: always the likeliest token; 1: as the model learnt; higher is wilder.",
        "top_p": "Sample from the likeliest tokens that together have this probability.",
        "top_k": "The k likeliest tokens; 0 = all.",
        "min_p": "Drop tokens less likely than this share of the likeliest one.",
        "presence_penalty": "Above 0: avoid tokens that were already written.",
        "frequency_penalty": "Above 0: avoid tokens the more, the more often they were written.",
        "repetition_penalty": "Above 1: avoid tokens of the prompt and of the output.",
        "stop": "End before this text. Give it again for more.",
        "stop_token_ids": "End at this token id. Give it again for more.",
        "ignore_eos": "Do not stop at the model's own end token.",
        "max_tokens": "Most tokens to write; none = until max_model_len.",
        "min_tokens": "Fewest tokens to write.",
        "logprobs": "With --json: log probabilities of so many alternatives per token.",
        "prompt_logprobs": "With --json: the same for the prompt's tokens.",
        "logit_bias": "TOKEN_ID=NUMBER makes a token likelier or less likely. Give it again for more.",
        "allowed_token_ids": "Write only this token. Give it again for more.",
        "bad_words": "Never write this text. Give it again for more.",
        "skip_special_tokens": "Leave end markers and the like out of the text.",
        "include_stop_str_in_output": "Keep the stop string or stop token at the end of the text.",
    },
)
