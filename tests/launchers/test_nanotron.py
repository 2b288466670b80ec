"""nanotron's YAML gives the plan back, or the export gives all the reasons why not."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from milpplan import Layout, Plan, Problem, simulate
from milpplan.errors import IllegalPlanError, InvalidInputError, MilpplanError
from milpplan.launchers import Imported, ImportRequest
from milpplan.launchers.nanotron.launcher import (
    LAUNCHER,
    RULES,
    imported,
    known,
    scalar,
    stage_sizes,
)
from tests.launchers.cases import legal_layout
from tests.launchers.torchtitan_cases import staged
from tests.simulation.cases import even_plan, problem_of, random_plan, random_problem, shipped_hardware

DATA = Path(__file__).parents[1] / "data" / "launchers"
VERSION = "2411b022"


def round_trip(problem: Problem, plan: Plan, **more: Any) -> tuple[dict[str, str], Imported]:
    """The files of a plan, and what is read back from the YAML."""
    files = LAUNCHER.files(LAUNCHER.export(problem, plan, VERSION), "0")
    return files, imported(ImportRequest(files["nanotron.yaml"], "nanotron.yaml", problem.hardware, **more))


def random_case(seed: int) -> tuple[Problem, Plan]:
    """A plan that nanotron runs: its own stages, ZeRO 0 or 1."""
    random = np.random.default_rng(seed)
    model = str(random.choice(["llama3-8b", "llama2-7b", "llama2-70b", "llama3-405b"]))
    problem = problem_of(model, "dgx-h100", sequence_length=int(random.choice([1024, 4096])))
    tp, pp, dp = (int(random.choice([1, 2, 4])) for _ in range(3))
    parallel = tp > 1 and bool(random.integers(2))
    count, size = pp * int(random.integers(1, 5)), int(random.choice([1, 2]))
    layout = {
        "tp": tp, "pp": pp, "dp": dp, "micro_batch_size": size, "global_batch_size": size * count * dp,
        "sequence_parallel": parallel, "gather_again": not parallel or bool(random.integers(2)),
        "zero_stage": int(dp > 1 and random.integers(2)), "overlap_grad_reduce": dp > 1,
        "schedule": str(random.choice(["1f1b", "gpipe"])) if pp > 1 else "1f1b",
    }  # fmt: skip
    sizes = list(stage_sizes(problem.model, pp))
    return problem, staged(Layout.model_validate(layout), sizes, bool(random.integers(2)))


def llama() -> tuple[Problem, Plan]:
    """A pipeline with nanotron's stages, ZeRO 1, sequence parallelism."""
    problem = problem_of("llama3-8b", "dgx-h100", num_gpus=32, global_batch_size=256)
    layout = Layout(
        tp=4, pp=2, dp=4, global_batch_size=256, sequence_parallel=True, zero_stage=1, overlap_grad_reduce=True
    )
    return problem, staged(layout, [18, 14], True)


@pytest.mark.parametrize("seed", range(16))
def test_random_plans_come_back(seed: int) -> None:
    """Whatever the model, degrees, recomputation and sharding: plan and problem are the same."""
    problem, plan = random_case(seed)
    files, found = round_trip(problem, plan, model=problem.model)
    assert found.plan == plan
    assert found.problem.model == problem.model
    assert found.unknown_flags == ()
    assert set(LAUNCHER.export(problem, plan, VERSION).settings) <= set(known())
    assert yaml.safe_load(files["nanotron.yaml"])["optimizer"]["optimizer_factory"]["adam_eps"] == 1e-8


def test_golden_files(tmp_path: Path) -> None:
    """The named plan gives the files that nanotron's own parser was shown, and costs the same when it is back; the
    scripts are bash."""
    problem, plan = llama()
    files, found = round_trip(problem, plan, model=problem.model)
    for file, text in files.items():
        assert text == (DATA / f"llama3-8b.{file.replace('.', '-')}").read_text()
        if not file.endswith(".yaml"):
            (tmp_path / file).write_text(text)
            assert subprocess.run(["bash", "-n", str(tmp_path / file)], check=False).returncode == 0
    assert (found.problem, found.plan) == (problem, plan)
    assert simulate(found.problem, found.plan).step_time_ns == simulate(problem, plan).step_time_ns


def test_stages_are_nanotrons() -> None:
    """Llama 3 8B on two ranks: a layer costs 4 * 4096^2 + 3 * 14336 * 4096 = 243.3 M, the head 525.3 M, half of
    all is 4,155 M: the rank is left after 18 layers (4,379 M). With a head as dear as all 32 layers, a quarter is
    16 layers: the first of four ranks takes 17, the second the rest and the head, and two are empty."""
    problem, _ = llama()
    assert stage_sizes(problem.model, 2) == (18, 14)
    assert stage_sizes(problem.model, 1) == (32,)
    assert sum(stage_sizes(problem.model, 8)) == 32
    assert stage_sizes(problem.model.model_copy(update={"vocab_size": 32 * 59392}), 4) == ()


