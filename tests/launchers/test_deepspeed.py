"""DeepSpeed's JSON gives the plan back, or the export gives all the reasons why not."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from milpplan import Layout, Plan, Problem, simulate
from milpplan.errors import IllegalPlanError, InvalidInputError, MilpplanError
from milpplan.launchers import Imported, ImportRequest, run_by
from milpplan.launchers.deepspeed.launcher import LAUNCHER, config_of, imported
from tests.launchers.cases import legal_layout
from tests.simulation.cases import (
    even_plan,
    problem_of,
    random_plan,
    random_problem,
    shipped_hardware,
    shipped_model,
)

DATA = Path(__file__).parents[1] / "data" / "launchers"
VERSION = "0.19.8"
FAMILIES = {
    "llama3-8b": "llama", "llama2-7b": "llama", "mistral-7b": "mistral", "qwen3-32b": "qwen3", "gemma-7b": "llama",
    "gpt3-175b": None, "mixtral-8x7b": None, "deepseek-v3": None,
}  # fmt: skip


def round_trip(problem: Problem, plan: Plan, **more: Any) -> tuple[dict[str, str], Imported]:
    """The files of a plan, and what is read back from the JSON."""
    files = LAUNCHER.files(LAUNCHER.export(problem, plan, VERSION), "0")
    return files, imported(ImportRequest(files["deepspeed.json"], "deepspeed.json", problem.hardware, **more))


def random_case(seed: int) -> tuple[Problem, Plan]:
    """A data-parallel plan in one of the ways in which DeepSpeed shards."""
    random = np.random.default_rng(seed)
    model = str(random.choice([name for name, family in FAMILIES.items() if family]))
    dtype, zero, dp = str(random.choice(["fp32", "bf16"])), int(random.integers(4)), int(random.choice([1, 2, 8]))
    if dtype == "fp32" and dp > 1:
        zero = max(zero, 2)
    zero = zero if dp > 1 else 0
    overlap = dp > 1 and (zero >= 2 or (zero == 1 and bool(random.integers(2))))
    kernel = str(random.choice(["flash", "unfused"]))
    problem = problem_of(model, "dgx-h100", sequence_length=1024, grad_dtype=dtype, attention_kernel=kernel)
    size = int(random.choice([1, 2]))
    layout = Layout(
        dp=dp, micro_batch_size=size, global_batch_size=size * dp * int(random.integers(1, 5)), zero_stage=zero,
        overlap_grad_reduce=overlap, overlap_param_gather=zero == 3,
    )  # fmt: skip
    return problem, even_plan(problem, layout, full=int(random.integers(2)) * problem.model.num_layers)


def llama() -> tuple[Problem, Plan]:
    """ZeRO 3 with everything recomputed."""
    problem = problem_of("llama3-8b", "dgx-h100", num_gpus=16, global_batch_size=128)
    layout = Layout(
        dp=16, micro_batch_size=2, global_batch_size=128, zero_stage=3, overlap_grad_reduce=True,
        overlap_param_gather=True,
    )  # fmt: skip
    return problem, even_plan(problem, layout, full=32)


@pytest.mark.parametrize("seed", range(16))
def test_random_plans_come_back(seed: int) -> None:
    """Whatever the model, sharding, formats, kernel and recomputation: plan, job and model are the same."""
    problem, plan = random_case(seed)
    files, found = round_trip(problem, plan, model=problem.model)
    layout = plan.layout
    assert found.plan == plan
    sizes = {"num_gpus": layout.num_gpus, "global_batch_size": layout.global_batch_size}
    assert found.problem.job == problem.job.model_copy(update=sizes)
    assert found.problem.model == problem.model
    assert (found.unknown_flags, found.notes) == ((), ())
    settings = json.loads(files["deepspeed.json"])
    size, steps = settings["train_micro_batch_size_per_gpu"], settings["gradient_accumulation_steps"]
    assert settings["train_batch_size"] == size * steps * layout.dp


def test_golden_files(tmp_path: Path) -> None:
    """The named plan gives the files that DeepSpeed's own parser was shown, and costs the same when it is back;
    the program is Python, the scripts are bash."""
    problem, plan = llama()
    files, found = round_trip(problem, plan, model=problem.model)
    for file, text in files.items():
        assert text == (DATA / f"llama3-8b.{file.replace('.', '-')}").read_text()
        if file.endswith(".sh"):
            (tmp_path / file).write_text(text)
            assert subprocess.run(["bash", "-n", str(tmp_path / file)], check=False).returncode == 0
    assert isinstance(ast.parse(files["deepspeed_train.py"]), ast.Module)
    assert (found.problem, found.plan) == (run_by("deepspeed", "", problem), plan)
    assert simulate(found.problem, found.plan).step_time_ns == simulate(problem, plan).step_time_ns


@pytest.mark.parametrize("name", FAMILIES)
def test_models_are_hugging_face_configs(name: str) -> None:
    """A dense model of the families is the config that its class is built from; others have none."""
    config = config_of(shipped_model(name))
    assert (config or {}).get("model_type") == FAMILIES[name]


def test_any_plan_comes_back_or_is_refused() -> None:
    """Plans of the whole space are never turned into others."""
    random, refused = np.random.default_rng(4), 0
    for _ in range(40):
        problem = random_problem(random)
        plan = random_plan(random, problem, legal_layout(random, problem))
        try:
            _, found = round_trip(problem, plan)
        except IllegalPlanError:
            refused += 1
        else:
            assert found.plan == plan
    assert refused > 25


def test_all_reasons_come_together_with_the_way_out() -> None:
    """Degrees, offloading, fp8 and stages that recompute in part: one message, one --fix, which names a field once
    and says which reasons it leaves."""
    problem = problem_of("llama3-8b", "dgx-h100", precision="fp8")
    layout = Layout(tp=2, pp=2, dp=2, global_batch_size=8, zero_stage=1, offload_optimizer=True)
    with pytest.raises(IllegalPlanError) as caught:
        LAUNCHER.export(problem, even_plan(problem, layout, full=3), VERSION)
    for word in ("fp8", "tp=2", "pp=2", "offload_optimizer=true", "recompute 3, 3 layers", "BF16_Optimizer"):
        assert word in caught.value.seen
    fixes = caught.value.do.partition("--fix ")[2].partition(". ")[0].split(",")
    assert {"tp=1", "pp=1", "offload_optimizer=false"} <= set(fixes)
    assert len({fix.partition("=")[0] for fix in fixes}) == len(fixes)
    assert "fp8" in caught.value.seen.partition("(1)")[2].partition("(2)")[0]
    assert "No --fix is known for (1)" in caught.value.do


@pytest.mark.parametrize(
    ("zero", "dtype", "overlap", "word"),
    [
        (0, "fp32", False, "not implemented"),
        (0, "bf16", True, "overlap_grad_reduce=true"),
        (1, "fp32", True, "BF16_Optimizer"),
    ],
)
def test_what_deepspeed_does_otherwise_is_refused(zero: int, dtype: str, overlap: bool, word: str) -> None:
    """Stages and formats of gradients whose messages are not those of the plan."""
    problem = problem_of("llama3-8b", "dgx-h100", grad_dtype=dtype)
    layout = Layout(dp=8, global_batch_size=8, zero_stage=zero, overlap_grad_reduce=overlap)
    with pytest.raises(IllegalPlanError, match=word):
        LAUNCHER.export(problem, even_plan(problem, layout), VERSION)


FOREIGN: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e9},
    "wall_clock_breakdown": False,
    "milpplan": {"sequence_length": 8192},
}
"""A file that nobody here wrote; the length of the sequences is its program's, and must be added."""


