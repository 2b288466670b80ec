"""torchtitan's files give the plan back, in its three dialects, or the export gives all the reasons why not."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from milpplan import Layout, simulate, solve
from milpplan.errors import IllegalPlanError, InvalidInputError, MilpplanError
from milpplan.launchers import ImportRequest, restrict, run_by
from milpplan.launchers.torchtitan.run import NEWEST, RULES, V022, V030, Run, flavors
from milpplan.launchers.torchtitan.settings import known
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem import Space
from milpplan.simulation.bulk.simulate_many import uniform_plan
from milpplan.simulation.layers import total_parameters
from tests.launchers.cases import legal_layout
from tests.launchers.torchtitan_cases import (
    NAMED,
    TORCHTITAN,
    VERSIONS,
    qwen_sharded,
    random_case,
    round_trip,
    staged,
)
from tests.simulation.cases import even_plan, problem_of, random_plan, random_problem, shipped_hardware

DATA = Path(__file__).parents[1] / "data" / "launchers"
COUNTS = {
    ("llama3", "8B"): 8030261248,
    ("llama3", "70B"): 70553706496,
    ("llama3", "405B"): 405853388800,
    ("qwen3", "0.6B"): 596049920,
    ("qwen3", "1.7B"): 1720574976,
    ("qwen3", "4B"): 4022468096,
    ("qwen3", "8B"): 8190735360,
    ("qwen3", "14B"): 14768307200,
    ("qwen3", "32B"): 32762123264,
    ("qwen3", "30B-A3B"): 30532122624,
    ("qwen3", "235B-A22B"): 235093634560,
    ("deepseek_v3", "16B"): 15706484224,
    ("deepseek_v3", "236B"): 235741434880,
    ("deepseek_v3", "671B"): 671026404352,
    ("gpt_oss", "20b"): 20914757184,
    ("gpt_oss", "120b"): 116829156672,
}
"""Parameters that torchtitan's own classes have on the meta device (0.3.0 and b5bcd76c, which agree)."""

FOREIGN = """
[job]
dump_folder = "./outputs"
[metrics]
log_freq = 10
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0
[parallelism]
data_parallel_shard_degree = -1
[checkpoint]
enable = false
[activation_checkpoint]
mode = "full"
[compile]
enable = false
"""
"""A file that nobody here wrote, in the manner of train_configs/llama3_8b.toml."""


def read(text: str, source: str = "run.toml", **more: object) -> object:
    """What an import makes of a text."""
    return TORCHTITAN.read(ImportRequest(text, source, shipped_hardware("dgx-h100"), **more))  # type: ignore[arg-type]


def test_flavors_have_the_parameters_of_torchtitan() -> None:
    """Every model known by name and flavor has as many parameters as torchtitan builds."""
    assert {pair: total_parameters(spec) for pair, spec in flavors().items()} == COUNTS


@pytest.mark.parametrize("seed", range(24))
def test_random_plans_come_back(seed: int) -> None:
    """Whatever the model, stages, recomputation, sharding and dialect: plan and cost are the same."""
    problem, plan, version = random_case(seed)
    files, found = round_trip(problem, plan, version, model=problem.model)
    assert found.plan == plan
    assert found.problem.model == problem.model
    assert found.problem.hardware == run_by("torchtitan", version, problem).hardware
    assert found.unknown_flags == ()
    names = {*known(version), "optimizer.name", "optimizer.lr", "lr_scheduler.warmup_steps"}
    assert set(TORCHTITAN.export(problem, plan, version).settings) <= names
    config, text = next(iter(files.items()))
    assert tomllib.loads(text) if config.endswith(".toml") else ast.parse(text)


