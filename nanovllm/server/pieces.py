"""From cumulative outputs to what is new of each completion, and log probabilities in OpenAI's two shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanovllm.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput

# JSON has no -inf; this is what vLLM sends for a token that cannot be.
LOWEST = -9999.0
UNKNOWN = "\ufffd"


@dataclass(frozen=True)
class Piece:
    """What one completion has gained since the last piece; for an answer in one go, all of it."""

    text: str
    positions: list[PositionLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
    is_first: bool
    offset: int = 0  # characters of the tokens in all earlier pieces


class Follower:
    """Cuts one completion into pieces."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.offset = 0
        self.finished = False
        self._num_chars = 0
        self._is_first = True

    def next(self, completion: CompletionOutput) -> Piece | None:
        """None if there is nothing to tell (half a character, or text that may become a stop string)."""
        if self.finished:
            return None
        text = completion.text[self._num_chars :]
        positions = None if completion.logprobs is None else completion.logprobs[self.num_tokens :]
        self.num_tokens = len(completion.token_ids)
        self.finished = completion.finished
        if not (text or positions or self.finished):
            return None
        piece = Piece(text, positions, completion.finish_reason, completion.stop_reason, self._is_first, self.offset)
        self._num_chars += len(text)
        self.offset += sum(len(_sampled(position)[1].decoded_token or "") for position in positions or ())
        self._is_first = False
        return piece


def usage(outputs: dict[int, RequestOutput], drop_new: bool = False) -> dict[str, Any]:
    """`outputs`: the newest of each prompt."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs.values())
    new = 0 if drop_new else sum(len(c.token_ids) for output in outputs.values() for c in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs.values())
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
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
