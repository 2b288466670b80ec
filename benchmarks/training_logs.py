"""Calibration from public launch scripts and their logs: errors of steps and peaks before and after.

    git clone https://github.com/bigscience-workshop/bigscience
    python -m benchmarks.training_logs bigscience [--write benchmarks/results/trials.md]

Five runs of Megatron-LM on 16 to 256 V100 of Jean Zay, each with the Slurm script that started it, at commit
9e64edec. They are in fp16, which the reader of scripts refuses; they are priced as bf16, whose bytes and rates are
equal in the description of a V100. That description's rate of products was chosen between this source and another,
so the errors before calibration are not those of an unseen cluster.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean, median
from typing import Final

from benchmarks.tables import markdown_table, replace_section
from milpplan import simulate
from milpplan.calibration.fitting.fit import fit
from milpplan.calibration.measured import Observation
from milpplan.calibration.training_logs import logged_steps
from milpplan.launchers import ImportRequest, target_named
from milpplan.problem.overlay import USUAL
from milpplan.units import gib_text, percent_text, seconds_text
from milpplan.validation.runs import read_runs, state

FOLDER: Final = Path("experiments/gpt2-meg")
PUBLISHED: Final = Path(__file__).parents[1] / "runs" / "measured_more.json.gz"
JEAN_ZAY: Final = "bigsci-meg-0-18B-16"
"""Run of the shipped ones whose words describe the cluster."""
VOCAB_SIZE: Final = 50257
HEADER: Final = (
    "log",
    "GPUs",
    "measured",
    "before",
    "after",
    "left out",
    "peak measured",
    "peak before",
    "peak by the other logs",
)


def results(checkout: Path) -> str:
    """The table, with the mean absolute errors below."""
    published = next(run for run in read_runs(PUBLISHED).runs if run.id == JEAN_ZAY)
    hardware = state(published).problem.hardware
    runs, peaks = [], []
    for script in sorted(
        (checkout / FOLDER).glob("meg_gpt2_base_n*.slurm"), key=lambda path: int(path.stem.rpartition("_n")[2])
    ):
        (log,) = (checkout / FOLDER).glob(f"{script.stem}_*.out")
        text = script.read_text(encoding="utf-8").replace("--fp16", "--bf16")
        asked = ImportRequest(text, script.name, hardware, vocab_size=VOCAB_SIZE)
        imported = target_named("megatron", "--from").read(asked)
        steps = logged_steps(log.read_text(encoding="utf-8"), log.name, imported.problem, imported.plan)
        runs.append(Observation(script.stem, script.stem, imported.problem, imported.plan, steps.step_s))
        peaks.append((steps.peak_bytes["allocated"], simulate(imported.problem, imported.plan).peak_memory_bytes))
    result = fit(runs, None, USUAL)
    rows, errors = [], []
    for index, run in enumerate(runs):
        measured, predicted = peaks[index]
        factor = median(own / other for row, (own, other) in enumerate(peaks) if row != index)
        times = (result.before_s[index], result.after_s[index], result.left_out_s[index])
        cells = [f"{seconds_text(float(time))} {_error(time / run.step_time_s)}" for time in times]
        memory = [f"{gib_text(peak)} {_error(peak / measured)}" for peak in (predicted, predicted * factor)]
        gpus = run.plan.layout.num_gpus
        rows.append((run.id, gpus, seconds_text(run.step_time_s), *cells, gib_text(measured), *memory))
        errors.append((abs(predicted / measured - 1), abs(predicted * factor / measured - 1)))
    before, after = (percent_text(fmean(part)) for part in zip(*errors, strict=True))
    left_out = percent_text(result.error_left_out or 0.0)
    identified = ", ".join(f"`{part.name}` {part.value:.2f}" for part in result.identified)
    return (
        f"{markdown_table(HEADER, rows)}\n\nMean absolute error of the steps: {percent_text(result.error_before)}"
        f" before, {percent_text(result.error_after)} after, {left_out} of logs left out; identified:"
        f" {identified}. Of the peaks: {before} before, {after} with the median ratio of the other logs."
    )


def _error(ratio: float) -> str:
    """A signed error in a table's cell."""
    return f"({100 * (ratio - 1):+.1f} %)"


def main() -> None:
    """Print the table, or write it into a results page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    text = results(options.checkout)
    if options.write is None:
        print(text)
    else:
        replace_section(options.write, "training logs", text)


if __name__ == "__main__":
    main()
