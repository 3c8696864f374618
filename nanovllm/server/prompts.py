"""Bodies to engine inputs. Runs in threads (Service.encode): tokenising 100 kB takes longer than a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jinja2 import TemplateError

from nanovllm.engine.inputs import EngineInput, shows_tools
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import ContextLengthError, RequestError
from nanovllm.sampling.structured import to_lark
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.errors import ApiError, as_api_error, bad_field
from nanovllm.server.protocol import ChatBody, CompletionBody, DetokenizeBody, Sampling, TokenizeBody, Tool
from nanovllm.server.reasoning import Start, after_thoughts
from nanovllm.server.tools import Form, as_plain_text, grammar


def encode_prompts(engine: LLMEngine, body: CompletionBody, params: SamplingParams) -> list[EngineInput]:
    prompts = body.prompts
    found = []
    for number, prompt in enumerate(prompts):
        key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
        try:
            parsed = engine.inputs.parse({key: prompt, "cache_salt": body.cache_salt or ""})
            asked = body.max_tokens and params.max_tokens  # lowered by generation_config.json
            parsed = truncated(engine, parsed, body, asked)
            engine.check(parsed, params, body.priority)  # type: ignore[arg-type]
            check_room(engine, parsed, asked)
        except RequestError as error:
            if len(prompts) > 1 and "prompt" in str(error):
                message, code = f"prompt {number + 1} of {len(prompts)}: {error}", as_api_error(error).code
                raise ApiError(400, message, param="prompt", code=code) from None
            raise
        if body.echo and parsed.text is None:
            parsed = EngineInput(parsed.token_ids, tokenizer_of(engine).decode(parsed.token_ids), parsed.cache_salt)
        found.append(parsed)
    return found


def room_of(engine: LLMEngine) -> tuple[int, str]:
    """Tokens of prompt and output together, and what limits them."""
    blocks, length = engine.scheduler.blocks, engine.max_model_len
    capacity = blocks.num_blocks * blocks.block_size
    return (capacity, f"a KV cache of {capacity} tokens") if capacity < length else (length, f"max_model_len={length}")


def truncated(engine: LLMEngine, parsed: EngineInput, body: Sampling, max_tokens: int | None) -> EngineInput:
    """The last truncate_prompt_tokens of the prompt."""
    keep, (limit, source) = body.truncate_prompt_tokens, room_of(engine)
    if keep is None:
        return parsed
    if keep > limit:
        raise RequestError(f"truncate_prompt_tokens={keep}: {source} allows at most {limit}; -1 keeps what fits")
    keep = max(1, limit - (max_tokens or 1)) if keep == -1 else keep
    if len(parsed.token_ids) <= keep:
        return parsed
    return EngineInput(parsed.token_ids[-keep:], None, parsed.cache_salt)


def compiled(engine: LLMEngine, body: Sampling, params: SamplingParams) -> SamplingParams:
    try:
        return engine.grammars.compiled(params)
    except RequestError as error:
        raise body.in_own_words(error) from None


def free_thoughts(engine: LLMEngine, params: SamplingParams, start: Start) -> SamplingParams:
    """A grammar binds the answer, not what the model thinks before it."""
    wanted = params.structured_outputs
    if wanted is None or start is Start.OUTSIDE:
        return params
    source = after_thoughts(to_lark(wanted), start, engine.tokenizer)  # type: ignore[arg-type]
    return engine.grammars.compiled(replace(params, structured_outputs={"grammar": source}))


def check_room(engine: LLMEngine, parsed: EngineInput, max_tokens: int | None) -> None:
    """The engine writes as much as fits. A request for a number of tokens that do not fit is refused, as in vLLM."""
    size, (limit, source) = len(parsed.token_ids), room_of(engine)
    if max_tokens is not None and size + max_tokens > limit:
        raise ContextLengthError(
            f"max_tokens={max_tokens}: the prompt has {size} tokens and {source} leaves room for "
            f"{limit - size} new ones: lower max_tokens, leave it out, or shorten the prompt"
        )


def encode_chat(engine: LLMEngine, body: ChatBody, form: Form) -> tuple[EngineInput, SamplingParams]:
    token_ids = _render(engine, body, body.offered, form)
    salted: Any = {"prompt_token_ids": token_ids, "cache_salt": body.cache_salt or ""}
    parsed, params = engine.inputs.parse(salted), body.params(engine.sampling_defaults.values)
    asked = body.asked_tokens and params.max_tokens
    parsed = truncated(engine, parsed, body, asked)
    if body.must_call:  # a call that a stop string cuts is of no use, and its text is not the answer's
        params = replace(params, stop=None, stop_token_ids=None)
    engine.check(parsed, params, body.priority)  # type: ignore[arg-type]
    check_room(engine, parsed, asked)
    if body.offered and body.binds_calls:
        return parsed, _with_grammar(engine, params, body, form)
    return parsed, compiled(engine, body, params)


def _with_grammar(engine: LLMEngine, params: SamplingParams, body: ChatBody, form: Form) -> SamplingParams:
    """Compiled; a schema that cannot be is named by its place."""
    if body.answers_json:
        compiled(engine, body, params)  # an error of its schema is the schema's, not that of the tools
    source = grammar(form, body, engine.tokenizer)
    try:
        return engine.grammars.compiled(replace(params, structured_outputs={"grammar": source}))
    except RequestError as error:
        if not str(error).startswith("structured_outputs"):  # a field that could ban what the grammar demands
            raise RequestError(str(error).replace("structured_outputs", "tools that must be called well")) from None
        fault = str(error).removeprefix("structured_outputs").removeprefix(" grammar").removeprefix(": ")
        where = "tools"
        for number, tool in enumerate(body.tools or ()):
            if tool not in body.offered or "compiled" not in fault:
                continue
            alone = body.model_copy(update={"tools": [tool], "tool_choice": "required", "response_format": None})
            wanted = {"grammar": grammar(form, alone, engine.tokenizer)}
            try:
                engine.grammars.compiled(replace(params, structured_outputs=wanted))
            except RequestError:
                where = f"tools.{number}.function.parameters"
                break
        raise ApiError(400, f"{where}: {fault}", param="tools") from None


def _render(engine: LLMEngine, body: ChatBody | TokenizeBody, tools: list[Tool], form: Form) -> list[int]:
    rows, shown = [message.for_template() for message in body.messages or ()], [tool.for_template() for tool in tools]
    variables = body.chat_template_kwargs
    try:
        rows, shown = engine.inputs.control_tokens.clean_chat(rows, shown)
        variables = engine.inputs.control_tokens.clean_all(variables, "chat_template_kwargs")
        if not shows_tools(getattr(engine.tokenizer, "chat_template", "")):
            rows, shown = as_plain_text(rows, shown, form), []
        return engine.inputs.render_chat(
            rows,
            body.add_generation_prompt,
            shown,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=variables,
            cleaned=True,
        )
    except RequestError as error:
        for name in ("tools", "chat_template_kwargs"):
            if str(error).startswith(name):
                raise ApiError(400, str(error), param=name) from None
        cause = error.__cause__
        if cause is not None and not isinstance(cause, TemplateError):  # no refusal of the template: it failed
            raise bad_field("messages", "the model's chat template refused them") from error
        message = str(error) if str(error).startswith("messages") else f"messages: {error}"
        raise ApiError(400, message, param="messages") from error


def tokenize(engine: LLMEngine, body: TokenizeBody, form: Form) -> dict[str, Any]:
    if body.messages is not None:
        token_ids = _render(engine, body, body.tools or [], form)
    else:
        text = engine.inputs.control_tokens.clean(body.prompt or "", "the prompt")
        token_ids = engine.inputs.encode(text, body.add_special_tokens)
    strings = tokenizer_of(engine).convert_ids_to_tokens(token_ids) if body.return_token_strs else None
    limit = engine.max_model_len
    return {"count": len(token_ids), "max_model_len": limit, "tokens": token_ids, "token_strs": strings}


def detokenize(engine: LLMEngine, body: DetokenizeBody) -> dict[str, Any]:
    vocab = engine.model_config.vocab_size
    for token_id in body.tokens:
        if not 0 <= token_id < vocab:
            raise bad_field("tokens", f"{token_id:.40g} is outside the vocabulary of {vocab}")
    return {"prompt": tokenizer_of(engine).decode(body.tokens)}


def tokenizer_of(engine: LLMEngine) -> Any:
    if engine.tokenizer is None:
        raise RequestError("this engine has no tokenizer (skip_tokenizer_init)")
    return engine.tokenizer
