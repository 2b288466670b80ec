"""The plans that are given to the launchers' own code: the best of ten jobs, and others drawn at random.

Every plan is exported, read back and simulated again before a launcher sees its files; ``started`` runs the script
that starts it, with a stand-in for the program at its end, and says what that program is told.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.launchers import PAIRS, problem_of, same_plan
from milpplan import Job, Layout, Plan, Problem, Recompute, VirtualStage, load_hardware, simulate, solve
from milpplan.errors import IllegalPlanError
from milpplan.launchers import TARGETS, ConfigLaunch, ImportRequest, Launch, restrict
from milpplan.launchers.deepspeed.launcher import config_of
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem.huggingface import model_from_config
from tests.launchers.cases import as_run
from tests.launchers.test_targets import drawn_plan

TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS = Path(__file__).parents[1] / "data" / "hf_configs"
HUB_NAMES = {
    "llama2-7b": "Llama-2-7b-hf", "llama2-13b": "Llama-2-13b-hf", "llama2-70b": "Llama-2-70b-hf",
    "llama3-8b": "Meta-Llama-3-8B", "llama3-70b": "Meta-Llama-3-70B", "mistral-7b": "Mistral-7B-v0.1",
    "mixtral-8x7b": "Mixtral-8x7B-v0.1", "qwen3-32b": "Qwen3-32B", "qwen3-30b-a3b": "Qwen3-30B-A3B-Base",
}  # fmt: skip
"""The models of the ten jobs, as the hub names their checkpoints; some launchers ask for the name."""
RECORDER = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open(os.environ['STARTED'], 'w'))"


@dataclass(frozen=True, slots=True)
class Case:
    """A plan, its launch, and its files by name."""

    title: str
    problem: Problem
    plan: Plan
    launch: Launch | ConfigLaunch
    files: dict[str, str]

    def written(self, folder: Path) -> Path:
        """The files in a folder of their own; its path."""
        place = folder / re.sub(r"\W+", "-", self.title)
        place.mkdir(parents=True)
        for name, text in self.files.items():
            (place / name).write_text(text, encoding="utf-8")
        return place


@cache
def best_cases(target: str, version: str) -> tuple[Case, ...]:
    """The best plan that a version of a launcher can run of each of the ten jobs that it can run at all."""
    found = []
    for model, hardware, gpus, batch in PAIRS:
        try:
            problem = restrict(problem_of(model, hardware, gpus, batch, "uniform"), target, version)
        except IllegalPlanError:
            # A model that it cannot build; benchmarks/launchers.py and docs/launchers.md say which and why.
            continue
        result = solve(problem, time_limit_s=60.0)
        assert result.plan is not None
        found.append(exported_case(f"{model} on {gpus} x {hardware}", target, version, problem, result.plan))
    return tuple(found)


@cache
def drawn_cases(target: str, version: str, each: int) -> tuple[Case, ...]:
    """Plans drawn from the spaces of the ten jobs, up to ``each`` of every one, whether they fit or not."""
    random = np.random.default_rng(15)
    found = []
    for case in best_cases(target, version):
        space = layout_space(case.problem)
        rows = random.choice(len(space), min(each, len(space)), replace=False).tolist()
        for row in rows:
            plan = drawn_plan(random, case.problem, space.at(row))
            title = f"{case.title}, layout {row}"
            found.append(exported_case(title, target, version, case.problem, plan))
    return tuple(found)


def all_cases(target: str, version: str, each: int = 5) -> tuple[Case, ...]:
    """The best and the drawn ones."""
    return (*best_cases(target, version), *drawn_cases(target, version, each))


@cache
def aligned_cases(target: str, version: str, method: str, reference: str) -> tuple[Case, ...]:
    """The best plan of Llama 3 8B on 16 GPUs that trains so, and three that are drawn."""
    asked = problem_of("llama3-8b", "dgx-h100", 16, 64, "uniform")
    job = Job.model_validate(asked.job.model_dump() | {"alignment": {"method": method, "reference": reference}})
    problem = restrict(asked.model_copy(update={"job": job}), target, version)
    best = solve(problem, time_limit_s=60.0).plan
    assert best is not None
    random, space = np.random.default_rng(16), layout_space(problem)
    rows = random.choice(len(space), 3, replace=False).tolist()
    plans = [best, *(drawn_plan(random, problem, space.at(row)) for row in rows)]
    return tuple(
        exported_case(f"{method} {reference} {number}", target, version, problem, plan)
        for number, plan in enumerate(plans)
    )


def exported_case(title: str, target: str, version: str, problem: Problem, plan: Plan) -> Case:
    """A plan with its files, which say the same plan again, with the same step where they say how it trains."""
    known = TARGETS[target]
    launch = known.export(problem, plan, version)
    files = known.files(launch, "0")
    name, text = next(iter(files.items()))
    back = known.read(ImportRequest(text, name, problem.hardware, model=problem.model))
    run = as_run(problem, plan, target)
    assert same_plan(problem, back.plan, run), title
    if back.problem.job.alignment == problem.job.alignment:
        assert simulate(back.problem, back.plan).step_time_ns == simulate(problem, run).step_time_ns, title
    return Case(title, problem, plan, launch, files)


def checkpoint(case: Case, folder: Path) -> Path:
    """A checkpoint without weights: the published config of a case's model, or that of its family and sizes."""
    name = case.problem.model.name
    place, published = folder / HUB_NAMES[name], CONFIGS / f"{name}.json"
    config = {"architectures": ["LlamaForCausalLM"], "rope_theta": 10000.0, "rms_norm_eps": 1e-6}
    config |= (
        json.loads(published.read_text(encoding="utf-8")) if published.exists() else config_of(case.problem.model)
    )
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return place


