"""CPU seconds, gap and memory of `milpplan solve` on problems that are hard to prove, of two checkouts in turns.

    python -m benchmarks.commands [--set hard|today] [--only NAME ...] [--before PYTHON] [--save FILE] [--write]

Every command runs in a process of its own. Its CPU seconds are user and system time of that process and its
children, the start of Python included, so that other work on the machine disturbs them little. ``--before`` is
the interpreter of a virtual environment that holds another milpplan: both versions run each command in turns,
three times where that is quick, and the table has the medians. The set ``today``: eight
models of the last year, with a limit of 60 s of wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.problems import CASES
from benchmarks.tables import markdown_table, measured_on, replace_section
from milpplan.reports.files import write_whole
from milpplan.units import GIB, gap_text, gib_text, seconds_text

DOCUMENT: Final = Path(__file__).with_name("results") / "planning.md"
CPU_LIMIT_S: Final = 60.0
PATIENCE: Final = 3.0
"""The time limit of a solve is this many times its limit of CPU seconds, for machines without /proc and for phases
that the signal does not stop."""
GRACE_S: Final = 240.0
"""A process is killed this long after its time limit, or after the signal that stops it."""
MEMORY_LIMIT_BYTES: Final = 8 * GIB
"""A command whose processes hold more is killed."""
QUICK_S: Final = 5.0
"""A command of fewer CPU seconds runs ``ROUNDS`` times."""
ROUNDS: Final = 3
LOOK_S: Final = 0.05
"""Seconds between two looks at the memory of a command's processes."""


@dataclass(frozen=True, slots=True)
class Command:
    """A problem as arguments of `milpplan solve`, the tolerance of its proof, and the limit of its CPU time.

    Attributes:
        time_limit_s: Limit of the wall time; None: ``PATIENCE`` times that of the CPU time.
    """

    text: str
    arguments: str
    gap: float = 1e-3
    cpu_limit_s: float = CPU_LIMIT_S
    time_limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """The outcome of one command. ``status``: of the answer, or "overran", "out of memory", "failed"; ``gap``:
    None where no plan was found."""

    status: str
    gap: float | None
    step_time_s: float | None
    legal: int
    cpu_s: float
    wall_s: float
    peak_bytes: int


Runs = Mapping[str, Sequence[Run]]
"""The runs of a command by version: "now", and "before" where another version was measured."""

RANGES: Final = "llama3-8b dgx-h100 --gpus 64:1024:64 --global-batch 512:4096:512"
NODE_TYPES: Final = "llama3-70b dgx-a100-80:64+dgx-h100:64+dgx-b200:64+mi300x:64 --global-batch 512"
DEEPSEEK: Final = "deepseek-v3 dgx-h100 --gpus 16384 --global-batch 16384"
SHARED_SWITCHES: Final = ("offload", "tp-overlap", "scatter-gather", "kept-gathered", "placement")
"""Switches that every compared version has: ``--allow all`` opens more in later ones."""
COMMANDS: Final = {
    "readme": Command("Llama-3 70B, 512 GPUs (README)", "llama3-70b dgx-h100 --gpus 512 --global-batch 512", 1e-4),
    **{
        name: Command(
            f"{case.text()}, batch {case.global_batch_size:,}",
            f"{case.model} {case.hardware} --gpus {case.num_gpus} --global-batch {case.global_batch_size}"
            f" --seq-len {case.sequence_length}",
            1e-4,
        )
        for name, case in CASES.items()
    },
    "llama3-1k": Command("Llama-3 70B, 1,024 GPUs", "llama3-70b dgx-h100 --gpus 1024 --global-batch 1024", 1e-4),
    "llama3-131k": Command(
        "Llama-3 70B, 131,072 GPUs", "llama3-70b dgx-h100 --gpus 131072 --global-batch 131072", 1e-4
    ),
    "deepseek-16k": Command("DeepSeek-V3, 16,384 GPUs", DEEPSEEK),
    "deepseek-16k-all": Command(
        "DeepSeek-V3, 16,384 GPUs, all schedules, and the switches of both versions",
        f"{DEEPSEEK} --schedule all {' '.join(f'--allow {name}' for name in SHARED_SWITCHES)}",
    ),
    # NVIDIA's Megatron-Bridge performance summary has this batch on 256 H100; 30B's batch is our choice.
    "qwen3-235b": Command("Qwen3-235B, 256 H200", "qwen3-235b-a22b dgx-h200 --gpus 256 --global-batch 8192"),
    "qwen3-30b": Command(
        "Qwen3-30B, 16 GPUs, pp=2", "qwen3-30b-a3b dgx-h100 --gpus 16 --global-batch 512 --fix pp=2"
    ),
    "deepseek-megatron": Command(
        "DeepSeek-V3, 2,048 GPUs, for Megatron-LM",
        "deepseek-v3 dgx-h100 --gpus 2048 --global-batch 15360 --target megatron --price-limit 0",
    ),
    "node-types": Command("Llama-3 70B, four node types of 64 GPUs", NODE_TYPES, 1e-2),
    "node-types-5s": Command(
        "Llama-3 70B, four node types, stopped after 5 s", NODE_TYPES, 1e-2, time_limit_s=5.0
    ),
    "ranges-uniform": Command("Llama-3 8B, 16 GPU counts x 8 batches, uniform", f"{RANGES} --space uniform", 1e-4),
    "ranges-free": Command("Llama-3 8B, 16 GPU counts x 8 batches, free", RANGES, 1e-4),
}

