"""Megatron-Bridge: plans come back from its overrides, and what overrides leave open or cannot say is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from milpplan import Plan, Problem
from milpplan.errors import IllegalPlanError, InvalidInputError, MilpplanError
from milpplan.launchers import ImportRequest
from milpplan.launchers.megatron.launcher import Imported
from milpplan.launchers.megatron_bridge import launcher as bridge_import
from milpplan.launchers.megatron_bridge.launcher import CONSTANT, NAMES, SCRIPT, MegatronBridge
from tests.launchers.cases import NAMED, as_run, deepseek, llama_uneven, random_case
from tests.launchers.test_megatron_round_trip import assert_same

KEPT = Path(__file__).parents[1] / "data" / "launchers"
VERSION = "0.6.0"


def script_of(problem: Problem, plan: Plan) -> str:
    """The script of a plan."""
    launch = MegatronBridge().export(problem, plan, VERSION)
    return MegatronBridge().files(launch, "0")[SCRIPT]


def read(problem: Problem, text: str) -> Imported:
    """What a script says."""
    return bridge_import.imported(ImportRequest(text, "run.sh", problem.hardware, model=problem.model))


def without_ring(case: tuple[Problem, Plan]) -> tuple[Problem, Plan]:
    """The same plan without tiles."""
    problem, plan = case
    layout = plan.layout.model_copy(update={"tp_overlap": "none"})
    return problem, plan.model_copy(update={"layout": layout})


def test_random_plans_come_back() -> None:
    """Of random plans of Megatron-LM's every one comes back equal, or is refused with what to do."""
    told, refusals = 0, []
    for seed in range(60):
        problem, plan = without_ring(random_case(seed))
        job = problem.job.model_copy(update={"grad_dtype": "fp32"})
        problem = problem.model_copy(update={"job": job})
        try:
            text = script_of(problem, plan)
        except IllegalPlanError as error:
            refusals.append(error)
            continue
        found = bridge_import.imported(ImportRequest(text, "run.sh", problem.hardware))
        assert_same(problem, plan, found.problem, found.plan)
        told += 1
    assert told >= 15
    assert all(error.expected and error.do for error in refusals)


@pytest.mark.parametrize("name", ["llama3-70b-uneven", "mixtral-8x7b-sharded"])
def test_kept_script(name: str) -> None:
    """The script of a named plan is the kept one, and says the plan."""
    problem, plan = without_ring(NAMED[name]())
    text = script_of(problem, plan)
    assert text == (KEPT / f"{name}.bridge-sh").read_text(encoding="utf-8")
    assert read(problem, text).plan == as_run(problem, plan)


def test_latent_attention_takes_its_recipe() -> None:
    """A model with latent attention and fp8 weights starts from a recipe that has it."""
    problem, plan = deepseek()
    software = problem.hardware.software.model_copy(update={"fp8_weights_only": True})
    problem = problem.model_copy(update={"hardware": problem.hardware.model_copy(update={"software": software})})
    text = script_of(problem, plan)
    assert "deepseek_v3_pretrain_config" in text
    assert "mixed_precision=bf16_with_fp8_current_scaling_mixed" in text
    assert read(problem, text).plan == as_run(problem, plan)


@pytest.mark.parametrize("key", [name.keys[0] for name in NAMES if name.part == "all"][::6])
def test_what_the_recipe_would_decide_is_refused(key: str) -> None:
    """Without one of the settings of a plan it depends on the recipe, and the import names it."""
    problem, plan = without_ring(llama_uneven())
    kept = [line for line in script_of(problem, plan).splitlines() if f"{key}=" not in line]
    with pytest.raises(InvalidInputError, match=key):
        read(problem, "\n".join(kept))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("comm_overlap=null", "comm_overlap.tp_comm_overlap=true"),
        ("model.mtp_num_layers=null", "model.mtp_num_layers=2 model.mtp_use_repeated_layer=true"),
        ("model.num_layers=80", "model.num_layers=$LAYERS"),
        ("mixed_precision=bf16_mixed", "mixed_precision=fp16_mixed"),
        ("dist.use_megatron_fsdp=false", "dist.use_megatron_fsdp=true"),
        ("train.micro_batch_size=1", "train.micro_batch_size=3"),
        ("model.should_pad_vocab=true", "model.should_pad_vocab=true model.delay_wgrad_compute=true"),
    ],
)
def test_unpriced_and_contradicting_settings_are_refused(old: str, new: str) -> None:
    """What changes the cost and is not priced, or contradicts itself or Megatron-Core's rules, is refused."""
    problem, plan = without_ring(llama_uneven())
    text = script_of(problem, plan)
    assert old in text
    with pytest.raises(MilpplanError) as error:
        read(problem, text.replace(old, new))
    assert error.value.do


def test_what_no_override_says_is_refused() -> None:
    """A ring of tiles and gradients in bf16 have no override that stands by itself."""
    problem, plan = llama_uneven()
    with pytest.raises(IllegalPlanError, match="tp_overlap"):
        script_of(problem, plan)
    job = problem.job.model_copy(update={"grad_dtype": "bf16"})
    with pytest.raises(IllegalPlanError, match="bf16"):
        script_of(problem.model_copy(update={"job": job}), without_ring((problem, plan))[1])


