"""The text that experts are calibrated and measured on, as windows of token ids.

Teacher-forced documents are best. Without any, the model writes its own from distinct prompts: a prompt that comes
twice adds rows and no knowledge (lesson 33: 150 of 200 were repeats), so repeats are refused, not counted.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanovllm.errors import ConfigError

WINDOW = 512
PIECE = 4  # tokens of a prompt that is cut from a text: a few, so that the model writes most of it itself
DISABLE = "NANOVLLM_DISABLE_SVD"

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
    """Rows of token ids, padded on the right. A padded place is in no figure and no statistic."""

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

    def real(self) -> torch.Tensor:
        """bool [windows, length]."""
        return torch.arange(self.ids.shape[1]) < self.lens[:, None]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: Any) -> Windows:
        return Windows(self.ids[rows], self.lens[rows])


def join(parts: Sequence[Windows]) -> Windows:
    return Windows.pack(
        [ids[:n].tolist() for part in parts for ids, n in zip(part.ids, part.lens.tolist())],
        max((part.ids.shape[1] for part in parts), default=0),
    )


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
    starts = torch.randperm(max(0, len(tokens) - PIECE + 1), generator=torch.Generator().manual_seed(0)).tolist()
    different = dict.fromkeys(tuple(tokens[start : start + PIECE]) for start in starts)
    prompts = list(itertools.islice(different, num_prompts))
    if len(prompts) < num_prompts:
        raise ConfigError(
            f"--num-prompts {num_prompts}: the text has only {len(prompts)} different beginnings of {PIECE} tokens; "
            f"give more text or --num-prompts {len(prompts)}"
        )
    return [list(prompt) for prompt in prompts]


@dataclass(frozen=True)
class Writing:
    """How the model writes its own calibration text."""

    max_new_tokens: int = 64
    temperature: float = 0.7
    seed: int = 0


def generate(model_path: Path, prompts: Sequence[Any], how: Writing, device: str) -> list[list[int]]:
    """Prompt and continuation of each. Through the engine, which is fast at it; nothing is recorded here, so neither
    its warm-up nor its padding can get into a statistic."""
    from nanovllm.llm import LLM
    from nanovllm.sampling_params import SamplingParams

    inputs = [p if isinstance(p, str) else {"prompt_token_ids": p} for p in prompts]
    if len({str(p) for p in inputs}) < len(inputs):
        raise ConfigError("calibration prompts repeat; a repeat adds rows and no knowledge")
    params = SamplingParams(temperature=how.temperature, max_tokens=how.max_new_tokens)
    options = {"device": device, "seed": how.seed, "max_num_seqs": 64, "enforce_eager": True}
    with low_rank_allowed(False), LLM(str(model_path), **options) as llm:
        outputs = llm.generate(inputs, params, use_tqdm=sys.stderr.isatty())
    return [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]


@contextmanager
def low_rank_allowed(allowed: bool) -> Iterator[None]:
    """Whether engines opened meanwhile look for low-rank experts beside the model; a teacher must not: a student is no
    teacher."""
    before = os.environ.get(DISABLE)
    os.environ[DISABLE] = "0" if allowed else "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[DISABLE]
        else:
            os.environ[DISABLE] = before
