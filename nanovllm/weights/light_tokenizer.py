"""LightTokenizer: what the engine needs of a transformers tokenizer, without importing transformers (seconds).

Both call the same Rust tokenizer, so tokens and texts are equal. Chat templates are rendered here in the same sandbox
if they and the messages are of the plain kind; all else (a tag or a field that only transformers has, an object among
the messages, any error) is left to transformers.

`whole` is the transformers tokenizer. It is made when it is first used, which any attribute that is not defined here
does too. From then on it does all the work, so that what a user changes on it (chat_template, more tokens) counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Words of a template: transformers has a tag and a global of its own by these names.
_LEFT_TO_TRANSFORMERS = re.compile(r"\b(generation|dict)\b")
# transformers writes one of these into the others before it renders.
_REASONING = {"reasoning_content", "reasoning", "thinking"}


class LightTokenizer:
    def __init__(
        self, backend: Tokenizer, named: dict[str, str | None], chat_template: str | None, bos: bool, eos: bool
    ) -> None:
        """`named`: "bos_token" and so on -> its text; `bos`, `eos`: whether encode adds them. The same is done to
        `backend` as PreTrainedTokenizerFast does to its copy."""
        from tokenizers import AddedToken, processors

        self._backend, self._template, self._named = backend, chat_template, named
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        backend.add_tokens(
            [AddedToken(token, special=True) for token in named.values() if token and token not in known]
        )
        before = [token for token in (named["bos_token"],) if bos and token is not None]
        after = [token for token in (named["eos_token"],) if eos and token is not None]
        self._adds = {"add_bos_token": bool(before), "add_eos_token": bool(after)}
        backend.post_processor = processors.TemplateProcessing(
            single=" ".join(f"{part}:0" for part in (*before, "$A", *after)),
            special_tokens=[(token, backend.token_to_id(token)) for token in (*before, *after)],
        )

    @cached_property
    def whole(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=self._backend,
            **self._named,
            **self._adds,
            chat_template=self._template,
            clean_up_tokenization_spaces=False,
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle look for such names before there is anything to make `whole` of
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.whole(*args, **options)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def _is_made(self) -> bool:
        return "whole" in self.__dict__

    @property
    def backend_tokenizer(self) -> Tokenizer:
        return self.whole.backend_tokenizer if self._is_made else self._backend

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        return self.backend_tokenizer.get_added_tokens_decoder()

    @property
    def unk_token_id(self) -> int | None:
        if self._is_made:
            return self.whole.unk_token_id
        unknown = self._named["unk_token"]
        return None if unknown is None else self._backend.token_to_id(unknown)

    @property
    def chat_template(self) -> Any:
        return self.whole.chat_template if self._is_made else self._template

    @chat_template.setter
    def chat_template(self, template: Any) -> None:
        self.whole.chat_template = template

    def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> list[int]:
        if self._is_made or options or not isinstance(text, str):
            return self.whole.encode(text, add_special_tokens=add_special_tokens, **options)
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        if self._is_made or options or type(token_ids) is not list or not set(map(type, token_ids)) <= {int}:
            return self.whole.decode(token_ids, skip_special_tokens=skip_special_tokens, **options)
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: int | Sequence[int], **options: Any) -> Any:
        if self._is_made or options:
            return self.whole.convert_ids_to_tokens(ids, **options)
        if isinstance(ids, int):
            return self._backend.id_to_token(ids)
        return [self._backend.id_to_token(int(token_id)) for token_id in ids]

    def apply_chat_template(self, conversation: Any, tools: Any = None, **options: Any) -> Any:
        """`options` are those of PreTrainedTokenizerFast."""
        if not self._is_made and _is_plain([conversation, tools]):
            text = self._render(conversation, tools, **options)
            if text is not None:
                return text
        return self.whole.apply_chat_template(conversation, tools=tools, **options)

    def _render(
        self,
        conversation: Any,
        tools: Any,
        *,
        tokenize: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        **others: Any,
    ) -> str | None:
        """None: to be left to transformers."""
        template = self._template if chat_template is None else chat_template
        are_messages = isinstance(conversation, list) and conversation and _are_dicts(conversation)
        if tokenize or continue_final_message or others or not template or not are_messages:
            return None
        if not _are_dicts(tools or []) or any(_REASONING & message.keys() for message in conversation):
            return None
        try:
            return _compile(template).render(
                messages=conversation,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{name: token for name, token in self._named.items() if token is not None},
            )
        except Exception:  # templates raise what they like; transformers will say it in its own words
            return None


def transformers_tokenizer(tokenizer: Any) -> Any:
    """The `whole` of a LightTokenizer; any other is one already."""
    return tokenizer.whole if isinstance(tokenizer, LightTokenizer) else tokenizer


def _are_dicts(values: Any) -> bool:
    return type(values) is list and all(type(value) is dict for value in values)


def _is_plain(value: Any) -> bool:
    """Whether it is made of JSON's types. Other objects have methods, and a template could call them."""
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    if type(value) is list:
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)


@lru_cache(maxsize=8)
def _compile(template: str) -> Any:
    """With the settings of transformers (utils/chat_template_utils.py)."""
    import jinja2.ext
    import jinja2.sandbox

    if _LEFT_TO_TRANSFORMERS.search(template):
        raise jinja2.TemplateError("left to transformers")

    class Namespace(jinja2.utils.Namespace):
        """Without names that begin with an underscore, by which a template could reach Python's own."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # without `self`, which a template may use as a name
            self, *given = args
            values = dict(*given, **kwargs)
            for name in values:
                check(name)
            jinja2.utils.Namespace.__init__(self, values)

        def __setitem__(self, name: str, value: Any) -> None:
            check(name)
            jinja2.utils.Namespace.__setitem__(self, name, value)

    def check(name: str) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"namespace: {name!r} begins with an underscore")

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        """jinja2's own would escape HTML."""
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": Namespace,
    }
    return environment.from_string(template)
