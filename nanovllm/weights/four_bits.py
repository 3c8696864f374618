"""Weights in 4 bits with a scale and a zero for each group of inputs: AWQ, GPTQ and compressed-tensors.

All three store  w[output, input] = scale[output, group] * (q[output, input] - zero[output, group]),  q from 0 to 15,
eight of them in an int32. They differ in where a number lies. Of eight, from the lowest bits on:

    AWQ (gemm)            qweight [inputs, outputs / 8]   outputs 0 2 4 6 1 3 5 7
                          qzeros  [groups, outputs / 8]   likewise
                          scales  [groups, outputs]
    GPTQ                  qweight [inputs / 8, outputs]   inputs 0 1 2 ... 7
                          qzeros  [groups, outputs / 8]   outputs 0 1 2 ... 7; the word less 0x11111111, each zero
                                                          less 1, unless (checkpoint_)format is "gptq_v2"
                          scales  [groups, outputs]
                          g_idx   [inputs]                the group of each input; without desc_act it may be absent
                                                          or all 0, then it is input // group_size
    compressed-tensors    weight_packed [outputs, inputs / 8]      inputs 0 1 2 ... 7, from -8 to 7, stored as q + 8
    ("pack-quantized")    weight_scale  [outputs, groups]
                          weight_zero_point [outputs / 8, groups]  outputs 0 1 ... 7, stored as z + 8; absent: 0 (is 8)
                          weight_shape [2]                         outputs and inputs
                          weight_g_idx [inputs]                    as in GPTQ (actorder "group"); unwritten: all -1

GPTQModel subtracts and adds whole words, and so do we: a zero of 0 borrows 1 from the next number. AutoGPTQ writes 15
for it and for all later numbers of the word: these are lost. (vLLM and most of AutoGPTQ's kernels read 15 as 16.)

Some tools write checkpoint_format "gptq" and zeros as in v2. Where config.json says that weights are symmetric the zero
is 8, so a file of nothing but 8 has v2's zeros (v1 would have 7).

All become `Grouped`, from which the weight, GGUF's blocks or a kernel's layout is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from nanovllm.errors import ModelError
from nanovllm.quantization_config import AWQ, GPTQ, PACKED, QuantizationConfig
from nanovllm.weights.gguf_quants import TENSOR_TYPES, StoredBlocks
from nanovllm.weights.shards import Shards

PER_WORD = 8
BLOCK = 32  # weights in a block of Q4_0 and Q4_1
Q4_0, Q4_1 = TENSOR_TYPES[2], TENSOR_TYPES[3]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
MIDDLE = 8  # the zero of symmetric weights
ONES = 0x11111111  # what the words of GPTQ's zeros lack
MAX_SHIFT = 1 / 64  # of a step: how much float16 headers may move weights. Rounding to 4 bits moved them 0.29 (rms)
GROUP_OF_INPUT = ("g_idx", "weight_g_idx")
ORDERED = "config.json says (desc_act, actorder) that inputs are in an order of their own"
AGAIN = "get the model again, its 16-bit safetensors, or a GGUF file"


@dataclass(frozen=True)
class FourBitFormat:
    label: str
    words: str  # the tensor of the q
    dims: dict[str, tuple[str, ...]]  # tensor -> what its dimensions count
    dtypes: dict[str, tuple[str, ...]]
    optional: tuple[str, ...] = ()


_FLOATS = ("F16", "BF16", "F32")
FORMATS = {
    AWQ: FourBitFormat(
        "AWQ",
        "qweight",
        {"qweight": ("inputs", "outputs/8"), "qzeros": ("groups", "outputs/8"), "scales": ("groups", "outputs")},
        {"qweight": ("I32",), "qzeros": ("I32",), "scales": _FLOATS},
    ),
    GPTQ: FourBitFormat(
        "GPTQ",
        "qweight",
        {
            "qweight": ("inputs/8", "outputs"),
            "qzeros": ("groups", "outputs/8"),
            "scales": ("groups", "outputs"),
            "g_idx": ("inputs",),
        },
        {"qweight": ("I32",), "qzeros": ("I32",), "scales": _FLOATS, "g_idx": ("I32", "I64")},
        ("g_idx",),
    ),
    PACKED: FourBitFormat(
        "compressed-tensors in 4 bits",
        "weight_packed",
        {
            "weight_packed": ("outputs", "inputs/8"),
            "weight_scale": ("outputs", "groups"),
            "weight_zero_point": ("outputs/8", "groups"),
            "weight_shape": ("axes",),
            "weight_g_idx": ("inputs",),
        },
        {
            "weight_packed": ("I32",),
            "weight_scale": _FLOATS,
            "weight_zero_point": ("I32", "I8"),
            "weight_shape": ("I64", "I32"),
            "weight_g_idx": ("I32", "I64"),
        },
        ("weight_zero_point", "weight_g_idx"),
    ),
}


@dataclass(frozen=True)
class Grouped:
    q: torch.Tensor  # uint8 [outputs, inputs], 0 to 15
    scale: torch.Tensor  # [outputs, groups]
    zero: torch.Tensor  # uint8 [outputs, groups], 0 to 15
    group: torch.Tensor  # int64 [inputs]: which group an input belongs to

    def expanded(self) -> torch.Tensor:
        """float32"""
        found, scale, zero = self.q.float(), self.scale.float(), self.zero.float()
        size, rest = divmod(len(self.group), scale.shape[1])
        if rest == 0 and torch.equal(self.group, torch.arange(len(self.group)) // size):
            runs = found.unflatten(1, (-1, size))  # a matrix of scales would take as much room as the weight
            return runs.sub_(zero.unsqueeze(-1)).mul_(scale.unsqueeze(-1)).flatten(1)
        return found.sub_(zero[:, self.group]).mul_(scale[:, self.group])

    @property
    def is_in_order(self) -> bool:
        """Whether a group is a run of inputs, as kernels want it. If not (act-order), sort the inputs by group and give
        the columns of x in the same order: `torch.argsort(group, stable=True)`."""
        return bool((self.group[1:] >= self.group[:-1]).all())

    def narrow(self, rows: slice, columns: slice) -> Grouped:
        return Grouped(self.q[rows, columns], self.scale[rows], self.zero[rows], self.group[columns])

    def as_blocks(self) -> StoredBlocks | None:
        """In GGUF's blocks: Q4_0 if every zero is 8, w = d (q - 8), else Q4_1, w = d q + m with d = scale and
        m = -scale * zero. None if groups cut blocks, or if d and m in float16 would move the weights.

        Q4_0 is exact if the scales are float16 numbers. m takes up to four bits more than the scale, so Q4_1 rounds it:
        by at most 2^-11 of 15 steps."""
        if not in_blocks(self.group):
            return None
        group = self.group[::BLOCK]
        symmetric = bool((self.zero == MIDDLE).all())
        d, zero = self.scale.float()[:, group], self.zero.float()[:, group]
        header = [d.half()] if symmetric else [d.half(), (-d * zero).half()]
        m = -MIDDLE * header[0].float() if symmetric else header[1].float()
        ends = [q * header[0].float() + m - (q - zero) * d for q in (0, 15)]  # what the smallest and largest q move
        if not torch.maximum(ends[0].abs(), ends[1].abs()).norm() <= MAX_SHIFT * d.norm():  # NaN: not either
            return None
        q = self.q.unflatten(1, (-1, 2, BLOCK // 2))  # a byte has the weights i and i + 16 of its block
        parts = [part.unsqueeze(-1).view(torch.uint8) for part in header]
        raw = torch.cat([*parts, q[:, :, 0] | q[:, :, 1] << 4], dim=-1)
        return StoredBlocks(Q4_0 if symmetric else Q4_1, raw.flatten(1))


def in_blocks(group: torch.Tensor) -> bool:
    """Whether all weights of a block are in one group."""
    return len(group) % BLOCK == 0 and bool((group.view(-1, BLOCK) == group[::BLOCK, None]).all())


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, m] -> uint8 [n, m, 4], the lowest bits first. A copy, because `contiguous` leaves the strides of a
    transposed row as they are, and `view` refuses these."""
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8).unflatten(1, (-1, 4))