CONFIGS: Final = Path(__file__).parents[1] / "tests" / "data" / "hf_configs"


def _today(text: str, model: str, cluster: str, batch: int, length: int = 4096) -> Command:
    """Command with the limit of 60 s of wall time; ``model`` is a preset or one of ``CONFIGS``."""
    source = CONFIGS / f"{model}.json"
    arguments = f"{source if source.exists() else model} {cluster} --global-batch {batch} --seq-len {length}"
    return Command(text, arguments, cpu_limit_s=2 * CPU_LIMIT_S, time_limit_s=CPU_LIMIT_S)


TODAY: Final = {
    "kimi-k2": _today("Kimi-K2, 1,024 H200", "kimi-k2", "dgx-h200 --gpus 1024", 4096),
    "qwen3-next": _today("Qwen3-Next-80B, 64 H100", "qwen3-next-80b", "dgx-h100 --gpus 64", 1024),
    "qwen3.5-397b": _today("Qwen3.5-397B, 512 B200", "qwen3.5-397b", "dgx-b200 --gpus 512", 2048),
    "nemotron-3-ultra": _today("Nemotron-3-Ultra, 512 GB200", "nemotron-3-ultra", "gb200-nvl72 --gpus 512", 2048),
    "deepseek-v3.2": _today("DeepSeek-V3.2, 2,048 H800, 128K", "deepseek-v3.2", "h800 --gpus 2048", 512, 131072),
    "llama4-maverick": _today("Llama-4 Maverick, 512 H100", "llama4-maverick", "dgx-h100 --gpus 512", 2048),
    "qwen3-vl-235b": _today("Qwen3-VL-235B, 256 H200", "qwen3-vl-235b", "dgx-h200 --gpus 256", 2048),
    "glm-5": _today("GLM-5, 1,024 B200", "glm-5", "dgx-b200 --gpus 1024", 4096),
}
SETS: Final = {"hard": ("commands", COMMANDS), "today": ("today", TODAY)}
"""Section of the page and commands of each set."""


def run_command(python: str, command: Command, folder: Path) -> Run:
    """Solve in a fresh process.

    Args:
        python: The interpreter whose milpplan solves.
        folder: Working directory of the process.
    """
    arguments = ["solve", *command.arguments.split(), "--gap", str(command.gap), "--json"]
    deadline_s = command.time_limit_s or PATIENCE * command.cpu_limit_s
    arguments += ["--time-limit", str(deadline_s)]
    ended, interrupted, peak_bytes = "", False, 0
    with tempfile.TemporaryFile("w+") as out:
        started = time.perf_counter()
        process = subprocess.Popen(
            [python, "-c", "from milpplan.cli import main; main()", *arguments],
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            stdout=out,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            start_new_session=True,
        )
        while True:
            pid, _, usage = os.wait4(process.pid, os.WNOHANG)
            wall_s = time.perf_counter() - started
            if pid:
                break
            cpu_s, resident_bytes = usage_of_tree(process.pid)
            peak_bytes = max(peak_bytes, resident_bytes)
            if peak_bytes > MEMORY_LIMIT_BYTES or wall_s > deadline_s + GRACE_S:
                ended = "out of memory" if peak_bytes > MEMORY_LIMIT_BYTES else "overran"
                os.killpg(process.pid, signal.SIGKILL)
            elif cpu_s > command.cpu_limit_s and not interrupted:
                interrupted, deadline_s = True, wall_s
                os.killpg(process.pid, signal.SIGINT)
            time.sleep(LOOK_S)
        process.returncode = 0
        out.seek(0)
        answer = {} if ended else _document(out.read())
    return Run(
        ended or answer.get("status", "failed"),
        answer.get("gap"),
        answer.get("step_time_s"),
        (answer.get("layouts") or {}).get("legal", 0),
        usage.ru_utime + usage.ru_stime,
        wall_s,
        peak_bytes,
    )


def _document(text: str) -> dict[str, Any]:
    """Read a JSON document; an empty one if the process printed none."""
    with suppress(json.JSONDecodeError):
        return dict(json.loads(text))
    return {}


def usage_of_tree(pid: int) -> tuple[float, int]:
    """Sum the CPU seconds and the resident memory of a process and its descendants (Linux; elsewhere zeros)."""
    cpu_s, resident = 0.0, 0
    # A process may end while its files are read.
    with suppress(OSError):
        folder = Path(f"/proc/{pid}")
        # Fields 14 to 17 of proc_pid_stat(5): user and system time, of the process and of its ended children.
        ticks = (folder / "stat").read_text().rpartition(")")[2].split()[11:15]
        cpu_s = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        resident = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for task in (folder / "task").iterdir():
            for child in (task / "children").read_text().split():
                child_cpu_s, child_resident = usage_of_tree(int(child))
                cpu_s, resident = cpu_s + child_cpu_s, resident + child_resident
    return cpu_s, resident


