"""The commands of `nanovllm compress`: pca, calibrate, distill, report. scripts/*.py are the same under older names."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nanovllm.cli.options import OptionGroup, with_options
from nanovllm.engine.interrupts import import_torch
from nanovllm.errors import ConfigError
from nanovllm.lowrank.compress.options import DEFAULT_SVD_RANK, Options, Swept

if TYPE_CHECKING:
    from nanovllm.lowrank.format import SvdMetadata

compress = typer.Typer(
    name="compress",
    help="Low-rank experts: a smaller mixture of experts, the loss measured. Order: calibrate, report, distill.",
    no_args_is_help=True,
)

ModelPath = Annotated[Path, typer.Option(help="The model's folder (or .gguf file).")]
CalibPath = Annotated[Path, typer.Option(help="A folder made by `calibrate`.")]
DeviceName = Annotated[str, typer.Option("--device", help="auto, cpu or a GPU.")]
OutputDir = Annotated[Path | None, typer.Option(help="Default: svd_experts in the model's folder, where it is found.")]
TextFile = Annotated[Path, typer.Option(help="Plain text that nothing was fitted to.")]

FITTING = OptionGroup(
    title="Fitting",
    of=Options,
    build=lambda values: Options(**values),
    skipped=frozenset({"method"}),
    help={
        "rank": f"Directions kept on the hidden side, by default {DEFAULT_SVD_RANK}. Of 4,096, 256 keeps 7 %: expect "
        "ruin.",
        "target_ratio": "Instead of --rank: most of the experts' bytes to keep, U included; ranks by predicted loss.",
        "w2_mode": "Side of w2's U: input, output, or auto = the better on held-out rows (pca: output).",
        "ridge": "Pull of V toward its data-free value.",
        "dtype": "float32, bfloat16, float16, or auto = that of the model.",
        "chunk": "Windows computed at a time; less needs less memory.",
        "chunk_w2": "The same for w2, whose rows are wider.",
        "pca_oversample": "Extra directions of the subspace iteration for w2.",
        "refine_steps": "Steps of gradient refinement against the teacher's outputs.",
    },
)
PCA = replace(
    FITTING,
    build=lambda values: Options("pca", **values),
    defaults={"rank": DEFAULT_SVD_RANK},
    skipped=frozenset(FITTING.help) - {"rank", "dtype", "w2_mode"} | {"method"},
)
SWEEP = OptionGroup(
    title="Sweep",
    of=Swept,
    build=lambda values: Swept(**values),
    help={
        "ranks": "With commas; default: quarters of the hidden size.",
        "speed_tokens": "Tokens generated to measure tok/s on this device; 0 = do not.",
    },
)
SWEPT = replace(FITTING, skipped=frozenset({"method", "rank", "target_ratio"}))


def _check_device(device: str) -> None:
    from nanovllm.config import DEVICES

    if device not in DEVICES:
        raise ConfigError(f"--device {device!r}: must be one of {', '.join(DEVICES)}")


def _compress(
    model_path: Path, calib_path: Path | None, output_dir: Path | None, options: Options, device: str
) -> None:
    _check_device(device)
    import_torch()
    from nanovllm.lowrank.compress.distill import compress as run

    _show(run(model_path, calib_path, output_dir, options, device))


def _show(metadata: SvdMetadata) -> None:
    errors = [found["layer"] for found in metadata.heldout_errors.values() if found["layer"] is not None]
    line = f"done: {metadata.kept:.1%} of the experts' bytes kept, U included"
    if errors:
        line += f"; error of a layer's output on held-out text {min(errors):.3f} to {max(errors):.3f}"
    print(line)


@compress.command()
@with_options(options=PCA)
def pca(model_path: ModelPath, device: DeviceName = "auto", output_dir: OutputDir = None, *, options: Options) -> None:
    """Low-rank experts from the weights alone: quick, needs no text, and loses most."""
    _compress(model_path, None, output_dir, options, device)


@compress.command()
def calibrate(
    model_path: ModelPath,
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    cap_per_group: Annotated[int, typer.Option(min=1, help="Held-out rows kept for each expert.")] = 1024,
    num_prompts: Annotated[
        int | None, typer.Option(min=0, help="Texts the model writes itself; default 200, none with --text.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of each.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="Their randomness; 1 = as the model learnt.")] = 0.7,
    text: Annotated[Path | None, typer.Option(help="A file of running text: better than the model's own.")] = None,
    device: DeviceName = "auto",
) -> None:
    """Record what the experts of a model see."""
    _check_device(device)
    import_torch()
    from nanovllm.lowrank.compress.calibrate import collect
    from nanovllm.lowrank.compress.text import Source

    found = collect(model_path, out, Source(text, num_prompts, max_new_tokens, temperature), cap_per_group, device)
    counts = [count for of_layer in found.facts["counts"].values() for count in of_layer]
    print(
        f"{out}: {found.facts['num_tokens']} tokens in {len(found.windows)} windows; an expert saw {min(counts)} to "
        f"{max(counts)} of them"
    )


@compress.command()
@with_options(options=FITTING)
def distill(
    model_path: ModelPath,
    calib_path: CalibPath,
    device: DeviceName = "auto",
    output_dir: OutputDir = None,
    *,
    options: Options,
) -> None:
    """Low-rank experts fitted to what they see: layer by layer, resumable, written beside and then put in place."""
    _compress(model_path, calib_path, output_dir, options, device)


@compress.command()
@with_options(swept=SWEEP, options=SWEPT)
def report(
    model_path: ModelPath,
    calib_path: CalibPath,
    text: TextFile,
    device: DeviceName = "auto",
    plot: Annotated[Path | None, typer.Option(help="Draw the curves into this file (needs 'nano-vllm[plot]').")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write all figures to this file.")] = None,
    *,
    swept: Swept,
    options: Options,
) -> None:
    """Measure a sweep of ranks: KL to the teacher, perplexity, agreement, errors of each expert, bytes, tok/s here."""
    _check_device(device)
    import_torch()
    from nanovllm.bench import report as page
    from nanovllm.lowrank.compress.report import COLUMNS, LOGARITHMIC, sweep

    page.check_plot(plot)
    if json_file:
        page.check_file("--json", json_file, b'{\n "benchmark": "compress"')
    with tempfile.TemporaryDirectory() as scratch:
        findings = sweep(model_path, calib_path, text, swept, options, device, Path(scratch))
    page.print_table(f"low-rank experts of {model_path.name}", COLUMNS, findings.rows())
    print(findings.summary())
    speed = findings.teacher_speed
    if speed:
        print(f"tok/s: one sequence of {speed.num_tokens} tokens through the engine on {speed.device}, {speed.dtype}")
    if plot:
        page.plot_lines(plot, "experts' bytes kept, %", findings.lines(), log_x=False, log_y=LOGARITHMIC)
    hardware = speed.device if speed else None
    found = page.make_report("compress", hardware=hardware, model=model_path.name, **findings.record())
    if json_file:
        try:
            json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {json_file}: cannot be written: {error}") from None
    page.finish(found, save=False)