@pytest.mark.parametrize("name", NAMED)
def test_golden_files(name: str) -> None:
    """The named plans give the files that torchtitan's own parser was shown; when they are back they cost the
    same."""
    build, version = NAMED[name]
    problem, plan = build()
    files, found = round_trip(problem, plan, version, model=problem.model)
    for file, text in files.items():
        assert text == (DATA / f"{name}.titan-{file.rpartition('.')[2]}").read_text()
    assert (found.problem, found.plan) == (run_by("torchtitan", version, problem), plan)
    assert simulate(found.problem, found.plan).step_time_ns == simulate(problem, plan).step_time_ns


def test_scripts_are_bash(tmp_path: Path) -> None:
    """Both scripts parse, and name the configuration that lies beside them."""
    problem, plan = qwen_sharded()
    files, _ = round_trip(problem, plan, V030)
    for name, text in files.items():
        if name.endswith(".py"):
            continue
        (tmp_path / name).write_text(text)
        assert subprocess.run(["bash", "-n", str(tmp_path / name)], check=False).returncode == 0
    assert "--module torchtitan_plan --config plan" in files["torchtitan.sh"]


def test_any_plan_comes_back_or_is_refused() -> None:
    """Plans of the whole space are never turned into others; a refusal counts its reasons."""
    random, refused, counted = np.random.default_rng(3), 0, True
    for index in range(40):
        problem = random_problem(random)
        plan = random_plan(random, problem, legal_layout(random, problem))
        try:
            _, found = round_trip(problem, plan, VERSIONS[index % 3])
        except IllegalPlanError as error:
            refused += 1
            counted &= f"for {error.seen.count('; (') + 1} reason(s)" in error.seen
        else:
            assert found.plan == plan
    assert refused > 20
    assert counted


def test_all_reasons_come_together_with_the_way_out() -> None:
    """ZeRO 1 beside replicas, ring-parallel context, gathering again, fp8: one message, one --fix."""
    problem = problem_of("llama3-8b", "dgx-h100", precision="fp8")
    layout = Layout(
        tp=2, cp=2, dp=2, global_batch_size=8, sequence_parallel=True, zero_stage=1, overlap_grad_reduce=True
    )
    with pytest.raises(IllegalPlanError) as caught:
        TORCHTITAN.export(problem, even_plan(problem, layout), NEWEST)
    for word in ("fp8", "cp=2", "zero_stage=1", "gather_again=true", "overlap_param_gather=false"):
        assert word in caught.value.seen
    for fix in ("cp=1", "gather_again=false"):
        assert fix in caught.value.do


def test_the_way_out_of_a_refusal_is_expressible() -> None:
    """What the refusal of a pipeline's overlapped reduction proposes is admitted."""
    problem = problem_of("llama3-8b", "dgx-h100")
    layout = Layout(pp=2, dp=4, global_batch_size=32, zero_stage=1, overlap_grad_reduce=True)
    with pytest.raises(IllegalPlanError, match="overlap_grad_reduce=true") as caught:
        TORCHTITAN.export(problem, even_plan(problem, layout), V030)
    assert caught.value.do == "Solve again with --fix overlap_grad_reduce=false."
    fixed = Layout.model_validate(layout.model_dump() | {"overlap_grad_reduce": False})
    settings = TORCHTITAN.export(problem, even_plan(problem, fixed), V030).settings
    assert settings["parallelism.data_parallel_shard_degree"] == 4


def test_a_model_without_a_flavor_is_refused() -> None:
    """torchtitan builds models that it knows by name."""
    problem = problem_of("mistral-7b", "dgx-h100")
    plan = even_plan(problem, Layout(dp=8, global_batch_size=8, zero_stage=3, overlap_grad_reduce=True,
                                     overlap_param_gather=True))  # fmt: skip
    with pytest.raises(IllegalPlanError, match="mistral-7b is none of its own"):
        TORCHTITAN.export(problem, plan, NEWEST)


