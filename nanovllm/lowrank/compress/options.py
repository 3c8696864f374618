"""How experts are to be compressed: the options of the command line, checked. No torch: help must be instant."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.errors import ConfigError
from nanovllm.lowrank.format import DTYPES, W2_MODES

DEFAULT_SVD_RANK = 256


@dataclass(frozen=True)
class Options:
    """Field names are those of the command line: `rank` is the SVD rank on the hidden side."""

    method: str = "distilled"  # or pca
    rank: int | None = None  # DEFAULT_SVD_RANK, if there is no target_ratio either
    target_ratio: float | None = None  # instead of rank: one for each layer and matrix
    w2_mode: str = "auto"
    ridge: float = 1e-4
    dtype: str = "auto"  # that of the checkpoint
    chunk: int = 64
    chunk_w2: int = 16
    pca_oversample: int = 32
    refine_steps: int = 0

    def __post_init__(self) -> None:
        for name, value, known in (
            ("w2-mode", self.w2_mode, (*W2_MODES, "auto")),
            ("dtype", self.dtype, (*DTYPES, "auto")),
        ):
            if value not in known:
                raise ConfigError(f"--{name} {value!r}: must be one of {', '.join(known)}")
        for name in ("rank", "chunk", "chunk_w2", "pca_oversample"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {number}: must be at least 1")
        if self.rank is not None and self.target_ratio is not None:
            raise ConfigError(
                f"--rank {self.rank} beside --target-ratio {self.target_ratio}: each decides all ranks; give one"
            )
        if self.target_ratio is not None and not 0 < self.target_ratio <= 1:
            raise ConfigError(
                f"--target-ratio {self.target_ratio}: must be in (0, 1], the share of the experts' bytes to keep"
            )
        if not 0 <= self.ridge < 1e6 or self.refine_steps < 0:
            raise ConfigError(f"--ridge {self.ridge}, --refine-steps {self.refine_steps}: must not be negative")

    @property
    def sides(self) -> tuple[str, ...]:
        """The sides of w2 that U may be on; held-out rows decide between two."""
        if self.w2_mode != "auto":
            return (self.w2_mode,)
        return W2_MODES if self.method == "distilled" else ("output",)


@dataclass(frozen=True)
class Swept:
    """What a report measures."""

    ranks: str = ""
    speed_tokens: int = 64

    def __post_init__(self) -> None:
        self.svd_ranks(1)
        if self.speed_tokens < 0:
            raise ConfigError(f"--speed-tokens {self.speed_tokens}: must not be negative; 0 measures no speed")

    def svd_ranks(self, hidden: int) -> list[int]:
        """Default: a quarter, half and three quarters of the hidden size."""
        if not self.ranks:
            return [max(1, hidden * quarters // 4) for quarters in (1, 2, 3)]
        try:
            return [int(word) for word in self.ranks.split(",")]
        except ValueError:
            raise ConfigError(f"--ranks {self.ranks!r}: write numbers with commas, such as 32,64,96") from None