def measured(command: Command, pythons: Mapping[str, str], folder: Path) -> dict[str, list[Run]]:
    """Run a command with every version in turns, several rounds if all of them are quick."""
    runs: dict[str, list[Run]] = {version: [] for version in pythons}
    for _ in range(ROUNDS):
        for version, python in pythons.items():
            runs[version].append(run_command(python, command, folder))
        if any(of_version[0].cpu_s > QUICK_S for of_version in runs.values()):
            break
    return runs


def read_runs(path: Path | None) -> dict[str, dict[str, list[Run]]]:
    """Read the runs that ``save_runs`` wrote; none if there is no file."""
    if path is None or not path.exists():
        return {}
    document = json.loads(path.read_text(encoding="utf-8"))["runs"]
    return {
        name: {version: [Run(**run) for run in runs] for version, runs in by_version.items()}
        for name, by_version in document.items()
    }


def save_runs(path: Path | None, runs: Mapping[str, Runs]) -> None:
    """Write the runs of all commands as JSON, if there is a path."""
    if path is not None:
        document = {
            name: {version: [asdict(run) for run in of_version] for version, of_version in by_version.items()}
            for name, by_version in runs.items()
        }
        write_whole(path, json.dumps({"measured_on": measured_on(), "runs": document}, indent=1) + "\n")


def measure_all(
    commands: Mapping[str, Command], pythons: Mapping[str, str], save: Path | None
) -> dict[str, dict[str, list[Run]]]:
    """Run all commands that ``save`` does not hold yet.

    Returns:
        The runs by command and version.
    """
    runs = read_runs(save)
    with tempfile.TemporaryDirectory() as folder:
        for name, command in commands.items():
            if name not in runs:
                print(f"{name} ...", file=sys.stderr, flush=True)
                runs[name] = measured(command, pythons, Path(folder))
                save_runs(save, runs)
    return {name: runs[name] for name in commands}


def median_cpu_s(runs: Sequence[Run]) -> float:
    """Return the median of the CPU seconds."""
    return statistics.median(run.cpu_s for run in runs)


def outcome_text(runs: Sequence[Run]) -> str:
    """Describe the proof: its gap, or the reason why there is none."""
    run = runs[-1]
    if run.gap is not None:
        return gap_text(run.gap)
    return {"infeasible": "infeasible", "unknown": "no plan"}.get(run.status, run.status)


def command_table(commands: Mapping[str, Command], runs: Mapping[str, Runs]) -> str:
    """Build the table: a row for each command, with both versions where two were measured."""
    versions = [version for version in ("before", "now") if any(version in of for of in runs.values())]
    rows = []
    for name, by_version in runs.items():
        command, now = commands[name], by_version["now"]
        before = by_version.get("before")
        measured_by = [of_version for of_version in (before, now) if of_version]
        rows.append(
            (
                command.text,
                f"{command.gap:g}",
                *(seconds_text(median_cpu_s(of_version)) for of_version in measured_by),
                *([f"{median_cpu_s(before) / median_cpu_s(now):.1f}"] if before else []),
                *(outcome_text(of_version) for of_version in measured_by),
                *(gib_text(max(run.peak_bytes for run in of_version)) for of_version in measured_by),
                f"{now[-1].legal:,}",
            )
        )
    ratio = ["ratio"] if len(versions) > 1 else []
    header = ["work", "tolerance", *(f"CPU {version}" for version in versions), *ratio]
    header += [f"gap {version}" for version in versions] + [f"memory {version}" for version in versions]
    return markdown_table([*header, "legal layouts"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="CPU seconds, gap and memory of hard solves.")
    parser.add_argument("--set", choices=SETS, default="hard", help="set of commands")
    parser.add_argument("--only", nargs="+", help="these commands of the set")
    parser.add_argument("--before", metavar="PYTHON", help="interpreter of an environment with another milpplan")
    parser.add_argument("--save", type=Path, help="keep the runs here, and do not repeat those that it holds")
    parser.add_argument("--write", action="store_true", help=f"write the table to {DOCUMENT.name}")
    options = parser.parse_args(arguments)
    pythons = {"before": options.before} if options.before else {}
    section, known = SETS[options.set]
    if unknown := set(options.only or ()) - set(known):
        parser.error(f"--only names {', '.join(sorted(unknown))}. Expected: {', '.join(known)}.")
    commands = {name: known[name] for name in options.only or known}
    runs = measure_all(commands, {**pythons, "now": sys.executable}, options.save)
    table = command_table(commands, runs)
    print(table)
    if options.write:
        replace_section(DOCUMENT, section, table)


if __name__ == "__main__":
    main()