def read(data: Any, **more: Any) -> Imported:
    """What an import makes of a JSON."""
    return imported(ImportRequest(json.dumps(data), "ds.json", shipped_hardware("dgx-h100"), **more))


def test_somebody_elses_file_is_read() -> None:
    """The batch follows from the processes; what the file does not say is told."""
    found = read(FOREIGN, num_gpus=8, model=shipped_model("llama3-8b"))
    layout = found.plan.layout
    assert (layout.dp, layout.global_batch_size, layout.zero_stage) == (8, 64, 3)
    assert (layout.overlap_grad_reduce, layout.overlap_param_gather) == (True, True)
    assert found.problem.job.grad_dtype == "bf16"
    assert found.problem.job.sequence_length == 8192
    assert [note.split()[0] for note in found.notes] == ["recompute", "attn_implementation"]
    same = FOREIGN | {"train_batch_size": 64}
    assert read(same, model=shipped_model("llama3-8b")).plan == found.plan


TEMPLATE: dict[str, Any] = {
    "_comment": "for any trainer",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "zero_optimization": {"stage": 2, "overlap_comm": False, "round_robin_gradients": True},
}
"""A file of a trainer that fills ``auto`` in from its flags."""
NUMBERS = {
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "milpplan.sequence_length": 8192,
    "bf16.enabled": True,
}  # fmt: skip


def test_auto_is_filled_in_by_the_caller() -> None:
    """Four numbers of the trainer's flags make a template a run; other autos cost nothing."""
    more: dict[str, Any] = {"num_gpus": 8, "model": shipped_model("llama3-8b"), "given": NUMBERS}
    found = read(TEMPLATE, **more)
    assert (found.plan.layout.global_batch_size, found.plan.layout.zero_stage) == (64, 2)
    assert any("overlap_comm is false" in note for note in found.notes)
    with pytest.raises(InvalidInputError, match="train_batch_size 60"):
        read(TEMPLATE | {"train_batch_size": 60}, **more)
    for name in ("train_micro_batch_size_per_gpu", "bf16.enabled"):
        with pytest.raises(InvalidInputError, match=name):
            read(TEMPLATE, **more | {"given": {key: value for key, value in NUMBERS.items() if key != name}})


def test_fp16_is_told_to_be_priced_as_bf16() -> None:
    """Its bytes are the same; both together are refused, as DeepSpeed refuses them."""
    more: dict[str, Any] = {"num_gpus": 8, "model": shipped_model("llama3-8b")}
    found = read(FOREIGN | {"bf16": {"enabled": False}, "fp16": {"enabled": True, "loss_scale": 0}}, **more)
    assert found.plan == read(FOREIGN, **more).plan
    assert any(note.startswith("fp16 is priced as bf16") for note in found.notes)


