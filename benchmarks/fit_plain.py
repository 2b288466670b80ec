"""Fit what frameworks without fused kernels have in common, and predict each source by the others.

    python -m benchmarks.fit_plain [--dry-run] [--write benchmarks/results/accuracy.md]

A framework that launches single operators of PyTorch or Paddle moves more memory traffic for the same layer than
the fused kernels of Megatron-LM and Transformer Engine, whose traffic the cost model counts. One factor on the
memory's rate, fitted to all such sources at once, each with as many runs, stands for it where a framework has no
stack of its own: the overlays ``HARDWARE+plain``. What that is worth is seen on sources left out, each predicted
by a factor fitted to the others. The tables of classes do so for all dense runs: frameworks with fused kernels
have the bare description, the others the factor that was fitted without their source.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.leave_out import errors, figures
from benchmarks.tables import markdown_table, replace_section
from milpplan.calibration.fitting.fit import fit
from milpplan.calibration.fitting.records import Fit
from milpplan.calibration.measured import Observation, observations
from milpplan.calibration.sources import write_overlay
from milpplan.problem.overlay import Factor, Overlay, with_constants
from milpplan.units import percent_text
from milpplan.validation.runs.frameworks import PLAIN_STACK, framework_of
from milpplan.validation.runs.reader import RunFile, read_runs
from milpplan.validation.runs.variants import generation_of, is_scored

TARGET: Final = Path(__file__).resolve().parents[1] / "hardware" / "stacks"
CONSTANT: Final = "memory_efficiency"
HARDWARE: Final = ("dgx-a100-40", "dgx-a100-80", "dgx-h100", "dgx-h200")
"""Of the generations that plain frameworks were measured on."""
OLDER_KERNEL: Final = {"Hopper": Factor(value=0.61, one_sigma=0.05)}
"""FlashAttention-2, which PyTorch calls, over the cuDNN 9 of the description of H100: 191 to 335 over 315 to 539
TFLOP/s at 512 to 16,384 tokens, FlashAttention-3 (Shah et al. 2024) figure 5; one sigma: reading off the bars. On
A100 the description has FlashAttention-2 itself. Not fitted."""
SPECIAL: Final = ("nanotron-slow-calls", "nanotron-earlier-engine")
"""Stacks of nodes and engines in a state that no other source has."""
RUNS_A_SOURCE: Final = 30
SEED: Final = 0
HEADER: Final = ("generation", "source", "runs", "fitted to", "factor", "no stack", "left out", "with it")
CLASS_HEADER: Final = ("generation", "source", "class", "runs", "error")
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Row:
    """One source on one generation: its runs' errors without a factor, left out, and fitted to."""

    generation: str
    source: str
    others: int
    factor: float
    without: FloatArray
    left_out: FloatArray
    fitted: FloatArray


def plain_runs(file: RunFile, found: Sequence[Observation]) -> list[Observation]:
    """The runs of all sources with such a framework, on hardware as described."""
    plain = {run.id for run in file.runs if framework_of(run).plain}
    usual = [run for run in found if run.id in plain and run.stack not in SPECIAL]
    return [run for run in usual if run.problem.hardware.name in HARDWARE]


def sample(runs: Sequence[Observation]) -> list[Observation]:
    """As many runs of every source on each generation, with the attention kernel that PyTorch calls there."""
    groups: dict[tuple[str, str], list[Observation]] = defaultdict(list)
    for run in runs:
        groups[generation_of(run.problem.hardware), run.group].append(_with_older_kernel(run))
    chosen = []
    for _, own in sorted(groups.items()):
        rows = np.random.default_rng(SEED).choice(len(own), min(RUNS_A_SOURCE, len(own)), replace=False)
        chosen += [own[row] for row in sorted(rows)]
    return chosen


def _with_older_kernel(run: Observation) -> Observation:
    older = OLDER_KERNEL.get(generation_of(run.problem.hardware))
    if older is None:
        return run
    hardware = with_constants(run.problem.hardware, {"attention_efficiency": older.value}, {})
    return replace(run, problem=run.problem.model_copy(update={"hardware": hardware}))


def fits_without(runs: Sequence[Observation]) -> dict[str, tuple[Fit, int]]:
    """By source, the factor fitted to a sample of the others, and the size of the sample; runs of the source on
    two generations are left out together."""
    fits = {}
    for source in sorted({run.group for run in runs}):
        others = sample([run for run in runs if run.group != source])
        fits[source] = fit(others, constants=(CONSTANT,), num_folds=1, hops=False), len(others)
    return fits


def left_out(runs: Sequence[Observation], everything: Fit, fits: Mapping[str, tuple[Fit, int]]) -> Iterator[Row]:
    """Every source, all its runs, predicted by the factor that was fitted without it."""
    whole = _overlay(everything, runs[0].problem.hardware.name, len(runs), "")
    for source, (result, num_others) in fits.items():
        for generation in ("Ampere", "Hopper"):
            own = [run for run in runs if (run.group, generation_of(run.problem.hardware)) == (source, generation)]
            if own:
                yield Row(
                    generation,
                    source,
                    num_others,
                    result.constant(CONSTANT).value,
                    errors(own, None),
                    _errors_without(own, fits),
                    errors([_with_older_kernel(run) for run in own], whole),
                )