RUN = Run(
    version=V022, flavor=("deepseek_v3", "671B"), experts=True, sequence_length=4096, replicate=1, shard=8, cp=1,
    tp=2, pp=2, ep=4, etp=2, sequence_parallel=True, schedule="1F1B", stages=(31, 30), micro_batch_size=1,
    micro_batches=4, accumulations=1, reshard="never", recompute=False, deduplicated=False,
)  # fmt: skip
BREAKS = {
    "experts_divide": {"etp": 4},
    "sequence_divides": {"sequence_length": 4095},
    "heads_divide": {"tp": 3},
    "widths_divide": {"ep": 5},
    "stages": {"stages": (31, 29)},
    "micro_batches": {"micro_batches": 1},
    "mixed_precision_needs_fsdp": {"shard": 1},
    "replicas_stand_alone": {"shard": 1, "replicate": 8},
    "model_has_pipeline": {"flavor": ("gpt_oss", "120b"), "stages": (18, 18)},
    "deepep_has_the_model": {"deduplicated": True},
    "kept_products_are_priced": {"recompute": "selective"},
    "flex_attention_is_not_split": {"cp": 2},
}


@pytest.mark.parametrize("name", RULES)
def test_every_rule_refuses_something(name: str) -> None:
    """A run that keeps all rules breaks this one after one change."""
    _, check = RULES[name]
    assert check(RUN) == ""
    assert check(replace(RUN, **BREAKS[name])) != ""  # type: ignore[arg-type]


def test_somebody_elses_file_is_read() -> None:
    """Leftover ranks shard, ``default`` reshards, one micro-batch a step: ZeRO 3 with everything recomputed."""
    found = read(FOREIGN, num_gpus=64)
    layout = found.plan.layout  # type: ignore[attr-defined]
    assert (layout.dp, layout.zero_stage, layout.global_batch_size) == (64, 3, 64)
    assert found.plan.virtual_stages[0].recompute.full == 32  # type: ignore[attr-defined]
    assert any("torch.compile" in note for note in found.notes)  # type: ignore[attr-defined]


def test_weights_that_never_reshard_are_kept() -> None:
    """``never`` with four micro-batches a step is ZeRO 3 that keeps weights until the backward, and with one ZeRO
    2, to which a plan that keeps them is refused."""
    text = FOREIGN.replace("[checkpoint]", 'fsdp_reshard_after_forward = "never"\n[checkpoint]')
    several = text.replace("local_batch_size = 1", "local_batch_size = 1\nglobal_batch_size = 256")
    layouts = [read(one, num_gpus=64).plan.layout for one in (text, several)]  # type: ignore[attr-defined]
    found = [(layout.num_micro_batches, layout.zero_stage, layout.keep_weights) for layout in layouts]
    assert found == [(1, 2, False), (4, 3, True)]
    problem = problem_of("llama3-8b", "dgx-h100", num_gpus=64, global_batch_size=64)
    kept = layouts[1].model_copy(update={"global_batch_size": 64})
    with pytest.raises(IllegalPlanError, match="ZeRO 2 with one micro-batch"):
        TORCHTITAN.export(problem, even_plan(problem, kept), V022)
    for keep, word in ((False, "always"), (True, "never")):
        space = Space(tp=(1,), pp=(1,), zero_stage=(3,), keep_weights=(keep,))
        asked = problem.model_copy(update={"job": problem.job.model_copy(update={"global_batch_size": 256})})
        columns = layout_space(restrict(asked.model_copy(update={"space": space}), "torchtitan")).columns
        plans = [even_plan(asked, columns.at(row)) for row in range(len(columns))]
        written = [TORCHTITAN.export(asked, plan, NEWEST).settings for plan in plans]
        assert {one["parallelism.fsdp_reshard_after_forward"] for one in written} == {word}


def test_the_even_split_is_torchtitans() -> None:
    """Without a list embedding and head count as a layer each: 32 + 2 over 4 stages are 9, 9, 8, 8, less one at
    the ends."""
    text = FOREIGN.replace(
        "data_parallel_shard_degree = -1",
        "data_parallel_shard_degree = 2\npipeline_parallel_degree = 4\npipeline_parallel_microbatch_size = 1",
    )
    found = read(text.replace("local_batch_size = 1", "local_batch_size = 8"))
    assert [stage.num_layers for stage in found.plan.virtual_stages] == [8, 9, 8, 7]  # type: ignore[attr-defined]