def test_any_plan_comes_back_or_is_refused() -> None:
    """Plans of the whole space are never turned into others."""
    random, refused = np.random.default_rng(3), 0
    for _ in range(30):
        problem = random_problem(random)
        plan = random_plan(random, problem, legal_layout(random, problem))
        try:
            _, found = round_trip(problem, plan)
        except IllegalPlanError:
            refused += 1
        else:
            assert found.plan == plan
    assert refused > 20


def test_all_reasons_come_together_with_the_way_out() -> None:
    """Stages, ZeRO 3, interleaving and bf16 gradients: one message, one --fix."""
    problem = problem_of("llama3-8b", "dgx-h100", grad_dtype="bf16")
    layout = Layout(
        pp=2, dp=4, vpp=2, global_batch_size=32, zero_stage=3, schedule="interleaved", overlap_grad_reduce=True,
        overlap_param_gather=True,
    )  # fmt: skip
    with pytest.raises(IllegalPlanError) as caught:
        LAUNCHER.export(problem, even_plan(problem, layout), VERSION)
    for word in ("bf16", "vpp=2", "schedule=interleaved", "zero_stage=3", "overlap_param_gather=true"):
        assert word in caught.value.seen
    assert caught.value.do.startswith("Solve again with --fix ")


def test_even_stages_are_refused_with_the_ones_that_would_be() -> None:
    """16 and 16 layers are no run of nanotron, which would take 18 and 14."""
    problem, plan = llama()
    with pytest.raises(IllegalPlanError, match="18, 14") as caught:
        LAUNCHER.export(problem, even_plan(problem, plan.layout, full=16), VERSION)
    assert "pp=1" in caught.value.do


@pytest.mark.parametrize(
    ("model", "word"),
    [("mixtral-8x7b", "experts"), ("gemma-7b", "heads of 256"), ("qwen3-32b", "norms of queries"),
     ("gpt3-175b", "learned positions")],
)  # fmt: skip
def test_other_models_are_refused(model: str, word: str) -> None:
    """What its two model classes lack."""
    problem = problem_of(model, "dgx-h100")
    with pytest.raises(IllegalPlanError, match=word):
        LAUNCHER.export(problem, even_plan(problem, Layout(dp=8, global_batch_size=8)), VERSION)


BREAKS: dict[str, dict[str, Any]] = {
    "heads_divide": {"tp": 3},
    "key_value_heads_divide": {"tp": 16},
    "widths_divide": {"tp": 3},
    "micro_batches": {"pp": 8, "global_batch_size": 4},
    "sequence_divides": {"tp": 3, "sequence_parallel": True},
}


@pytest.mark.parametrize("name", RULES)
def test_every_rule_refuses_something(name: str) -> None:
    """A layout that keeps all rules breaks this one after one change."""
    problem, plan = llama()
    _, check = RULES[name]
    assert check(problem.model, plan.layout, 4096) == ""
    changed = Layout.model_validate(plan.layout.model_dump() | BREAKS[name])
    assert check(problem.model, changed, 4096) != ""


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("dp: 4", "dp: four", "whole number"),
        ("dp: 4", "dp: 0", "above zero"),
        ('pp_engine: "1f1b"', "pp_engine: zigzag", "zigzag"),
        ("context_parallel_size: 1", "context_parallel_size: 2", "context_parallel_size is 2"),
        ("accumulate_grad_in_fp32: true", "accumulate_grad_in_fp32: false", "accumulate_grad_in_fp32"),
        ("tp_linear_async_communication: false", "tp_linear_async_communication: true", "tp_linear_async"),
        ("  model_config:", "  model_config:\n    moe_config: {num_experts: 8}", "moe_config"),
        ("hidden_size: 4096", "hidden_size: 8192", "another model"),
        ("parallelism:", "parallelism: [", "YAML"),
        ("pp: 2", "pp: 32", "the head"),
        ("tp: 4", "tp: 16", "heads_divide"),
        ("pp: 2", "pp: 1000000000", "the head"),
        ("general:", "x: &x\n  y: *x\ngeneral:", "nest"),
    ],
)
def test_bad_files_are_refused(old: str, new: str, word: str) -> None:
    """Whatever contradicts itself, is not priced, or is no such file."""
    problem, plan = llama()
    files, _ = round_trip(problem, plan)
    with pytest.raises(MilpplanError, match=word) as caught:
        imported(
            ImportRequest(
                files["nanotron.yaml"].replace(old, new, 1), "x.yaml", problem.hardware, model=problem.model
            )
        )
    assert caught.value.do


