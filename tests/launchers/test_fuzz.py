"""Files of every launcher that somebody broke: each is read or refused in three parts, and no setting is lost."""

from __future__ import annotations

import re
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milpplan import simulate
from milpplan.errors import MilpplanError
from milpplan.launchers import TARGETS, Imported, ImportRequest, target_named
from milpplan.problem import Layout, Problem
from tests.amounts import long_but
from tests.refusals import in_three_parts
from tests.simulation.cases import even_plan, problem_of, shipped_hardware

NEW = "no_such_thing"
UNKNOWN = {
    "megatron": ("--num-layers 32", f"--num-layers 32 --{NEW.replace('_', '-')} 3"),
    "megatron-bridge": ("model.num_layers=32", f"model.num_layers=32\n    model.{NEW}=3"),
    "torchtitan": ("training=TrainingConfig(", f"training=TrainingConfig({NEW}=3, "),
    "nanotron": ("parallelism:\n", f"parallelism:\n  {NEW}: 3\n"),
    "deepspeed": ('"zero_optimization": {', f'"zero_optimization": {{"{NEW}": 3,'),
    "accelerate": ("  fsdp_version: 2\n", f"  fsdp_version: 2\n  fsdp_{NEW}: 3\n"),
    "automodel": ("  dp_size: 8\n", f"  dp_size: 8\n  {NEW}: 3\n"),
    "slime": ("--num-layers 32", f"--num-layers 32 --{NEW.replace('_', '-')} 3"),
    "ms-swift": ("--max_length 8192", f"--max_length 8192 --{NEW} 3"),
    "trl": ("  fsdp_version: 2\n", f"  fsdp_version: 2\n  fsdp_{NEW}: 3\n"),
    "llama-factory": ("--stage sft", f"--stage sft --{NEW} 3"),
    "axolotl": ("fsdp_version: 2\n", f"fsdp_version: 2\n{NEW}: 3\n"),
    "verl": ("trainer.logger", f"actor_rollout_ref.actor.{NEW}=3\n    trainer.logger"),
}
"""Where a launcher's file takes a setting that it does not have: what stands there, and what stands there then."""
NAMES_ITS_MODEL = ("accelerate", "automodel", "ms-swift", "verl", "trl", "llama-factory", "axolotl")
"""Launchers whose files only name the model."""
JUNK = [
    "",
    "0",
    "-1",
    "7",
    "1e9",
    "9" * 30,
    "null",
    "true",
    "nan",
    "x",
    '"',
    "{",
    "]",
    ": :",
    "\n",
    "$X",
    "\x00",
    "é",
]
ZERO = {"nanotron": 0, "slime": 1, "verl": 1}
"""The ZeRO stage of a launcher's file, where it is not 3."""
WORD = re.compile(r"[A-Za-z0-9_.\-]+|[^\sA-Za-z0-9_.\-]")


@cache
def file_of(name: str) -> tuple[Problem, str, str]:
    """A plain plan of eight GPUs in the words of a launcher: the problem, the file's name and its text."""
    problem = problem_of("llama3-8b", "dgx-h100", num_gpus=8, global_batch_size=16)
    zero = ZERO.get(name, 3)
    layout = Layout(
        dp=8, global_batch_size=16, zero_stage=zero, overlap_grad_reduce=True, overlap_param_gather=zero > 0
    )
    target = TARGETS[name]
    launch = target.export(problem, even_plan(problem, layout), target.capability.versions[0])
    file, text = next(iter(target.files(launch, "0").items()))
    return problem, file, text


def read(name: str, text: str) -> Imported | MilpplanError:
    """The plan of a text, or why there is none, said in three parts."""
    problem, file, _ = file_of(name)
    # Files of these only name their model.
    model = problem.model if name in NAMES_ITS_MODEL else None
    try:
        request = ImportRequest(text, file, shipped_hardware("dgx-h100"), model=model)
        return target_named(name, "--from").read(request)
    except MilpplanError as refusal:
        error = refusal
    in_three_parts(error)
    return error


def test_every_launcher_is_here() -> None:
    """A new launcher needs its line above."""
    assert set(UNKNOWN) == set(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_the_plain_file_is_read(name: str) -> None:
    """What is broken below is whole here: no unknown settings, and the plan it was made from."""
    found = read(name, file_of(name)[2])
    assert isinstance(found, Imported)
    assert found.unknown_flags == ()
    assert (found.plan.layout.dp, found.plan.layout.zero_stage) == (8, ZERO.get(name, 3))


@pytest.mark.parametrize("name", TARGETS)
def test_an_unknown_setting_is_named(name: str) -> None:
    """A setting that the launcher does not have is listed among the unknown ones, or refused by name."""
    old, new = UNKNOWN[name]
    text = file_of(name)[2]
    assert old in text
    found = read(name, text.replace(old, new, 1))
    told = str(found) if isinstance(found, MilpplanError) else " ".join(found.unknown_flags)
    assert NEW in told.replace("-", "_")


@pytest.mark.parametrize("examples", long_but((10,), (10, 100)))
@pytest.mark.parametrize("name", TARGETS)
def test_broken_files_are_read_or_refused(name: str, examples: int) -> None:
    """Words replaced or lost, lines left out, the end cut off: a plan that can be simulated, or a message."""
    text = file_of(name)[2]
    words = [found.span() for found in WORD.finditer(text)]
    junk_words = st.sampled_from(JUNK) | st.text(max_size=6)
    change = st.tuples(st.sampled_from(words), junk_words, st.sampled_from(["word", "line"]))

    @settings(max_examples=examples, deadline=None)
    @given(st.lists(change, min_size=1, max_size=3), st.none() | st.integers(0, len(text)))
    def check(changes: list[tuple[tuple[int, int], str, str]], end: int | None) -> None:
        broken = text
        for (first, last), junk, what in sorted(changes, reverse=True):
            if what == "line":
                first, last = text.rfind("\n", 0, first) + 1, text.find("\n", last)
                broken = broken[:first] + broken[max(first, last) :]
            else:
                broken = broken[:first] + junk + broken[last:]
        found = read(name, broken[:end])
        if isinstance(found, Imported):
            assert simulate(found.problem, found.plan).step_time_s > 0

    check()