def test_a_recipe_is_read_and_not_run() -> None:
    """Python is read for its literals; what only running it would tell is refused."""
    problem, plan = qwen_sharded()
    files, _ = round_trip(problem, plan, NEWEST)
    text = files["torchtitan_plan.py"]
    product = text.replace("max_context_length=4096", "max_context_length=4 * 1024")
    assert TORCHTITAN.read(ImportRequest(product, "x.py", problem.hardware)).plan == plan
    for old, new, word in (
        ("max_context_length=4096", "max_context_length=LENGTH", "not a literal"),
        ("    return Trainer", "    import os\n    return Trainer", "code that only runs"),
        ("def plan()", "def plan(", "no Python"),
        ("return Trainer.Config(", "return dict(", "0 functions"),
    ):
        with pytest.raises(InvalidInputError, match=word):
            TORCHTITAN.read(ImportRequest(text.replace(old, new), "x.py", problem.hardware))


def test_the_best_plan_replays_every_second_product() -> None:
    """Of a dense model that keeps too much without recomputation; its files, read back, take the same step. A plan
    that replays norms and activations instead is refused, and so is one for a version that replays others."""
    problem = problem_of("llama3-8b", "dgx-h100", num_gpus=16, global_batch_size=64, sequence_length=8192)
    space = Space(kind="uniform", tp=(1,), pp=(1,), micro_batch_size=(2,))
    for version in (V022, V030, NEWEST):
        titan = restrict(problem.model_copy(update={"space": space}), "torchtitan", version)
        assert titan.space.recompute == ("none", "selective", "full")
        plan = solve(titan).plan
        assert plan is not None
        assert plan.selects
        files, found = round_trip(titan, plan, version)
        assert "elective" in next(iter(files.values()))
        assert found.plan.virtual_stages == plan.virtual_stages
        there = titan.model_copy(update={"hardware": found.problem.hardware})
        assert simulate(there, plan) == simulate(titan, plan)
        with pytest.raises(IllegalPlanError, match="every second product"):
            TORCHTITAN.export(problem, plan, version)
        with pytest.raises(IllegalPlanError, match="one product" if version == V022 else "three products"):
            TORCHTITAN.export(titan, plan, NEWEST if version == V022 else V022)


def test_layers_with_experts_replay_all_but_products_and_exchanges() -> None:
    """Of the models whose operators are priced; 0.2.2, which compiles parts of these layers, is left out."""
    experts = problem_of("qwen3-30b-a3b", "dgx-h100", num_gpus=16, global_batch_size=64)
    assert restrict(experts, "torchtitan", V022).space.recompute == ("none", "full")
    titan = restrict(experts, "torchtitan")
    assert titan.space.recompute == ("none", "selective", "full")
    layout = layout_space(titan).columns.at(0)
    steps = {}
    for mode in ("none", "selective", "full"):
        plan = uniform_plan(titan, layout, mode)
        _, found = round_trip(titan, plan, NEWEST)
        steps[mode] = simulate(found.problem, found.plan)
        assert steps[mode] == simulate(found.problem, plan)
    assert steps["none"].step_time_s < steps["selective"].step_time_s < steps["full"].step_time_s
    assert steps["full"].peak_memory_bytes < steps["selective"].peak_memory_bytes < steps["none"].peak_memory_bytes
    for model in ("gpt-oss-120b", "deepseek-v3"):
        others = problem_of(model, "dgx-h100", num_gpus=64, global_batch_size=64)
        assert restrict(others, "torchtitan").space.recompute == ("none", "full")


