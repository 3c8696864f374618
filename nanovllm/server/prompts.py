"""Bodies to engine inputs. Runs in a thread of its own: tokenising 100 kB takes longer than a step."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError

from nanovllm.engine.inputs import EngineInput
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import RequestError
from nanovllm.server.errors import ApiError
from nanovllm.server.protocol import ChatBody, CompletionBody, DetokenizeBody, Message, TokenizeBody


def encode_prompts(engine: LLMEngine, body: CompletionBody) -> list[EngineInput]:
    prompts = body.prompts
    params = body.params()
    found = []
    for number, prompt in enumerate(prompts):
        key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
        try:
            parsed = engine.inputs.parse({key: prompt, "cache_salt": body.cache_salt or ""})
            engine.check(parsed, params, body.priority)  # type: ignore[arg-type]
        except RequestError as error:
            if len(prompts) > 1 and "prompt" in str(error):
                raise ApiError(400, f"prompt {number + 1} of {len(prompts)}: {error}", param="prompt") from None
            raise
        if body.echo and parsed.text is None:
            parsed = EngineInput(parsed.token_ids, _tokenizer(engine).decode(parsed.token_ids), parsed.cache_salt)
        found.append(parsed)
    return found


def encode_chat(engine: LLMEngine, body: ChatBody) -> EngineInput:
    parsed = EngineInput(_render(engine, body.messages), None, body.cache_salt or "")
    salted: Any = {"prompt_token_ids": parsed.token_ids, "cache_salt": parsed.cache_salt}
    parsed = engine.inputs.parse(salted)
    engine.check(parsed, body.params(), body.priority)  # type: ignore[arg-type]
    return parsed


def _render(engine: LLMEngine, messages: list[Message], add_generation_prompt: bool = True) -> list[int]:
    try:
        return engine.inputs.render_chat([message.for_template() for message in messages], add_generation_prompt)
    except RequestError as error:
        cause = error.__cause__
        if cause is not None and not isinstance(cause, TemplateError):  # not said by the template, but by its failure
            raise ApiError(400, "messages: the model's chat template refused them", param="messages") from error
        said = str(error) if str(error).startswith("messages") else f"messages: {error}"
        raise ApiError(400, said, param="messages") from error


def tokenize(engine: LLMEngine, body: TokenizeBody) -> dict[str, Any]:
    if body.messages is not None:
        token_ids = _render(engine, body.messages, body.add_generation_prompt)
    else:
        token_ids = engine.inputs.encode(body.prompt or "", body.add_special_tokens)
    strings = _tokenizer(engine).convert_ids_to_tokens(token_ids) if body.return_token_strs else None
    return {
        "count": len(token_ids), "max_model_len": engine.max_model_len, "tokens": token_ids, "token_strs": strings,
    }  # fmt: skip


def detokenize(engine: LLMEngine, body: DetokenizeBody) -> dict[str, Any]:
    vocab = engine.model_config.vocab_size
    for token_id in body.tokens:
        if not 0 <= token_id < vocab:
            raise ApiError(400, f"tokens: {token_id:.40g} is outside the vocabulary of {vocab}", param="tokens")
    return {"prompt": _tokenizer(engine).decode(body.tokens)}


def _tokenizer(engine: LLMEngine) -> Any:
    if engine.tokenizer is None:
        raise RequestError("this engine has no tokenizer (skip_tokenizer_init)")
    return engine.tokenizer
