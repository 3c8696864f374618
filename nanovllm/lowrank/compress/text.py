"""The text that experts are calibrated and measured on, as windows of token ids.

Teacher-forced documents are best. Without any, the model writes its own from distinct prompts: a prompt that comes
twice adds rows and no information (in one calibration 150 of 200 were repeats), so repeats are refused, not counted.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from nanovllm.errors import ConfigError
from nanovllm.lowrank.folder import DISABLE

WINDOW = 512
HELD_OUT_EVERY = 10
PROMPT_TOKENS = 4  # of a prompt that is cut from a text: a few, so that the model writes most of it itself
EVAL_TOKENS = 10_240
QUOTED_TOKENS = 16  # so many equal tokens in a row are a quotation, not chance

_FORMS = (
    "Write a short story about {}.",
    "Explain to a child what {} is.",
    "List ten facts about {}.",
    "Write a letter to a newspaper about {}.",
    "What is the history of {}?",
    "Describe {} in one paragraph.",
    "Give arguments for and against {}.",
    "Write a dialogue in which two friends talk about {}.",
    "How does {} change daily life?",
    "Summarise what is known about {}.",
    "The most common mistake about {} is",
    "In the year 2050, {} will",
    "def describe(): # prints a text about {}",
    "Q: Why does {} matter?\nA:",
    "An introduction to {}\n\n1.",
    "Poem: {}\n",
)
_SUBJECTS = (
    "the sea", "public libraries", "railways", "bees", "the printing press", "volcanoes", "chess", "bread", "taxes",
    "the immune system", "bridges", "the night sky", "rivers", "music", "electric motors", "forests", "democracy",
    "sleep", "maps", "glass", "winter", "languages", "probability", "medicine", "gardens", "clocks", "migration",
    "paper", "the harvest", "sorting algorithms", "friendship", "earthquakes", "coffee", "architecture", "steel",
    "a city at dawn", "the olympic games", "gravity", "mountains", "trade", "comets", "memory", "postal services",
    "salt", "theatre", "vaccines", "wolves", "computers", "the constitution", "light",
)  # fmt: skip
MAX_PROMPTS = len(_FORMS) * len(_SUBJECTS)


@dataclass(frozen=True)
class Windows:
    """Rows of token ids, padded on the right. Padding is in no figure and no statistic."""

    ids: torch.Tensor  # int64 [windows, length]
    lens: torch.Tensor  # int64 [windows]

    @classmethod
    def pack(cls, sequences: Sequence[Sequence[int]], length: int) -> Windows:
        """Each sequence on its own, cut into windows; what is left of it is one more, unless it is a single token."""
        pieces = [list(s[i : i + length]) for s in sequences for i in range(0, len(s), length)]
        pieces = [piece for piece in pieces if len(piece) > 1]
        width = max(map(len, pieces), default=0)
        ids = torch.tensor([piece + [0] * (width - len(piece)) for piece in pieces], dtype=torch.int64)
        return cls(ids.view(len(pieces), width), torch.tensor([len(piece) for piece in pieces], dtype=torch.int64))

    @property
    def num_tokens(self) -> int:
        return int(self.lens.sum())

    def sequences(self) -> list[list[int]]:
        return [ids[:n].tolist() for ids, n in zip(self.ids, self.lens.tolist())]

    def real(self) -> torch.Tensor:
        """bool [windows, length]."""
        return torch.arange(self.ids.shape[1]) < self.lens[:, None]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: Any) -> Windows:
        return Windows(self.ids[rows], self.lens[rows])


def held_out(num_windows: int) -> torch.Tensor:
    """bool [windows]: every tenth one, which no fit sees."""
    return torch.arange(num_windows) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1


def read_tokens(tokenizer: Any, path: Path) -> list[int]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path}: cannot be read ({error}); give a file of plain text in UTF-8") from None
    return tokenizer(text, verbose=False)["input_ids"]


def made_up_prompts(num_prompts: int) -> list[str]:
    if num_prompts > MAX_PROMPTS:
        raise ConfigError(
            f"--num-prompts {num_prompts}: there are {MAX_PROMPTS} different ones; give --text FILE for more"
        )
    prompts = [form.format(subject) for form, subject in itertools.product(_FORMS, _SUBJECTS)]
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(0)).tolist()
    return [prompts[i] for i in order[:num_prompts]]


def cut_prompts(tokens: list[int], num_prompts: int) -> list[list[int]]:
    """Different beginnings for the model to go on from, from anywhere in a text."""
    starts = torch.randperm(
        max(0, len(tokens) - PROMPT_TOKENS + 1), generator=torch.Generator().manual_seed(0)
    ).tolist()
    different = dict.fromkeys(tuple(tokens[start : start + PROMPT_TOKENS]) for start in starts)
    prompts = list(itertools.islice(different, num_prompts))
    if len(prompts) < num_prompts:
        raise ConfigError(
            f"--num-prompts {num_prompts}: the text has only {len(prompts)} different beginnings of {PROMPT_TOKENS} "
            f"tokens; give more text or --num-prompts {len(prompts)}"
        )
    return [list(prompt) for prompt in prompts]


@dataclass(frozen=True)
class Source:
    """Where the text of a calibration comes from. A text alone is run as it is; with prompts the model writes, from
    excerpts of the text if there is one."""

    text: Path | None = None
    num_prompts: int | None = None  # None: 200 without a text, none with one
    max_new_tokens: int = 64
    temperature: float = 0.7
    window: int = WINDOW

    def windows(self, model_path: Path, tokenizer: Any, device: str) -> Windows:
        num_prompts = (0 if self.text else 200) if self.num_prompts is None else self.num_prompts
        tokens = read_tokens(tokenizer, self.text) if self.text else []
        sequences = [tokens] if self.text else []
        if num_prompts:
            prompts = cut_prompts(tokens, num_prompts) if self.text else made_up_prompts(num_prompts)
            sequences += self.generate(model_path, prompts, device)
        windows = Windows.pack(sequences, self.window)
        if not len(windows):
            raise ConfigError("calibration: no text; give --text FILE or --num-prompts")
        return windows

    def generate(self, model_path: Path, prompts: Sequence[Any], device: str) -> list[list[int]]:
        """Prompt and continuation of each, by the engine. Nothing is recorded meanwhile, so neither its warm-up nor its
        padding can get into a statistic."""
        from nanovllm.llm import LLM
        from nanovllm.sampling_params import SamplingParams

        inputs = [p if isinstance(p, str) else {"prompt_token_ids": p} for p in prompts]
        if len({str(p) for p in inputs}) < len(inputs):
            raise ConfigError("calibration prompts repeat; a repeat adds rows and no information")
        params = SamplingParams(temperature=self.temperature, max_tokens=self.max_new_tokens)
        options: dict[str, Any] = {"device": device, "seed": 0, "max_num_seqs": 64, "enforce_eager": True}
        with low_rank_allowed(False), LLM(str(model_path), **options) as llm:
            outputs = llm.generate(inputs, params, use_tqdm=sys.stderr.isatty())
        return [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]

    def facts(self) -> dict[str, Any]:
        """All that the windows depend on, besides the model."""
        found = {**asdict(self), "text": None}
        if self.text:
            with suppress(OSError):  # `read_tokens` reports it
                found["text"] = hashlib.blake2b(Path(self.text).read_bytes(), digest_size=16).hexdigest()
        return found


@contextmanager
def low_rank_allowed(allowed: bool) -> Iterator[None]:
    """Whether engines that are opened meanwhile use low-rank experts beside the model. A teacher must not: its text
    would be that of the compressed model."""
    before = os.environ.get(DISABLE)
    os.environ[DISABLE] = "0" if allowed else "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[DISABLE]
        else:
            os.environ[DISABLE] = before


# ---- measuring -------------------------------------------------------------------------------------------------------


def evaluation_windows(tokenizer: Any, text: Path, max_tokens: int = EVAL_TOKENS, window: int = WINDOW) -> Windows:
    """The first `max_tokens` tokens, in whole windows."""
    tokens = read_tokens(tokenizer, text)[:max_tokens]
    whole = len(tokens) // window * window
    if not whole:
        remedy = "give a longer text" if len(tokens) < max_tokens else "no more are read: take a shorter --window"
        raise ConfigError(f"--text {text}: {len(tokens)} tokens, fewer than one window of {window}; {remedy}")
    return Windows.pack([tokens[:whole]], window)


def share_seen(windows: Windows, calibration: Windows) -> float:
    """`windows` are cut into runs of QUOTED_TOKENS tokens: the share of these that stand somewhere in the
    calibration."""
    size = QUOTED_TOKENS
    runs = {tuple(ids[i : i + size]) for ids in windows.ids.tolist() for i in range(0, len(ids) - size + 1, size)}
    found = set()
    for ids in calibration.sequences():
        found |= runs.intersection(zip(*(ids[i : len(ids) - size + 1 + i] for i in range(size))))
    return len(found) / len(runs)
