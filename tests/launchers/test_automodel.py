"""NeMo AutoModel: what decides the model and the training is looked at, and published files are read."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from milpplan import simulate
from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.launchers import TARGETS, Imported, ImportRequest
from milpplan.launchers.automodel.launcher import imported
from milpplan.simulation.layers import total_parameters
from tests.simulation.cases import shipped_hardware, shipped_model

RECIPE: dict[str, Any] = {
    "step_scheduler": {"global_batch_size": 64, "local_batch_size": 8, "ckpt_every_steps": 200, "num_epochs": 2},
    "dist_env": {"backend": "nccl", "timeout_minutes": 1},
    "rng": {"_target_": "nemo_automodel.components.training.rng.StatefulRNG", "seed": 1111, "ranked": True},
    "model": {
        "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
        "pretrained_model_name_or_path": "meta-llama/Llama-3.1-8B",
    },
    "checkpoint": {"enabled": True, "checkpoint_dir": "checkpoints/", "save_consolidated": True},
    "distributed": {"strategy": "fsdp2", "dp_size": "none", "tp_size": 1, "reshard_after_forward": "None"},
    "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
    "dataset": {"_target_": "nemo_automodel.components.datasets.llm.mock.MockIterableDataset", "seq_len": 4096},
    "packed_sequence": {"packed_sequence_size": 0, "split_across_pack": False},
    "dataloader": {"collate_fn": "nemo_automodel.components.datasets.utils.default_collater", "shuffle": True},
    "optimizer": {"_target_": "torch.optim.Adam", "betas": [0.9, 0.999], "eps": "1e-8", "lr": 1e-5},
}
"""A recipe in the manner of examples/llm_finetune of 0.7.0."""


def read(data: Any, **more: Any) -> Imported:
    """Import a recipe."""
    more = {"model": shipped_model("llama3-8b"), "num_gpus": 8} | more
    return imported(ImportRequest(yaml.safe_dump(data), "run.yaml", shipped_hardware("dgx-h100"), **more))


def changed(**sections: dict[str, Any]) -> dict[str, Any]:
    """The recipe with other settings in its sections."""
    return RECIPE | {name: RECIPE.get(name, {}) | values for name, values in sections.items()}


def test_a_published_recipe_is_read() -> None:
    """Words of Python stand for nothing; without a choice weights are gathered again; one micro-batch a step has
    nothing to defer. What the file leaves open is told."""
    found = read(RECIPE)
    layout = found.plan.layout
    assert (layout.dp, layout.zero_stage, layout.micro_batch_size, layout.global_batch_size) == (8, 3, 8, 64)
    assert found.problem.job.sequence_length == 4096
    assert any("torch_dtype" in note for note in found.notes)
    assert read(changed(model={"torch_dtype": "float32"})).notes == ()


def test_weights_in_bf16_have_states_in_bf16() -> None:
    """Weights in bf16 take 2 + 2 + 4 bytes a parameter with gradient and moments, of which all are sharded; the
    reduction stays in fp32, and nothing writes such a plan back."""
    whole, half = (read(changed(model={"torch_dtype": word})) for word in ("float32", "bf16"))
    model, found = shipped_model("llama3-8b"), simulate(half.problem, half.plan).stages[0].memory
    assert found.optimizer_bytes == pytest.approx(4 * total_parameters(model) / 8, rel=1e-6)
    assert simulate(whole.problem, whole.plan).stages[0].memory.optimizer_bytes == 3 * found.optimizer_bytes
    assert half.problem.job.grad_dtype == "bf16"
    assert half.problem.hardware.software.reduced_gradient_bytes == 4
    assert read(RECIPE).problem == half.problem
    for target in ("automodel", "deepspeed", "megatron"):
        launcher = TARGETS[target]
        with pytest.raises(IllegalPlanError, match="optimizer states of 4 bytes"):
            launcher.export(half.problem, half.plan, launcher.capability.versions[0])


def test_gradients_that_wait_are_told() -> None:
    """AutoModel keeps whole gradients until the last micro-batch of a step unless told otherwise."""
    several = changed(model={"torch_dtype": "bf16"}, step_scheduler={"local_batch_size": 2})
    assert any("whole gradients" in note for note in read(several).notes)
    found = read(several | {"distributed": {**several["distributed"], "defer_fsdp_grad_sync": False}})
    assert found.notes == ()
    assert found.plan.layout.num_micro_batches == 4


def test_eager_attention_keeps_its_scores() -> None:
    """The softmax stays in fp32, and its copy in bf16."""
    found = read(changed(model={"attn_implementation": "eager"})).problem
    assert found.job.attention_kernel == "unfused"
    assert found.hardware.software.score_kept_bytes == 6


@pytest.mark.parametrize(
    ("patterns", "modules"),
    [
        ("*_proj", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
        (["*.q_proj", "model.layers.*.mlp.*"], ("q_proj", "gate_proj", "up_proj", "down_proj")),
        ("*attn*", ("q_proj", "k_proj", "v_proj", "o_proj")),
    ],
)
def test_adapters_are_read(patterns: Any, modules: tuple[str, ...]) -> None:
    """Patterns are of whole names of modules; the weights beside adapters are frozen."""
    peft = {"_target_": "nemo_automodel.components._peft.lora.PeftConfig", "dim": 16, "alpha": 32}
    found = read(changed(peft={**peft, "target_modules": patterns, "use_triton": True}))
    assert found.problem.job.lora is not None
    assert (found.problem.job.lora.rank, found.problem.job.lora.modules) == (16, modules)


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"target_modules": "q_proj"}, "no matrix"),
        ({"target_modules": "*"}, "head"),
        ({"target_modules": "*.3.*"}, "same modules in all layers"),
        ({"target_modules": "(a|b)+"}, "asterisks"),
        ({"use_dora": True}, "use_dora"),
        ({"dropout": 0.1}, "dropout"),
        ({"match_all_linear": True}, "match_all_linear"),
        ({"exclude_modules": ["*.q_proj"]}, "exclude_modules"),
        ({"_target_": "peft.LoraConfig"}, "_target_"),
    ],
)
def test_adapters_that_are_not_priced_are_refused_by_name(more: dict[str, Any], word: str) -> None:
    """Other adapters, and modules that are no matrices of all layers."""
    with pytest.raises(InvalidInputError, match=word):
        read(changed(peft={"dim": 8, **more}))


def test_adapters_beside_experts_or_weights_in_fp32_are_refused() -> None:
    """Which matrices of experts have adapters depends on releases; frozen weights are priced in bf16."""
    with pytest.raises(InvalidInputError, match="dense layers"):
        read(changed(peft={"dim": 8}), model=shipped_model("mixtral-8x7b"))
    with pytest.raises(InvalidInputError, match="frozen ones in fp32"):
        read(changed(peft={"dim": 8}, model={"torch_dtype": "float32"}))


@pytest.mark.parametrize(("how", "stages"), [("down", 8), ("up", 12)])
def test_virtual_stages_are_rounded_as_asked(how: str, stages: int) -> None:
    """32 layers, three a stage, are eleven stages; four ranks take eight or twelve of them."""
    pipeline = {
        "pp_schedule": "interleaved1f1b", "pp_microbatch_size": 1, "layers_per_stage": 3,
        "round_virtual_stages_to_pp_multiple": how,
    }  # fmt: skip
    found = read(changed(distributed={"pp_size": 4, "pipeline": pipeline}))
    assert len(found.plan.virtual_stages) == stages
    del pipeline["round_virtual_stages_to_pp_multiple"]
    with pytest.raises(InvalidInputError, match="11 virtual stages"):
        read(changed(distributed={"pp_size": 4, "pipeline": pipeline}))


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("model", "_target_", "nemo_automodel.NeMoAutoModelForSequenceClassification.from_pretrained"),
        ("model", "_target_", "nemo_automodel.NeMoAutoModelForImageTextToText.from_pretrained"),
        ("model", "torch_dtype", "float16"),
        ("model", "attn_implementation", "linear"),
        ("model", "num_hidden_layers", 4),
        ("loss_fn", "_target_", "nemo_automodel.components.loss.kd_loss.KDLoss"),
        ("optimizer", "_target_", "dion.Muon"),
        ("optimizer", "exp_avg_dtype", "bf16"),
        ("packed_sequence", "packed_sequence_size", 4096),
        ("peft", "dim", None),
        ("fp8", "enabled", True),
        ("compile", "enabled", True),
        ("distributed", "dp_replicate_size", 3),
        ("distributed", "dp_replicate_size", 8),
        ("distributed", "activation_checkpointing", "selective"),
        ("distributed", "activation_checkpointing", ["full"]),
        ("distributed", "pp_size", 2**40),
        ("autopipeline", "pp_schedule", "1f1b"),
        ("step_scheduler", "local_batch_size", None),
        ("dataset", "seq_len", None),
        ("dataset", "batch_size", 4),
        ("distributed", "mp_policy", {"param_dtype": "float16"}),
    ],
)
def test_what_is_not_priced_is_refused_by_name(section: str, key: str, value: Any) -> None:
    """Other models, other training, other formats, and sizes that are left to a class."""
    with pytest.raises(InvalidInputError, match=key):
        read(changed(**{section: {key: value}}))


def test_another_recipe_is_refused() -> None:
    """The recipe decides what is trained; a full name of the known one is the same."""
    known = "TrainFinetuneRecipeForNextTokenPrediction"
    assert read(RECIPE | {"recipe": f"nemo_automodel.recipes.llm.train_ft.{known}"}).plan == read(RECIPE).plan
    with pytest.raises(InvalidInputError, match="KnowledgeDistillation"):
        read(RECIPE | {"recipe": "KnowledgeDistillationRecipeForNextTokenPrediction"})


def test_any_setting_or_section_can_be_ignored() -> None:
    """DoRA is refused by name; ignored as a section, all of it is in the answer."""
    data = changed(peft={"use_dora": True, "dim": 8})
    with pytest.raises(InvalidInputError, match="peft"):
        read(data)
    found = read(data, ignored=["peft"])
    assert {flag.split(" ")[0] for flag in found.ignored_flags} == {"peft.use_dora", "peft.dim"}