def unpack_columns(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, m] -> uint8 [n, 8 m]: bits 4 i .. 4 i + 3 of a word are number i of its eight."""
    pairs = _bytes(words)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)


def unpack_rows(words: torch.Tensor, order: Sequence[int] = range(PER_WORD)) -> torch.Tensor:
    """int32 [n, m] -> uint8 [8 n, m]: bits 4 i .. 4 i + 3 of a word are number order[i] of its eight."""
    found = torch.empty(len(words), PER_WORD, words.shape[1], dtype=torch.uint8)
    for i, pairs in enumerate(_bytes(words).permute(2, 0, 1).contiguous()):
        found[:, order[2 * i]], found[:, order[2 * i + 1]] = pairs & 15, pairs >> 4
    return found.flatten(0, 1)


class FourBitWeight:
    """One weight of a folder. Its tensors are checked here, and read later."""

    def __init__(self, stored: Shards, module: str, config: QuantizationConfig) -> None:
        assert config.form is not None
        self._stored, self._module, self._config = stored, module, config
        self._format = FORMATS[config.form]
        self.form = self._format.label
        found = [part for part in self._format.dims if self._name(part) in stored]
        optional = set(self._format.optional)
        if not config.symmetric:
            optional.discard("weight_zero_point")
        missing = [part for part in self._format.dims if part not in found and part not in optional]
        if missing:
            raise self._error(missing[0], f"is not there, but {self._name(self._format.words)} is")
        order = next((part for part in GROUP_OF_INPUT if part in self._format.dims), None)
        if config.act_order and order is not None and order not in found:
            raise self._error(order, f"is not there, but {ORDERED}", AGAIN)
        for part in found:
            dtype, known = stored.dtype(self._name(part)), self._format.dtypes[part]
            if dtype not in known:
                raise self._error(part, f"is stored as {dtype}, not as {' or '.join(known)}")
        self._found = found
        self.shape = self._read_shape()
        self._check_shapes()

    def _name(self, part: str) -> str:
        return f"{self._module}.{part}"

    def _error(self, part: str, what: str, remedy: str = "get the model again") -> ModelError:
        return ModelError(f"{self._stored.path}: {self._name(part)} {what}; {remedy}.")

    def _dims(self, part: str) -> tuple[str, ...]:
        """Zero points in a byte each, as early versions of compressed-tensors wrote them, are not packed."""
        if self._stored.dtype(self._name(part)) == "I8":
            return "outputs", "groups"
        return self._format.dims[part]

    def _read_shape(self) -> tuple[int, int]:
        """(outputs, inputs)"""
        words = self._format.words
        stored = self._stored.shape(self._name(words))
        if len(stored) != 2 or 0 in stored:
            raise self._error(words, f"has shape {stored}, no matrix")
        if self._config.form == AWQ:
            return stored[1] * PER_WORD, stored[0]
        if self._config.form == GPTQ:
            return stored[1], stored[0] * PER_WORD
        if self._stored.shape(self._name("weight_shape")) != (2,):
            raise self._error("weight_shape", "must be two integers")
        outputs, inputs = self._stored.read(self._name("weight_shape")).tolist()
        if outputs != stored[0] or -(-inputs // PER_WORD) != stored[1]:
            raise self._error("weight_shape", f"is {(outputs, inputs)}, which does not fit {words} of shape {stored}")
        return outputs, inputs

    @property
    def _group_size(self) -> int:
        return self._config.group_size or self.shape[1]

    @property
    def _num_groups(self) -> int:
        return -(-self.shape[1] // self._group_size)

    def _check_shapes(self) -> None:
        sizes = {"outputs": self.shape[0], "inputs": self.shape[1], "groups": self._num_groups, "axes": 2}
        for part in self._found:
            wanted = []
            for dim in self._dims(part):
                name, _, per = dim.partition("/")
                wanted.append(-(-sizes[name] // int(per or 1)))
            if (found := self._stored.shape(self._name(part))) != tuple(wanted):
                raise self._error(
                    part,
                    f"has shape {found}: a weight of shape {self.shape} in groups of {self._group_size} needs "
                    f"{tuple(wanted)}",
                )

    @cached_property
    def _groups(self) -> torch.Tensor:
        """The group of each input."""
        inputs, number = self.shape[1], self._num_groups
        runs = torch.arange(inputs) // self._group_size
        part = next((part for part in GROUP_OF_INPUT if part in self._found), None)
        if part is None:
            return runs
        found = self._stored.read(self._name(part)).long()
        one = int(found[0]) if bool((found == found[0]).all()) else None
        if one in (0, -1) and (number == 1 or not self._config.act_order):  # not filled by the tool
            return runs
        if one is not None and number > 1 and one < number:
            why = ORDERED if self._config.act_order else "inputs are to be in different ones"
            raise self._error(part, f"names one group, {one}, of {number}, but {why}", AGAIN)
        if int(found.min()) < 0 or int(found.max()) >= number:
            raise self._error(part, f"has groups from {int(found.min())} to {int(found.max())}, there are {number}")
        return found

    @property
    def block_type(self) -> str | None:
        """Of `read_blocks`, without reading the weight; None: its groups cut GGUF's blocks."""
        return (Q4_0 if self._config.symmetric else Q4_1).name if in_blocks(self._groups) else None

    def read_blocks(self) -> StoredBlocks | None:
        return self.read().as_blocks()

    def read(self, rows: slice | None = None, columns: slice | None = None) -> Grouped:
        """Reads whole words, and all groups of these rows."""
        rows, columns = rows or slice(0, self.shape[0]), columns or slice(0, self.shape[1])
        words = {"outputs": _whole_words(rows), "inputs": _whole_words(columns)}
        matrices = [part for part in self._found if len(self._dims(part)) == 2]
        found = {part: self._stored.read(self._name(part), *self._cut(part, words)) for part in matrices}
        scale = next(part for part in ("scales", "weight_scale") if part in found)
        if not bool(found[scale].isfinite().all()):
            raise self._error(scale, "has numbers that are not finite")
        first, start = words["outputs"].start, words["inputs"].start
        whole = Grouped(*self._numbers(found), self._groups[words["inputs"]])
        return whole.narrow(
            slice(rows.start - first, rows.stop - first), slice(columns.start - start, columns.stop - start)
        )

    def _cut(self, part: str, words: dict[str, slice]) -> Iterator[slice]:
        """What of this tensor belongs to these outputs and inputs."""
        for dim, size in zip(self._dims(part), self._stored.shape(self._name(part))):
            name, _, per = dim.partition("/")
            cut = words.get(name, slice(0, size * int(per or 1)))
            yield slice(cut.start // int(per or 1), min(cut.stop // int(per or 1), size))

    def _numbers(self, found: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, scale and zero of `Grouped`; perhaps with numbers that fill up the last word."""
        if self._config.form == AWQ:
            q, zero = (unpack_rows(found[part].T, AWQ_ORDER) for part in ("qweight", "qzeros"))
            return q, found["scales"].T, zero
        if self._config.form == GPTQ:
            zeros = found["qzeros"] + ONES if self._zeros_are_less else found["qzeros"]
            return unpack_columns(found["qweight"].T), found["scales"].T, unpack_rows(zeros.T)
        scale, zero_point = found["weight_scale"], found.get("weight_zero_point")
        if zero_point is None:
            zero = torch.full(scale.shape, MIDDLE, dtype=torch.uint8)
        elif zero_point.dtype == torch.int8:
            zero = (zero_point + MIDDLE).to(torch.uint8)
        else:
            zero = unpack_rows(zero_point)
        if self._config.symmetric and bool((zero[: scale.shape[0]] != MIDDLE).any()):
            raise self._error(
                "weight_zero_point",
                "is not 0, but by config.json weights are symmetric (which is also the default)",
                AGAIN,
            )
        return unpack_columns(found["weight_packed"]), scale, zero

    @cached_property
    def _zeros_are_less(self) -> bool:
        """Of GPTQ. By all of them, so that every rank finds the same."""
        if not self._config.stored_zeros_are_less or not self._config.symmetric:
            return self._config.stored_zeros_are_less
        stored = unpack_columns(self._stored.read(self._name("qzeros")))[:, : self.shape[0]]
        return not bool((stored == MIDDLE).all())


def _whole_words(cut: slice) -> slice:
    return slice(cut.start // PER_WORD * PER_WORD, -(-cut.stop // PER_WORD) * PER_WORD)