def test_settings_have_one_name() -> None:
    """No setting is written for two flags, or both for a flag and switched off."""
    keys = [key for name in NAMES for key in name.keys] + list(CONSTANT)
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("--dataset mock", "--dataset x --peft_scheme lora", "peft_scheme"),
        ("--dataset mock", "--dataset x --packed_sequence", "packed_sequence"),
        ("--dataset mock", "--dataset x --step_func vlm_step", "step_func"),
        ("--dataset mock", "--dataset x --mode sft", "mode"),
        ("--dataset mock", "model.yaml", "model.yaml"),
        ("--dataset mock", "~optimizer.lr", "optimizer.lr"),
        ("--dataset mock", "$MORE", "MORE"),
        ("RECIPE:-gpt3_175b_pretrain_32gpu_h100_bf16_config", "RECIPE:-mamba2_130m_pretrain_config", "recipe"),
        ("RECIPE:-gpt3_175b_pretrain_32gpu_h100_bf16_config", "RECIPE:-llama3_8b_finetune_config", "recipe"),
        ("RECIPE:-gpt3_175b_pretrain_32gpu_h100_bf16_config", "RECIPE:-nemotronh_8b_pretrain_config", "recipe"),
        ("RECIPE:-gpt3_175b_pretrain_32gpu_h100_bf16_config", "RECIPE", "recipe"),
        ("run_recipe.py", "pretrain_vlm.py", "pretrain_vlm.py"),
        ("train.train_iters=100", "train.train_iters=100 train.no_such=1", "train.no_such"),
        ("train.train_iters=100", "train.train_iters=many", "train.train_iters"),
        ("train.train_iters=100", "train.rampup_batch_size=[1,1,8]", "train.rampup_batch_size"),
        ("train.train_iters=100", "train.train_iters=100 peft=lora.peft=1", "peft"),
        ("model.sequence_parallel=true", "model.sequence_parallel=banana", "model.sequence_parallel"),
        ("model.num_layers=80", "model.num_layers=[80]", "model.num_layers"),
        ("model.hidden_size=8192", "model.hidden_size=nan", "model.hidden_size"),
        ("optimizer.lr=1.0e-4", "optimizer.lr=[1]", "optimizer.lr"),
    ],
)
def test_programs_recipes_and_flags_decide(old: str, new: str, word: str) -> None:
    """The program and the recipe decide the model; words beside the overrides, invented settings and values of
    another kind are refused by name."""
    problem, plan = without_ring(llama_uneven())
    text = script_of(problem, plan)
    assert old in text
    with pytest.raises(MilpplanError, match=word):
        read(problem, text.replace(old, new))


def test_flags_of_the_program_set_what_overrides_do_not() -> None:
    """Flags, also short ones, come before the overrides, which win."""
    problem, plan = without_ring(llama_uneven())
    text = script_of(problem, plan)
    for setting, flag in (("tensor_model_parallel_size=4", "-tp 4"), ("context_parallel_size=2", "-cp 2")):
        assert f"    model.{setting}\n" in text
        text = text.replace(f"    model.{setting}\n", "").replace("--dataset mock", f"--dataset mock {flag}")
    text = text.replace(
        "--dataset mock", "--dataset mock --mode pretrain --step-func llm_step -pp 64 --max_steps 9"
    )
    assert read(problem, text).plan == plan


def test_any_override_can_be_ignored() -> None:
    """What is refused by name can be ignored, and the answer says so: settings, sections, recipe and program."""
    problem, plan = without_ring(llama_uneven())
    text = script_of(problem, plan).replace(
        "train.train_iters=100", "train.train_iters=100 train.no_such=1 peft.dim=8"
    )
    text = text.replace("gpt3_175b_pretrain_32gpu_h100_bf16_config", "mamba2_130m_pretrain_config")
    text = text.replace("run_recipe", "other")
    names = ["train.no_such", "peft", "recipe", "other.py"]
    for left in range(len(names)):
        with pytest.raises(InvalidInputError, match=names[left]):
            bridge_import.imported(
                ImportRequest(
                    text, "run.sh", problem.hardware, ignored=[name for name in names if name != names[left]]
                )
            )
    found = bridge_import.imported(
        ImportRequest(text, "run.sh", problem.hardware, model=problem.model, ignored=names)
    )
    assert found.plan == plan
    assert len(found.ignored_flags) == 4


def test_a_sourced_file_beside_the_script_is_read(tmp_path: Path) -> None:
    """What a script sources counts as if it stood there."""
    problem, plan = without_ring(llama_uneven())
    text = script_of(problem, plan)
    setting = re.search(r"model\.tensor_model_parallel_size=\d+", text)
    assert setting is not None
    (tmp_path / "sizes.sh").write_text(f"SIZE={setting[0].partition('=')[2]}\n")
    file = tmp_path / "run.sh"
    body = text.replace(setting[0], "model.tensor_model_parallel_size=$SIZE")
    file.write_text(body.replace("\n", "\nsource sizes.sh\n", 1))
    found = bridge_import.imported(
        ImportRequest(file.read_text(), str(file), problem.hardware, model=problem.model)
    )
    assert_same(problem, plan, found.problem, found.plan)