def test_checkpoints_by_product_lie_between_all_and_none() -> None:
    """Every layer of a dense model replays every second product, which takes time and memory between those of all
    operators and of none; a model with experts is refused, and so are products that are named."""
    modes = {
        "none": 'mode = "none"',
        "selective": 'mode = "selective"\nselective_ac_option = "op"',
        "full": 'mode = "full"',
    }
    read_as = {name: read(FOREIGN.replace('mode = "full"', text), num_gpus=64) for name, text in modes.items()}
    steps = {name: simulate(found.problem, found.plan) for name, found in read_as.items()}
    assert steps["none"].step_time_s < steps["selective"].step_time_s < steps["full"].step_time_s
    assert steps["full"].peak_memory_bytes < steps["selective"].peak_memory_bytes < steps["none"].peak_memory_bytes
    found = read_as["selective"]
    assert found.problem.hardware.software.operator_checkpoints
    assert all(stage.recompute.selective == stage.num_layers for stage in found.plan.virtual_stages)
    named = 'per_op_sac_force_recompute_mm_shapes_by_fqns = ["feed_forward.w1"]'
    with pytest.raises(InvalidInputError, match="every second product"):
        read(FOREIGN.replace('mode = "full"', f"{modes['selective']}\n{named}"), num_gpus=64)
    experts = FOREIGN.replace('name = "llama3"', 'name = "deepseek_v3"').replace('flavor = "8B"', 'flavor = "16B"')
    with pytest.raises(InvalidInputError, match="every second product"):
        read(experts.replace('mode = "full"', modes["selective"]), num_gpus=64)


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("[compile]", "[compile", "TOML"),
        ('flavor = "8B"', 'flavor = "9B"', "sizes are not known"),
        ("-1", "7", "7 processes, and 64"),
        ("-1", '"x"', "whole number"),
        ("-1", "-1\ncontext_parallel_degree = 2", "ring"),
        ("-1", "8\ndata_parallel_replicate_degree = 7", "56 processes, and 64"),
        ("-1", "-1\nenable_async_tensor_parallel = true", "enable_async_tensor_parallel"),
        ("seq_len = 8192", 'seq_len = 8192\ndtype = "bfloat16"', "training.dtype"),
        ('mode = "full"', 'mode = "selective"', "selective"),
        ("local_batch_size = 1", "local_batch_size = 1\nglobal_batch_size = 65", "whole micro-batches"),
        ('"AdamW"', '"Muon"', "Muon"),
        (
            "-1",
            "1\npipeline_parallel_degree = 64\npipeline_parallel_first_stage_less_layers = 0\n"
            "pipeline_parallel_microbatch_size = 1\n"
            "pipeline_parallel_last_stage_less_layers = 0",
            "Stages with",
        ),
    ],
)
def test_bad_files_are_refused(old: str, new: str, word: str) -> None:
    """Whatever contradicts itself, is not priced, or is no such file."""
    with pytest.raises(MilpplanError, match=word) as caught:
        read(FOREIGN.replace(old, new), num_gpus=64)
    assert caught.value.do


def test_any_setting_can_be_ignored_and_is_told() -> None:
    """A name that torchtitan does not have and one that may cost time are refused by name, unless they are
    ignored; a name that the file does not have cannot be."""
    text = FOREIGN.replace("-1", "-1\nenable_async_tensor_parallel = true\nno_such_thing = 3")
    with pytest.raises(InvalidInputError, match=r"parallelism\.no_such_thing"):
        read(text, num_gpus=64, ignored=["parallelism.enable_async_tensor_parallel"])
    with pytest.raises(InvalidInputError, match=r"parallelism\.enable_async_tensor_parallel = True"):
        read(text, num_gpus=64, ignored=["parallelism.no_such_thing"])
    names = ["parallelism.enable_async_tensor_parallel", "parallelism.no_such_thing"]
    found = read(text, num_gpus=64, ignored=names)
    assert found.unknown_flags == ()  # type: ignore[attr-defined]
    assert found.ignored_flags == (f"{names[0]} = True", f"{names[1]} = 3")  # type: ignore[attr-defined]
    with pytest.raises(InvalidInputError, match="no setting of the file"):
        read(FOREIGN, num_gpus=64, ignored=["parallelism.nothing"])