def test_zero_3_has_settings_with_and_without_its_prefix() -> None:
    """DeepSpeed takes either name, and both are the same setting."""
    more: dict[str, Any] = {"num_gpus": 8, "model": shipped_model("llama3-8b")}
    short = {"stage": 3, "max_live_parameters": 0, "gather_16bit_weights_on_model_save": True}
    found = read(FOREIGN | {"zero_optimization": short}, **more)
    assert found.plan == read(FOREIGN, **more).plan


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"train_batch_size": 65}, "65 is not 4"),
        ({"bf16": {"enabled": "auto"}}, "bf16.enabled is auto"),
        ({"gradient_accumulation_steps": "auto"}, "--accumulation"),
        ({"train_micro_batch_size_per_gpu": 0}, "above zero"),
        ({"bf16": {"enabled": False}}, "bf16"),
        ({"zero_optimization": {"stage": 4}}, "0, 1, 2 or 3"),
        ({"fp16": {"enabled": True}}, "fp16.enabled"),
        ({"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0}}, "gathers no weights ahead"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "zero_hpz_partition_size"),
        ({"tensor_parallel": {"autotp_size": 4}}, "autotp_size"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "kept in 'fp32'"),
        ({"optimizer": {"type": "OneBitAdam"}}, "OneBitAdam"),
        ({"milpplan": 3}, "milpplan"),
        ({"milpplan": {}}, "--seq-len"),
        ({"milpplan": {"sequence_length": "long"}}, "sequence_length"),
        ({"milpplan": {"sequence_length": 8192, "world_size": "8"}}, "world_size"),
        ({"milpplan": {"sequence_length": 8192, "world_size": 16}}, "world_size. starts 16 processes"),
        ({"milpplan": {"sequence_length": 8192, "attn_implementation": "magic"}}, "magic"),
        ({"milpplan": {"sequence_length": 8192, "model": {"model_type": "llama"}}}, "num_attention_heads"),
        ({"train_micro_batch_size_per_gpu": None}, "--micro-batch"),
        ({"comms_logger": {"enabled": True}}, "comms_logger.enabled"),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning.enabled"),
        ({"compression_training": {"layer_reduction": {"enabled": True}}}, "compression_training"),
    ],
)
def test_bad_files_are_refused(change: dict[str, Any], word: str) -> None:
    """Whatever contradicts itself, is not priced, or is no such file."""
    more: dict[str, Any] = {"num_gpus": 8}
    with pytest.raises(MilpplanError, match=word) as caught:
        read(FOREIGN | change, model=shipped_model("llama3-8b"), **more)
    assert caught.value.do


def test_what_only_the_caller_knows_is_asked_for() -> None:
    """A file without a model, and one without a number of processes."""
    with pytest.raises(InvalidInputError, match="which model"):
        read(FOREIGN, num_gpus=8)
    with pytest.raises(InvalidInputError, match="number of processes"):
        read(FOREIGN, model=shipped_model("llama3-8b"))
    files, _ = round_trip(*llama())
    with pytest.raises(InvalidInputError, match="another model"):
        imported(
            ImportRequest(
                files["deepspeed.json"], "x.json", shipped_hardware("dgx-h100"), model=shipped_model("llama2-7b")
            )
        )


def test_any_setting_can_be_ignored_and_is_told() -> None:
    """A name that DeepSpeed does not have and quantised gradients are refused by name, unless they are ignored,
    one by one or as a section."""
    names = ["zero_optimization.zero_quantized_gradients", "zero_optimization.no_such"]
    stage = {"stage": 3, "zero_quantized_gradients": True, "no_such": 1, "offload_param": {"device": "none"}}
    data = FOREIGN | {"zero_optimization": stage}
    more: dict[str, Any] = {"num_gpus": 8, "model": shipped_model("llama3-8b")}
    for name, other in (names, names[::-1]):
        with pytest.raises(InvalidInputError, match=other):
            read(data, ignored=[name], **more)
    found = read(data, ignored=names, **more)
    assert found.unknown_flags == ()
    assert found.ignored_flags == (f"{names[0]} = True", f"{names[1]} = 1")
    section = read(
        data | {"zero_optimization": {"stage": 0, "zenflow": {"topk_ratio": 1}}},
        ignored=["zero_optimization.zenflow"],
        **more,
    )
    assert section.ignored_flags == ("zero_optimization.zenflow.topk_ratio = 1",)


def test_what_is_off_is_not_asked_for() -> None:
    """Settings of offloading to no device, and of sharding at ZeRO 0, change nothing."""
    stage = {
        "stage": 0,
        "round_robin_gradients": True,
        "offload_optimizer": {"device": "none", "pin_memory": True},
    }
    found = read(FOREIGN | {"zero_optimization": stage}, num_gpus=8, model=shipped_model("llama3-8b"))
    assert found.plan.layout.zero_stage == 0
