"""What has been sent of a choice, how many tokens an answer took, and log probabilities in OpenAI's two shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanovllm.outputs import CompletionDelta, Logprob, PositionLogprobs, RequestDelta
from nanovllm.server.protocol import Sampling

# JSON has no -inf; this is what vLLM sends for a token that cannot be.
LOWEST = -9999.0
UNKNOWN = "\ufffd"


@dataclass
class Choice:
    """One of the prompts * n answers to a request, and what of it has been sent."""

    index: int
    is_first: bool = True  # nothing has
    offset: int = 0  # characters of the tokens whose logprobs have been sent
    frame: tuple[bytes, bytes] | None = None  # what stands before and after the text in an event that has only text

    def sent(self, new: CompletionDelta) -> None:
        self.is_first = False
        self.offset += sum(len(_sampled(position)[1].decoded_token or "") for position in new.logprobs or ())


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
    """What vLLM's fields ask to know of the prompt."""
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


def _best(position: PositionLogprobs, count: int) -> list[Logprob]:
    """The `count` most likely. The sampled token stands first in the record whatever its rank."""
    ranked = sorted(position.values(), key=lambda score: score.rank or 0)
    return [score for score in ranked if (score.rank or 0) <= count][:count]


def chat_logprobs(positions: list[PositionLogprobs] | None, num_top: int) -> dict[str, Any] | None:
    if positions is None:
        return None
    content = []
    for position in positions:
        entry = _chat_entry(_sampled(position)[1])
        entry["top_logprobs"] = [_chat_entry(score) for score in _best(position, num_top)]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_entry(score: Logprob) -> dict[str, Any]:
    token = score.decoded_token or ""
    # Half a character decodes to U+FFFD, whose bytes are not the token's
    data = None if UNKNOWN in token else list(token.encode())
    return {"token": token, "logprob": max(score.logprob, LOWEST), "bytes": data}


def completion_logprobs(
    positions: list[PositionLogprobs] | None, num_top: int, offset: int = 0, first_token: str | None = None
) -> dict[str, Any] | None:
    """`first_token`: the beginning of an echoed prompt, which nothing predicts."""
    if positions is None:
        return None
    tokens: list[str] = []
    found: dict[str, Any] = {"tokens": tokens, "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add(token: str, logprob: float | None, best: dict[str, float] | None) -> None:
        nonlocal offset
        found["text_offset"].append(offset)
        offset += len(token)
        tokens.append(token)
        found["token_logprobs"].append(logprob)
        found["top_logprobs"].append(best)

    if first_token is not None:
        add(first_token, None, None)
    for position in positions:
        score = _sampled(position)[1]
        best = {s.decoded_token or "": max(s.logprob, LOWEST) for s in _best(position, num_top)}
        best.setdefault(score.decoded_token or "", max(score.logprob, LOWEST))
        add(score.decoded_token or "", max(score.logprob, LOWEST), best if num_top else None)
    return found
