"""Steps and memory read from the logs of training programs, and calibration from a launch script and its log."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from milpplan import Job, Layout, Plan, Problem, VirtualStage, load_hardware, load_model, simulate
from milpplan.calibration import LoggedSteps, logged_steps, peak_margin, program_of, write_overlay
from milpplan.cli.app import app
from milpplan.errors import InvalidInputError
from milpplan.problem import Overlay, Provenance
from milpplan.reports.documents import read_plan

MEGATRON = (
    " [2025-10-06 03:27:07] iteration {number:8}/     100 | consumed samples:         5120 | elapsed time per"
    " iteration (ms): {ms} | throughput per GPU (TFLOP/s/GPU): 395.1 | learning rate: 1.0E-05 | global batch size:"
    " {batch:5} | lm loss: 9.763827E+00 | loss scale: 1.0 | number of skipped iterations:   0 |"
)
NEMO = (
    "[default0]:Training epoch 0, iteration {number}/99 | lr: 9e-08 | global_batch_size: {batch} | global_step: 0"
    " | reduced_train_loss: 14.66 | train_step_timing in s: {s} | consumed_samples: 8"
)
TITAN = (
    "[rank0]:[titan] 2025-01-01 00:00:00,000 - root - INFO - \x1b[31mstep: {number:2}  \x1b[32mloss:  8.1309"
    "  \x1b[33mmemory: 40.42GiB(42.58%)  \x1b[34mtps: {tps:,}  \x1b[36mtflops: 372.43  \x1b[35mmfu: 37.65%\x1b[39m"
)
DEEPSPEED = (
    "[2023-11-07 01:55:23,714] [INFO] [timer.py:260:stop] epoch=0/micro_step=40/global_step={number},"
    " RunningAvgSamplesPerSec=25.0, CurrSamplesPerSec={rate}, MemAllocated=4.32GB, MaxMemAllocated=38.49GB"
)
PIPELINE = "steps: {number} loss: 7.1234 iter time (s): {s} samples/sec: 103.7"
TRAINER = "{{'train_runtime': 71.0, 'train_samples_per_second': {rate}, 'train_steps_per_second': 0.28}}"
SECONDS = (9.0, 4.0, 2.0, 2.02, 1.98, 2.0, 2.1)
"""Steps of a run: two of warm-up, then 2 s in the median."""


def problem() -> Problem:
    """A small job of 16 GPUs."""
    job = Job(num_gpus=16, global_batch_size=64, sequence_length=8192)
    return Problem(model=load_model("llama3-8b"), hardware=load_hardware("dgx-h100"), job=job)


def lines(program: str) -> str:
    """The log of a run of ``SECONDS`` on 16 GPUs with 64 sequences of 8,192 tokens."""
    tokens = 64 * 8192 / 16
    texts = {
        "Megatron-LM": [MEGATRON.format(number=n, ms=1e3 * s, batch=64) for n, s in enumerate(SECONDS)],
        "NeMo": [NEMO.format(number=n, s=s, batch=64) for n, s in enumerate(SECONDS)],
        "torchtitan": [TITAN.format(number=n, tps=round(tokens / s)) for n, s in enumerate(SECONDS)],
        "DeepSpeed": [DEEPSPEED.format(number=n, rate=64 / s) for n, s in enumerate(SECONDS)],
        "DeepSpeed pipeline": [PIPELINE.format(number=n, s=s) for n, s in enumerate(SECONDS)],
    }
    return "some other line\n" + "\n".join(texts[program]) + "\n[after training is done]\n"


def read(text: str) -> LoggedSteps:
    """The steps that a log of the small job has."""
    layout = Layout(tp=2, dp=8, global_batch_size=64, sequence_parallel=True)
    plan = Plan(layout=layout, virtual_stages=(VirtualStage(layers=(0, 32)),))
    return logged_steps(text, "the log", problem(), plan)


@pytest.mark.parametrize("program", ["Megatron-LM", "NeMo", "torchtitan", "DeepSpeed", "DeepSpeed pipeline"])
def test_every_program_gives_the_same_steps(program: str) -> None:
    """Times, tokens/s and samples/s of one run are one median, without the warm-up."""
    text = lines(program)
    steps = read(text)
    assert steps.program == program_of(text) == program.removesuffix(" pipeline")
    assert steps.step_s == pytest.approx(2.0, rel=1e-3)
    assert (steps.num_warm_up, len(steps.steps_s)) == (2, 5)
    assert steps.scatter == pytest.approx(1.4826 * 0.01, rel=0.02)


def test_the_trainer_of_transformers_prints_its_mean() -> None:
    """Samples/s of the whole run, with the warm-up in it."""
    steps = read(TRAINER.format(rate=32.0))
    assert (steps.program, steps.steps_s, steps.num_warm_up) == ("Transformers' Trainer", (2.0,), 0)


def test_peaks_are_the_largest_of_the_ranks() -> None:
    """MB of Megatron-LM are 2**20 bytes, GB of DeepSpeed and GiB of torchtitan 2**30."""
    text = lines("Megatron-LM") + "".join(
        f"[Rank {rank}] (after 2 iterations) memory (MB) | allocated: 1.0 | max allocated: {1024.0 + rank} |"
        f" reserved: 2.0 | max reserved: {2048.0 - rank}\n"
        for rank in range(2)
    )
    assert read(text).peak_bytes == {"allocated": 1025 * 2**20, "reserved": 2048 * 2**20}
    assert read(lines("DeepSpeed")).peak_bytes == {"allocated": round(38.49 * 2**30)}
    assert read(lines("torchtitan")).peak_bytes == {"reserved": round(40.42 * 2**30)}


def test_few_lines_are_used_as_they_are() -> None:
    """Of two lines the second counts; a single line counts with its warm-up, and nothing is said of scatter."""
    two = "\n".join(MEGATRON.format(number=n, ms=ms, batch=64) for n, ms in enumerate((9000.0, 2000.0)))
    assert (read(two).steps_s, read(two).num_warm_up) == ((2.0,), 1)
    single = read(MEGATRON.format(number=1, ms=9000.0, batch=64))
    assert (single.steps_s, single.num_warm_up, single.scatter) == ((9.0,), 0, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nothing of a step", "no line with the time of a step"),
        (MEGATRON.format(number=1, ms=2000.0, batch=128), "a global batch of 128"),
        (MEGATRON.format(number=1, ms=0.0, batch=64), "no step that took time"),
    ],
)
def test_logs_of_other_runs_are_refused(text: str, words: str) -> None:
    """No line, another batch, no time."""
    with pytest.raises(InvalidInputError, match=words):
        read(text)


@pytest.mark.long
def test_a_script_and_its_log_calibrate(tmp_path: Path) -> None:
    """The overlay predicts the measured step; one layout identifies one constant, which is said."""
    runner, plan = CliRunner(), tmp_path / "plan.json"
    solved = ["llama3-8b", "dgx-h100", "--gpus", "16", "--global-batch", "64", "--space", "uniform"]
    assert runner.invoke(app, ["solve", *solved, "--target", "megatron", "--out", str(plan)]).exit_code == 0
    assert (
        runner.invoke(app, ["export", str(plan), "--to", "megatron", "-o", str(tmp_path / "launch")]).exit_code
        == 0
    )
    (script,) = (tmp_path / "launch").glob("*.sh")
    log, out = tmp_path / "run.log", tmp_path / "mine.toml"
    log.write_text("\n".join(MEGATRON.format(number=n, ms=4e3, batch=64) for n in range(5)))
    words = ["--from", "megatron", "--hardware", "dgx-h100", "--out", str(out)]
    done = runner.invoke(app, ["calibrate", str(script), str(log), *words])
    assert done.exit_code == 0, done.output
    text = " ".join(done.stdout.split())
    assert "4 s a step, the median of 4 lines of Megatron-LM, 1 line of warm-up left out" in text
    assert "gemm_efficiency stands for all" in text
    _, ran = read_plan(plan)
    fitted = problem().model_copy(update={"hardware": load_hardware(out)})
    assert simulate(fitted, ran).step_time_s == pytest.approx(4.0, rel=0.02)

    log.write_text("\n".join(MEGATRON.format(number=n, ms=12e3, batch=64) for n in range(5)))
    far = " ".join(runner.invoke(app, ["calibrate", str(script), str(log), *words[:-1], f"{out}"]).stdout.split())
    assert re.search(r"no constant was changed: the measured steps are [34]\.\d\d times the predicted ones", far)


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ((1.1,), r"1.10 times the predicted ones \(1 log\): plans leave"),
        ((1.1, 1.08, 1.2), r"1.10 times .* \(3 logs, scatter 2.7 %\): plans leave"),
        ((0.8,), "plans leave 5.0 % of the memory, as in the description"),
        ((3.0,), "too far for a margin"),
        ((), ""),
    ],
)
def test_measured_peaks_become_the_margin(ratios: tuple[float, ...], words: str, tmp_path: Path) -> None:
    """A predicted peak that fills the margin exactly is a measured one that leaves the default margin."""
    base = load_hardware("dgx-h100")
    margin, notes = peak_margin(ratios, base)
    assert bool(notes) == bool(ratios)
    assert re.search(words, " ".join(notes))
    if "plans leave" not in words or "as in" in words:
        assert margin is None
        return
    assert margin is not None
    assert base.capacity_bytes(margin) * 1.1 == pytest.approx(base.capacity_bytes(0.05), rel=1e-9)
    provenance = Provenance(data="", date="", method="", num_measurements=1)
    overlay = Overlay(base="dgx-h100", name="mine", provenance=provenance, memory_margin_fraction=margin)
    write_overlay(tmp_path / "mine.toml", overlay)
    mine = load_hardware(tmp_path / "mine.toml")
    assert mine.capacity_bytes() == base.capacity_bytes(margin)
    assert peak_margin(ratios, mine)[0] is None


@pytest.mark.parametrize(("number", "words"), [(2, ()), (1, ("--from", "megatron")), (3, ("--from", "megatron"))])
def test_scripts_and_logs_come_in_pairs_with_their_launcher(
    number: int, words: tuple[str, ...], tmp_path: Path
) -> None:
    """Two files without a launcher, and one or three files with it, are refused with an example."""
    files = [str(tmp_path / name) for name in ("a.sh", "a.log", "b.sh")[:number]]
    for file in files:
        Path(file).write_text("")
    out = tmp_path / "out.toml"
    done = CliRunner().invoke(app, ["calibrate", *files, *words, "--hardware", "dgx-h100", "--out", str(out)])
    assert done.exit_code == 2
    assert "milpplan calibrate run.sh run.log --from megatron" in " ".join(done.stderr.split())
    assert not out.exists()
