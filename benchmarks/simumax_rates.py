"""CPU milliseconds of an estimate: SimuMax and milpplan on the same degrees, micro-batches and sequence length.

    python -m benchmarks.simumax_rates CHECKOUT_PATH [--rounds 7]

An estimate of SimuMax is ``run_estimate``, ``analysis_mem`` and ``analysis_cost``, the calls of its own search.
Its output is dropped, and files are read outside the time. An estimate of milpplan is ``simulate``, or a share of
``simulate_many`` over all uniform plans of the problem, enumeration included. Both report a step time and the
memory of all stages, and have their own description of 8-GPU nodes of B200; only the time of the estimates is
compared. The first two columns add the start of Python and the imports to the first estimate.

SimuMax: github.com/MooreThreads/SimuMax, measured at 4dcaae5. Nothing of it is shipped here.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.tables import markdown_table, measured_on
from milpplan import Job, Layout, Problem, Space, load_hardware, load_model, simulate, simulate_many
from milpplan.optimize.bounds.uniform_plans import uniform_plan
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.units import seconds_text

STRATEGY: Final = "tp2_pp1_dp4_mbs1.json"
SYSTEM: Final = "b200_bf16_ceperm.json"


@dataclass(frozen=True, slots=True)
class Case:
    """A model by SimuMax's name and ours, and a layout of micro-batches of one sequence."""

    theirs: str
    ours: str
    tp: int
    pp: int
    dp: int
    batch: int
    sequence_length: int

    def text(self) -> str:
        """Describe the case for a table."""
        return f"{self.ours}, tp{self.tp} pp{self.pp} dp{self.dp}, {self.batch // self.dp} micro-batches"


CASES: Final = (
    Case("llama3-8b", "llama3-8b", 2, 1, 4, 32, 4096),
    Case("llama3-70b", "llama3-70b", 4, 8, 8, 256, 4096),
    Case("llama3-70b", "llama3-70b", 1, 8, 8, 1024, 4096),
    Case("megatron-530b", "turing-530b", 8, 35, 8, 560, 2048),
)


def cpu_s(work: Callable[[], Any]) -> float:
    """Measure the CPU seconds of a call."""
    started = time.process_time()
    work()
    return time.process_time() - started


def start_cpu_s(statement: str, checkout: Path) -> float:
    """Measure the CPU seconds of a process that only imports, the second of two (the first may compile)."""
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        subprocess.run([sys.executable, "-c", statement], env=environment, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def our_problem(case: Case) -> Problem:
    """State the case as a problem in the uniform space."""
    gpus = case.tp * case.pp * case.dp
    job = Job(num_gpus=gpus, global_batch_size=case.batch, sequence_length=case.sequence_length)
    return Problem(
        model=load_model(case.ours), hardware=load_hardware("dgx-b200"), job=job, space=Space(kind="uniform")
    )


def our_estimate(case: Case) -> Callable[[], Any]:
    """Return the simulation of the case's plan."""
    layout = Layout(
        tp=case.tp,
        pp=case.pp,
        dp=case.dp,
        global_batch_size=case.batch,
        sequence_parallel=case.tp > 1,
        zero_stage=1,
    )
    problem = our_problem(case)
    plan = uniform_plan(problem, layout, "none")
    return lambda: simulate(problem, plan)


def bulk_s(case: Case) -> tuple[int, float]:
    """Simulate all uniform plans of the case's problem.

    Returns:
        The number of plans and the CPU seconds for each.
    """
    problem = our_problem(case)
    started = time.process_time()
    steps = simulate_many(problem, layout_space(problem).columns)
    plans = steps.step_time_ns.size
    return plans, (time.process_time() - started) / plans


def their_estimate(case: Case, checkout: Path) -> Callable[[], Any]:
    """Return SimuMax's estimate of the case, with its files read."""
    from simumax.core.config import ModelConfig, StrategyConfig, SystemConfig
    from simumax.core.perf_llm import PerfLLM

    configs = checkout / "configs"
    strategy = json.loads((configs / "strategy" / STRATEGY).read_text(encoding="utf-8"))
    strategy |= {"seq_len": case.sequence_length, "micro_batch_num": case.batch // case.dp}
    strategy |= {"world_size": case.tp * case.pp * case.dp, "tp_size": case.tp, "pp_size": case.pp}
    strategy |= {"enable_sequence_parallel": case.tp > 1, "enable_recompute": False}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(strategy))
        file.flush()
        model = PerfLLM()
        model.configure(
            strategy_config=StrategyConfig.init_from_config_file(file.name),
            model_config=ModelConfig.init_from_config_file(str(configs / "models" / f"{case.theirs}.json")),
            system_config=SystemConfig.init_from_config_file(str(configs / "system" / SYSTEM)),
        )
    model.model_config.padded_vocab_size = True
    model.model_config.make_vocab_size_divisible_by = 128

    def estimate() -> None:
        model.run_estimate()
        model.analysis_mem()
        model.analysis_cost()

    return estimate


def measured(case: Case, checkout: Path, rounds: int, starts_s: tuple[float, float]) -> tuple[object, ...]:
    """Time both in turns, each on a fresh model object.

    Args:
        starts_s: CPU seconds of the start of SimuMax and of milpplan.

    Returns:
        The row of the table.
    """
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(rounds):
        ours.append(cpu_s(our_estimate(case)))
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            theirs.append(cpu_s(their_estimate(case, checkout)))
    plans, each_s = bulk_s(case)
    own, other = (statistics.median(times[1:]) for times in (ours, theirs))
    processes = (starts_s[0] + theirs[0], starts_s[1] + ours[0])
    times = (seconds_text(value) for value in (*processes, other, own, each_s))
    ratios = (f"{before / after:,.1f}" for before, after in (processes, (other, own)))
    return case.text(), *times, f"{plans:,}", *ratios, f"{other / each_s:,.0f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="CPU time of an estimate: SimuMax and milpplan.")
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT_PATH", help="a checkout of SimuMax")
    parser.add_argument("--rounds", type=int, default=7, help="estimates of each case (7)")
    options = parser.parse_args(arguments)
    if not (options.checkout / "simumax").is_dir():
        raise SystemExit(f"{options.checkout} is no checkout of SimuMax (github.com/MooreThreads/SimuMax).")
    sys.path.insert(0, str(options.checkout.resolve()))
    logging.disable(logging.CRITICAL)
    checkout = options.checkout.resolve()
    starts_s = (
        start_cpu_s("from simumax.core.perf_llm import PerfLLM", checkout),
        start_cpu_s("from milpplan import load_hardware, load_model, simulate", checkout),
    )
    header = ["case", "SimuMax, a process", "milpplan, a process", "SimuMax, later", "milpplan, later"]
    header += ["milpplan in bulk, a plan", "plans", "ratio of processes", "ratio later", "ratio in bulk"]
    print(markdown_table(header, [measured(case, checkout, options.rounds, starts_s) for case in CASES]))
    print("\n" + ", ".join(f"{name} {value}" for name, value in measured_on().items()))


if __name__ == "__main__":
    main()
