"""What has been sent of a choice, how many tokens an answer took, and log probabilities in OpenAI's two shapes."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nanovllm.outputs import CompletionDelta, Logprob, PositionLogprobs, RequestDelta
from nanovllm.server.protocol import Sampling

# JSON has no -inf; this is what vLLM sends for a token that cannot be.
LOWEST = -9999.0
ToBytes = Callable[[int, str | None], bytes]


class TextPlace:
    """How many characters of the text stand before a token. A token that ends inside a character adds none: the next
    tokens, up to the end of the character, have the same offset."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, data: bytes) -> int:
        """The offset of the next token; the one after it comes behind `data`."""
        place = self.offset
        self.offset += len(self._decoder.decode(data))
        return place


def _plain_bytes(token_id: int, decoded: str | None) -> bytes:
    return (decoded or "").encode(errors="replace")


@dataclass
class Choice:
    """One of the prompts * n answers to a request, and what of it has been sent."""

    index: int
    is_first: bool = True  # nothing has
    place: TextPlace = field(default_factory=TextPlace)  # behind the tokens whose logprobs have been sent
    frame: tuple[bytes, bytes] | None = None  # what stands before and after the text in an event that has only text


class Usage:
    """Tokens of all prompts of a request and of what was written for them."""

    def __init__(self, drop_new: bool = False) -> None:
        self._drop_new = drop_new
        self._prompts: dict[int, tuple[int, int]] = {}  # (tokens, cached ones) of each
        self._num_new = 0

    def add(self, prompt: int, delta: RequestDelta) -> None:
        self._prompts[prompt] = len(delta.prompt_token_ids), delta.num_cached_tokens
        self._num_new += 0 if self._drop_new else sum(len(new.token_ids) for new in delta.outputs)

    def record(self) -> dict[str, Any]:
        prompt = sum(num_tokens for num_tokens, _ in self._prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._num_new,
            "total_tokens": prompt + self._num_new,
            "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in self._prompts.values())},
        }


def prompt_facts(body: Sampling, delta: RequestDelta) -> dict[str, Any]:
    """What vLLM's fields return_token_ids and prompt_logprobs add about the prompt."""
    found: dict[str, Any] = {}
    if body.return_token_ids:
        found["prompt_token_ids"] = delta.prompt_token_ids
    if (count := body.prompt_logprobs) is not None:
        scores = delta.prompt_logprobs or ()
        found["prompt_logprobs"] = [position and _vllm_entry(position, count) for position in scores]
    return found


def token_ids(body: Sampling, new: CompletionDelta) -> dict[str, Any]:
    return {"token_ids": new.token_ids} if body.return_token_ids else {}


def _vllm_entry(position: PositionLogprobs, count: int) -> dict[int, dict[str, Any]]:
    """The prompt's own token first, then the most likely."""
    own = _sampled(position)[0]
    return {
        token: {"logprob": max(score.logprob, LOWEST), "rank": score.rank, "decoded_token": score.decoded_token}
        for token, score in position.items()
        if token == own or (score.rank or 0) <= count
    }


def _sampled(position: PositionLogprobs) -> tuple[int, Logprob]:
    return next(iter(position.items()))


def _best(position: PositionLogprobs, count: int) -> list[tuple[int, Logprob]]:
    """The `count` most likely. The sampled token stands first in the record whatever its rank."""
    ranked = sorted(position.items(), key=lambda pair: pair[1].rank or 0)
    return [(token_id, score) for token_id, score in ranked if (score.rank or 0) <= count][:count]


def chat_logprobs(
    positions: list[PositionLogprobs] | None, num_top: int, to_bytes: ToBytes = _plain_bytes
) -> dict[str, Any] | None:
    if positions is None:
        return None

    def entry(token_id: int, score: Logprob) -> dict[str, Any]:
        token = score.decoded_token or ""
        return {"token": token, "logprob": max(score.logprob, LOWEST), "bytes": list(to_bytes(token_id, token))}

    content = [
        {**entry(*_sampled(position)), "top_logprobs": [entry(*pair) for pair in _best(position, num_top)]}
        for position in positions
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    positions: list[PositionLogprobs] | None,
    num_top: int,
    place: TextPlace | None = None,
    first_token: tuple[str, bytes] | None = None,
    to_bytes: ToBytes = _plain_bytes,
) -> dict[str, Any] | None:
    """`first_token`: the beginning of an echoed prompt, which nothing predicts, and its bytes in the text."""
    if positions is None:
        return None
    place = TextPlace() if place is None else place
    tokens: list[str] = []
    found: dict[str, Any] = {"tokens": tokens, "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add(token: str, data: bytes, logprob: float | None, best: dict[str, float] | None) -> None:
        found["text_offset"].append(place.add(data))
        tokens.append(token)
        found["token_logprobs"].append(logprob)
        found["top_logprobs"].append(best)

    if first_token is not None:
        add(*first_token, None, None)
    for position in positions:
        token_id, score = _sampled(position)
        token = score.decoded_token or ""
        best = {s.decoded_token or "": max(s.logprob, LOWEST) for _, s in _best(position, num_top)}
        best.setdefault(token, max(score.logprob, LOWEST))
        add(token, to_bytes(token_id, token), max(score.logprob, LOWEST), best if num_top else None)
    return found