def _errors_without(runs: Sequence[Observation], fits: Mapping[str, tuple[Fit, int]]) -> FloatArray:
    """Errors of a source's runs by the factor that was fitted without it."""
    result, num_others = fits[runs[0].group]
    overlay = _overlay(result, runs[0].problem.hardware.name, num_others, "")
    return errors([_with_older_kernel(run) for run in runs], overlay)


def class_tables(found: Sequence[Observation], plain: frozenset[str], fits: Mapping[str, tuple[Fit, int]]) -> str:
    """Errors of all dense runs by the constants of their class: by source on described accelerators with the mean
    of each generation, and of the runs with ZeRO 3 on any.

    ``plain``: names of the runs that have the factor fitted without their source; others have bare hardware.
    """
    groups: dict[tuple[str, str, bool], list[Observation]] = defaultdict(list)
    for run in found:
        if not run.problem.model.has_experts and run.stack not in SPECIAL:
            described = is_scored(run.problem.hardware.name)
            groups[generation_of(run.problem.hardware), run.group, described].append(run)
    cells, zero_3 = [], []
    sizes: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for (generation, source, described), own in sorted(groups.items()):
        of_class = [[run for run in own if (run.id in plain) is is_plain] for is_plain in (False, True)]
        runs = [*of_class[0], *of_class[1]]
        values = [errors(of_class[0], None), _errors_without(of_class[1], fits) if of_class[1] else np.zeros(0)]
        error = np.concatenate(values)
        sharded = error[[run.plan.layout.zero_stage == 3 for run in runs]]
        if described:
            names = [name for name, members in zip(("fused", PLAIN_STACK), of_class, strict=True) if members]
            cells.append((generation, source, " and ".join(names), len(runs), figures(error)))
            sizes[generation].append((float(error.mean()), float(np.abs(error).mean())))
        if len(sharded):
            zero_3.append((generation, source, len(sharded), figures(sharded), float(np.abs(sharded).mean())))
    means = []
    for generation, pairs in sizes.items():
        mean, size = np.mean(pairs, axis=0)
        means.append(
            f"{generation} {percent_text(mean)} (mean absolute {percent_text(size)}, {len(pairs)} sources)"
        )
    mean_3 = percent_text(fmean(row[-1] for row in zero_3)) if zero_3 else "none"
    return "\n\n".join(
        (
            markdown_table(CLASS_HEADER, cells),
            f"Means of sources: {'; '.join(means)}.",
            markdown_table(("generation", "source", "runs with ZeRO 3", "error"), [row[:-1] for row in zero_3]),
            f"Mean of these {len(zero_3)} rows' mean absolute errors: {mean_3}.",
        )
    )


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown, and a sentence that sums them up."""
    cells = [
        (
            row.generation,
            row.source,
            len(row.without),
            f"{row.others} runs of the others",
            f"{row.factor:.3f}",
            figures(row.without),
            figures(row.left_out),
            figures(row.fitted),
        )
        for row in sorted(rows, key=lambda row: (row.generation, row.source))
    ]
    means = [
        percent_text(float(np.mean([np.mean(np.abs(getattr(row, name))) for row in rows])))
        for name in ("without", "left_out", "fitted")
    ]
    return (
        f"{markdown_table(HEADER, cells)}\n\nMean of these {len(rows)} rows' mean absolute errors: {means[0]} "
        f"without a stack, {means[1]} left out, {means[2]} with the source among those fitted to."
    )


def _overlay(result: Fit, hardware: str, count: int, sources: str) -> Overlay:
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    data = f"{count} published runs of frameworks without fused kernels: {sources}"
    return result.overlay(hardware, f"{hardware}+{PLAIN_STACK}", data, today)


def _with_kernel(overlay: Overlay, generation: str) -> Overlay:
    """The overlay with the older attention kernel of its generation."""
    older = OLDER_KERNEL.get(generation)
    if older is None:
        return overlay
    constants = overlay.constants.model_copy(update={"attention_efficiency": older})
    note = "; attention_efficiency not fitted: FlashAttention-2 over cuDNN 9, Shah et al. 2024, figure 5"
    provenance = overlay.provenance.model_copy(update={"method": overlay.provenance.method + note})
    return overlay.model_copy(update={"constants": constants, "provenance": provenance})


def main() -> None:
    """Fit, print the table, write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="write no overlay")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="put the table there")
    arguments = parser.parse_args()
    file = read_runs(None)
    found, _ = observations(file)
    runs = plain_runs(file, found)
    fitted_to = sample(runs)
    result = fit(fitted_to, constants=(CONSTANT,), groups=[run.group for run in fitted_to], hops=False)
    constant = result.constant(CONSTANT)
    print(f"{CONSTANT} {constant.value:.3f} +- {constant.one_sigma:.3f}", file=sys.stderr)
    fits = fits_without(runs)
    text = table(list(left_out(runs, result, fits)))
    classes = class_tables(found, frozenset(run.id for run in runs), fits)
    print(text, classes, sep="\n\n")
    if arguments.write is not None:
        replace_section(arguments.write, "plain frameworks left out", text)
        replace_section(arguments.write, "classes", classes)
    if arguments.dry_run:
        return
    for hardware in HARDWARE:
        generation = "Ampere" if hardware.startswith("dgx-a100") else "Hopper"
        overlay = _overlay(result, hardware, len(fitted_to), ", ".join(sorted({run.group for run in runs})))
        write_overlay(TARGET / f"{hardware}+{PLAIN_STACK}.toml", _with_kernel(overlay, generation))


if __name__ == "__main__":
    main()