def test_any_setting_can_be_ignored_and_is_told() -> None:
    """A name that nanotron does not have and asynchronous products are refused, unless they are ignored."""
    problem, plan = llama()
    text = round_trip(problem, plan)[0]["nanotron.yaml"]
    text = text.replace(
        "tp_linear_async_communication: false", "tp_linear_async_communication: true\n  no_such: 1"
    )
    names = ["parallelism.tp_linear_async_communication", "parallelism.no_such"]
    for name, other in (names, names[::-1]):
        with pytest.raises(InvalidInputError, match=other):
            imported(ImportRequest(text, "x.yaml", problem.hardware, ignored=[name]))
    found = imported(ImportRequest(text, "x.yaml", problem.hardware, ignored=names))
    assert found.unknown_flags == ()
    assert found.ignored_flags == (f"{names[0]} = True", f"{names[1]} = 1")
    with pytest.raises(InvalidInputError, match="32 processes, and 8"):
        imported(ImportRequest(text, "x.yaml", shipped_hardware("dgx-h100"), num_gpus=8, ignored=names))


MAMBA = """
general: {project: x, run: x, seed: 1}
parallelism: {dp: 2, pp: 2, tp: 2, pp_engine: 1f1b, tp_mode: ALL_REDUCE, tp_linear_async_communication: false,
  expert_parallel_size: 1}
model:
  dtype: bfloat16
  make_vocab_size_divisible_by: 1
  model_config: {d_model: 1536, is_mamba_config: true, num_hidden_layers: 48, vocab_size: 50277}
optimizer: {zero_stage: 0, accumulate_grad_in_fp32: true, clip_grad: 1.0}
tokens: {sequence_length: 2048, micro_batch_size: 2, batch_accumulation_per_replica: 1, train_steps: 10}
"""
"""In the manner of nanotron's examples/mamba."""


def test_another_class_of_models_is_refused_by_name() -> None:
    """A Mamba is no Llama of default sizes; when its keys are ignored, the sizes are missing."""
    with pytest.raises(InvalidInputError, match=r"d_model, model\.model_config\.is_mamba_config"):
        imported(ImportRequest(MAMBA, "x.yaml", shipped_hardware("dgx-h100")))
    names = ["model.model_config.d_model", "model.model_config.is_mamba_config"]
    with pytest.raises(InvalidInputError, match="neither is_llama_config nor"):
        imported(ImportRequest(MAMBA, "x.yaml", shipped_hardware("dgx-h100"), ignored=names))
    llama_like = MAMBA.replace("is_mamba_config", "is_llama_config")
    with pytest.raises(InvalidInputError, match=r"does not say .*num_attention_heads"):
        imported(ImportRequest(llama_like, "x.yaml", shipped_hardware("dgx-h100"), ignored=names[:1]))


@pytest.mark.parametrize(
    "name",
    ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers",
     "vocab_size", "sequence_length", "micro_batch_size", "batch_accumulation_per_replica"],
)  # fmt: skip
def test_no_default_stands_in_for_a_size(name: str) -> None:
    """A file without one of the sizes is refused, with its name."""
    problem, plan = llama()
    lines = round_trip(problem, plan)[0]["nanotron.yaml"].splitlines()
    kept = [line for line in lines if not line.strip().startswith(f"{name}:")]
    assert len(kept) == len(lines) - 1
    with pytest.raises(InvalidInputError, match=f"does not say .*{name}"):
        imported(ImportRequest("\n".join(kept), "x.yaml", problem.hardware))


@pytest.mark.parametrize("value", [1e-8, 0.5, 3e-4, 1e22, True, None, 7, "yes", "a b", "1f1b", "x: y", "", "-"])
def test_scalars_are_yaml(value: object) -> None:
    """Every value is read back as it is by a parser of YAML 1.1."""
    assert yaml.safe_load(f"x: {scalar(value)}")["x"] == value


def test_older_names_of_what_costs_nothing_are_read() -> None:
    """Before the factory of optimizers its numbers stood beside it, and before stages of data there was one."""
    problem, plan = llama()
    files, _ = round_trip(problem, plan)
    old = "data:\n  seed: 1\n  dataset:\n    text_column_name: text\n"
    text = files["nanotron.yaml"].replace("optimizer:\n", "optimizer:\n  adam_beta1: 0.9\n", 1) + old
    found = imported(ImportRequest(text, "x.yaml", problem.hardware, model=problem.model))
    assert found.plan == plan