OLD_KEYS = """
[job]
dump_folder = "./outputs"
[metrics]
log_freq = 10
[model]
name = "llama3"
flavor = "70B"
norm_type = "rmsnorm"
[optimizer]
name = "AdamW"
lr = 1.5e-4
[training]
batch_size = 8
seq_len = 8192
warmup_steps = 200
max_norm = 1.0
steps = 1000
data_parallel_degree = -1
tensor_parallel_degree = 8
compile = false
dataset = "c4"
[experimental]
pipeline_parallel_degree = 1
[checkpoint]
enable_checkpoint = false
[activation_checkpoint]
mode = "full"
[float8]
enable_float8_linear = false
"""
"""A file of the first dialect, in the manner of train_configs/llama3_70b.toml of 2024."""


def test_older_dialects_are_read() -> None:
    """Degrees and the batch stand in other sections and under other names in files before 0.2.2: they count, and
    the notes say how they are read."""
    found = read(OLD_KEYS, num_gpus=64)
    layout = found.plan.layout  # type: ignore[attr-defined]
    assert (layout.tp, layout.dp, layout.micro_batch_size, layout.zero_stage) == (8, 8, 8, 3)
    assert layout.global_batch_size == 64
    assert any("training.tensor_parallel_degree is read as" in note for note in found.notes)  # type: ignore[attr-defined]
    text = FOREIGN.replace("local_batch_size = 1", "batch_size = 2")
    assert read(text, num_gpus=64).plan.layout.micro_batch_size == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("batch_size = 8", "batch_size = 8\nlocal_batch_size = 4", "training.batch_size is 8"),
        ("batch_size = 8\n", "", "does not say training.local_batch_size"),
        ("seq_len = 8192\n", "", "does not say training.seq_len"),
        ('flavor = "70B"\n', "", "flavor None"),
        ('name = "llama3"\n', "", "model.name None"),
        ("enable_float8_linear = false", "enable_float8_linear = true", "float8.enable_float8_linear"),
        ("[experimental]", "[experimental]\npipeline_parallel_microbatches = 8", "pipeline_parallel_microbatches"),
        ("[experimental]", '[experimental]\npipeline_parallel_split_points = ["layers.4"]', "split_points"),
        ('norm_type = "rmsnorm"', 'norm_type = "layernorm"', "model.norm_type"),
        ("[experimental]", "[experimental]\nenable_async_tensor_parallel = true", "async_tensor_parallel"),
    ],
)
def test_what_an_older_file_leaves_open_is_refused(old: str, new: str, word: str) -> None:
    """No default of a class stands in for a size, and what is not priced is named."""
    assert old in OLD_KEYS
    with pytest.raises(MilpplanError, match=word):
        read(OLD_KEYS.replace(old, new), num_gpus=64)