def started(place: Path, script: str, program: str, **variables: str) -> tuple[list[str], dict[str, str]]:
    """What a script tells the program that it starts, and in which environment.

    Bash runs the script in its folder; ``program`` is a stand-in that writes down its words and variables.
    """
    seat, said = place / "bin", place / "started.json"
    seat.mkdir(exist_ok=True)
    stand_in = seat / program
    stand_in.write_text(f"#!{sys.executable}\n{RECORDER}\n", encoding="utf-8")
    stand_in.chmod(0o755)
    environment = os.environ | {"PATH": f"{seat}:{os.environ['PATH']}", "STARTED": str(said)} | variables
    environment.pop("PYTHONPATH", None)
    subprocess.run(["bash", script], cwd=place, env=environment, check=True, capture_output=True, timeout=60)
    words, seen = json.loads(said.read_text(encoding="utf-8"))
    return words, seen


TORCHRUN = ("torchrun", "torch.distributed.run")
STARTER = """import runpy, sys
at = next(index for index, word in enumerate(sys.argv) if index and word.endswith(".py"))
sys.argv.insert(at, {watcher!r})
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""


def stepped(place: Path, script: str, program: tuple[str, str], watcher: str, **variables: str) -> list[Any]:
    """What each of two processes on this CPU says after its first step: the lines ``STEPPED {...}`` it prints.

    Bash runs the script in its folder with the launcher's own ``program`` (its command and its module), which
    starts ``watcher`` with the training program and its words; the watcher runs that program as it is.
    """
    seat, watching = place / "bin", place / "watcher.py"
    seat.mkdir(exist_ok=True)
    command = seat / program[0]
    text = STARTER.format(watcher=str(watching), module=program[1])
    command.write_text(f"#!{sys.executable}\n{text}", encoding="utf-8")
    command.chmod(0o755)
    watching.write_text(watcher, encoding="utf-8")
    environment = os.environ | {"PATH": f"{seat}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"} | variables
    pipe = subprocess.PIPE
    # A group of its own, which ends whole: a trainer that is left behind keeps the port of the next test.
    with subprocess.Popen(
        ["bash", script], cwd=place, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=300)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    said = [json.loads(line[8:]) for line in output.splitlines() if line.startswith("STEPPED ")]
    assert len(said) == 2, output[-2000:] + errors[-4000:]
    return said


def tiny_case(target: str, version: str, layout: Layout, full: bool = True, **job: Any) -> Case:
    """A plan for a Llama of two small layers on two GPUs, with its files."""
    model = model_from_config(TINY, "tiny-llama")
    hardware = load_hardware("dgx-h100")
    sizes = {"num_gpus": 2, "global_batch_size": layout.global_batch_size, "sequence_length": 32}
    problem = restrict(Problem(model=model, hardware=hardware, job=Job(**sizes, **job)), target, version)
    stage = VirtualStage(layers=(0, 2), recompute=Recompute(full=2 * full))
    plan = Plan(layout=layout, virtual_stages=(stage,))
    return exported_case(f"tiny zero {layout.zero_stage}", target, version, problem, plan)


def all_full(case: Case) -> bool:
    """Whether every layer of a plan is recomputed fully."""
    return sum(stage.recompute.full for stage in case.plan.virtual_stages) == case.problem.model.num_layers


def differing(expected: dict[str, Any], found: Any) -> dict[str, tuple[Any, Any]]:
    """The names whose value in ``found`` (a record or a mapping) is another: expected, found."""
    read = found.get if isinstance(found, dict) else lambda name: getattr(found, name)
    pairs = {name: (value, read(name)) for name, value in expected.items()}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def torchrun_words(case: Case, place: Path, script: str) -> tuple[Any, dict[str, str]]:
    """What PyTorch's own parser of ``torchrun`` reads in the words that a script gives it, and the variables.

    The nodes and the processes on each are the plan's.
    """
    from torch.distributed.run import get_args_parser

    words, variables = started(place, script, "torchrun")
    read = get_args_parser().parse_args(words)
    assert int(read.nnodes) == case.launch.num_nodes, case.title
    assert int(read.nproc_per_node) * int(read.nnodes) == case.plan.layout.num_gpus, case.title
    return read, variables


def layers_of(case: Case) -> list[int]:
    """How many layers every virtual stage of a plan has."""
    return [stage.num_layers for stage in case.plan.virtual_stages]