def test_calls_inside_calls_are_read() -> None:
    """In Python a setting of any call is looked at, however deep: another loss is another training."""
    problem, plan = qwen_sharded()
    text = round_trip(problem, plan, NEWEST)[0]["torchtitan_plan.py"]
    loss = "loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec))"
    assert loss in text
    for old, new in (
        ('model_registry("30B-A3B"', 'model_registry("30B-A3B", attn_backend="flex"'),
        (
            "    dataloader=",
            "    validator=Validator.Config(freq=5, dataloader=Some.Config(infinite=False)), dataloader=",
        ),
        ("    dataloader=", "    checkpoint=CheckpointManager.Config(interval=500), dataloader="),
    ):
        assert old in text
        assert TORCHTITAN.read(ImportRequest(text.replace(old, new), "x.py", problem.hardware)).plan == plan
    chunked = f"loss=ChunkedLossWrapper.Config({loss.replace('loss=', 'loss_fn=')}, num_chunks=8)"
    assert TORCHTITAN.read(ImportRequest(text.replace(loss, chunked), "x.py", problem.hardware)).plan == plan
    for old, new, word in (
        (loss, chunked.replace("CrossEntropyLoss", "GRPOLoss"), "loss.loss_fn"),
        (loss, "loss=GRPOLoss.Config()", "loss is"),
        ("default_adamw(lr=3e-4)", "default_adamw(lr=3e-4, foo=1)", "optimizer.foo"),
        ("default_adamw(lr=3e-4)", "default_adamw(**more)", "by \\*\\*"),
        ("warmup_steps=20", 'warmup_steps="many"', "lr_scheduler.warmup_steps"),
        ("default_adamw(lr=3e-4)", "a" + ".b" * 1500 + "(lr=3e-4)", "optimizer is code"),
        ("max_context_length=4096", f"max_context_length={'*'.join(['9' * 4000] * 60)}", "not a literal"),
    ):
        assert old in text
        with pytest.raises(InvalidInputError, match=word):
            TORCHTITAN.read(ImportRequest(text.replace(old, new), "x.py", problem.hardware))


def test_an_empty_stage_inside_is_refused() -> None:
    """Stages between the ends hold layers."""
    problem = problem_of("llama3-8b", "dgx-h100")
    layout = Layout(pp=4, dp=2, global_batch_size=16, zero_stage=1)
    with pytest.raises(IllegalPlanError, match="holds no layer"):
        TORCHTITAN.export(problem, staged(layout, [16, 0, 8, 8], False), V030)


def test_defaults_are_those_of_the_releases() -> None:
    """The tables of settings are whole: a few defaults that users rely on, in each dialect."""
    assert known(V022)["training.local_batch_size"] == (8,)
    assert known(V030)["parallelism.enable_sequence_parallel"] == (True,)
    assert known(NEWEST)["training.num_tokens_per_microbatch_per_dp_rank"] == (16384,)
    assert all(len(known(version)) > 100 for version in VERSIONS)


def test_a_registry_is_read_by_the_name_of_a_function(tmp_path: Path) -> None:
    """--config names one of its functions, and ``from .`` is the folder that the file lies in."""
    problem, plan = qwen_sharded()
    files, _ = round_trip(problem, plan, NEWEST)
    text = files["torchtitan_plan.py"]
    registry = re.sub(r"from torchtitan\.models\.\w+ import model_registry", "from . import model_registry", text)
    other = registry[registry.index("def plan()") :].replace("def plan()", "def other()")
    source = str(tmp_path / "qwen3" / "config_registry.py")

    def read_function(given: dict[str, object], where: str = source) -> object:
        request = ImportRequest(f"{registry}\n\n{other}", where, problem.hardware, given=given)
        return TORCHTITAN.read(request).plan

    assert read_function({"config": "plan"}) == plan
    for given, word in (({}, "2 functions"), ({"config": "third"}, "0 functions named 'third'")):
        with pytest.raises(InvalidInputError, match=word):
            read_function(given)
    with pytest.raises(InvalidInputError, match="sizes are not known"):
        read_function({"config": "plan"}, "elsewhere/config_registry.py")
    with pytest.raises(InvalidInputError, match="not known here"):
        read_function({"config": "plan", "training.no_such": 1})


@pytest.mark.parametrize("name", ["torchtitan.sh", "torchtitan.sbatch"])
def test_the_script_in_place_of_the_configuration_is_told(name: str) -> None:
    """A shell script is no TOML: the configuration that it starts is asked for."""
    remedies = {name: "Give the configuration that this script starts.", "run.toml": "Correct the place named."}
    for source, remedy in remedies.items():
        with pytest.raises(InvalidInputError) as caught:
            read("NUM_NODES=${NUM_NODES:-1}\n", source)
        assert caught.value.do == remedy
