"""Launcher DeepSpeed, export and import: its JSON, a training program that reads it, and the scripts that start
it.

The program builds a dense model from a Hugging Face config. The reader of such configs reads every candidate back,
which must give the model.
"""

from __future__ import annotations

import json
from typing import Any

from milpplan.errors import IllegalPlanError, InvalidInputError, MilpplanError
from milpplan.launchers.deepspeed.settings import (
    DEEPSPEED,
    QUIET,
    grad_dtype_of,
    kernel_of,
    known,
    layout_of,
    losses_of,
    plan_of,
    settings_of,
    sharding_of,
    stage_of,
)
from milpplan.launchers.expressible import (
    check_replicas,
    config_launch,
    field_refusals,
    format_refusals,
    job_refusals,
    layout_differences,
    model_differences,
    recompute_refusals,
    refuse,
    whole_nodes,
)
from milpplan.launchers.records import (
    ConfigLaunch,
    Imported,
    ImportRequest,
    Refusal,
    check_gpus,
    check_vocabulary,
    job_of,
)
from milpplan.launchers.scripts import header, slurm_script, torchrun_script
from milpplan.launchers.settings import Settings, admitted, check_priced, flat, is_quiet, nested
from milpplan.problem.huggingface.config import model_from_config
from milpplan.problem.model import DenseMlp, GroupedQueryAttention, ModelSpec
from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem
from milpplan.problem.reading import parse_json, shown

AUTO = "auto"
"""Value that transformers replaces at its start from its own arguments."""


def imported(request: ImportRequest) -> Imported:
    """Read a configuration into a problem and a plan.

    Args:
        request.text: JSON.
        request.source: its name.
        request.hardware: the cluster.
        request.num_gpus: processes; None: the file's, or the number that follows from its batch sizes.
        request.model: its description; needed where the file has none.
        request.vocab_size: None, because the model has it.
        request.ignored: settings (section.name) whose effect on the cost the caller ignores.

    Raises:
        InvalidInputError: the file cannot be read, or has settings that change the cost and are not priced.
        IllegalPlanError: DeepSpeed would refuse the configuration.
    """
    data = parse_json(request.text, request.source)
    settings, left_out = admitted(flat(data), known(), request.ignored, "DeepSpeed", QUIET)
    _check_filled_in(settings)
    _look_at_what_is_off(settings)
    spec = _model(data, settings, request.model, request.vocab_size, request.source)
    notes: list[str] = []
    length = settings.size("milpplan.sequence_length")
    whole = _own(settings, "recompute", False, notes)
    kernel = _own(settings, "attn_implementation", "sdpa", notes)
    world = request.num_gpus
    if settings.get("milpplan.world_size") is not None:
        world = settings.degree("milpplan.world_size")
        check_gpus(request.num_gpus, world, f"{request.source} (milpplan.world_size)")
    _check_formats(settings)
    grad_dtype = grad_dtype_of(settings)
    layout = layout_of(settings, world)
    stage, overlap = sharding_of(settings)
    losses = losses_of(stage, layout.dp, grad_dtype, overlap)
    if losses:
        raise IllegalPlanError(
            f"The run is not one that is priced: {'; '.join(losses)}.",
            "Expected a run that a plan can tell without loss.",
            "Change the settings to compare it as the nearest run that is.",
        )
    check_priced(settings, QUIET)
    job = job_of(layout, length, grad_dtype=grad_dtype, attention_kernel=kernel_of(kernel))
    plan = plan_of(layout, spec.num_layers, whole)
    problem = Problem(model=spec, hardware=request.hardware, job=job)
    return Imported(problem, plan, (), left_out, tuple(notes))


def _look_at_what_is_off(settings: Settings) -> None:
    """Mark settings of disabled features as looked up: offloading without a device, and everything at ZeRO 0."""
    for part in ("offload_optimizer", "offload_param"):
        section = f"zero_optimization.{part}"
        if settings.values.get(f"{section}.device") == "none":
            settings.looked_at |= {name for name in settings.values if name.startswith(f"{section}.")}
    if settings.get("zero_optimization.stage") == 0:
        settings.looked_at |= {name for name in settings.values if name.startswith("zero_optimization.")}


def _check_filled_in(settings: Settings) -> None:
    left = [name for name, value in settings.values.items() if value == AUTO and not is_quiet(name, QUIET)]
    if left:
        raise InvalidInputError(
            f"{', '.join(left[:6])} {'are' if len(left) > 1 else 'is'} auto: only what starts the run knows.",
            "Expected values.",
            "Write them into the file.",
        )


def _model(
    data: dict[str, Any], settings: Settings, model: ModelSpec | None, vocab_size: int | None, source: str
) -> ModelSpec:
    own = data.get("milpplan")
    said = any(name.startswith("milpplan.model.") for name in settings.values)
    config = own.get("model") if said and isinstance(own, dict) else None
    if config is None and model is None:
        raise InvalidInputError(
            f"{source} does not say which model it trains.",
            "Expected the file of an export, or --model.",
            "Give --model NAME.",
        )
    built = model if config is None else model_from_config(config, "imported" if model is None else model.name)
    assert built is not None
    if model is not None and model_differences(model, built):
        raise InvalidInputError(
            f"The file trains another model than {model.name}.", "Expected its sizes.", "Leave --model out."
        )
    check_vocabulary(vocab_size, built, "the model")
    return model or built


def _own(settings: Settings, name: str, otherwise: Any, notes: list[str]) -> Any:
    """Return a setting of the training program; add a note with its assumed value where the file does not have
    it."""
    value = settings.get(f"milpplan.{name}")
    if value is None:
        notes.append(f"{name} is not in the file: {otherwise} is taken.")
        return otherwise
    return value


def _check_formats(settings: Settings) -> None:
    """Check for bf16 with AdamW.

    Raises:
        InvalidInputError: the number format or the optimizer differs.
    """
    if not settings.switch("bf16.enabled"):
        raise InvalidInputError(
            "bf16.enabled is not true.",
            "Expected bf16: other formats are not priced.",
            "Enable bf16 to compare it as such a run.",
        )
    optimizer = settings.get("optimizer.type")
    if optimizer is not None and optimizer.lower() not in ("adam", "adamw"):
        raise InvalidInputError(
            f"optimizer.type is {shown(optimizer)}.",
            "Expected Adam or AdamW, whose states and update are priced.",
            "Use AdamW to compare it as such a run.",
        )


FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of ``model_type`` whose classes differ in biases, windows, and norms of queries and keys."""
PROGRAM = '''"""Trains the model of deepspeed.json with DeepSpeed, on made-up data unless load_batch has others."""

import json
import sys

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM

STEPS = 100


def load_batch(size, length, vocabulary, device):
    """The tokens of a micro-batch, [size, length]; put your data here."""
    return torch.randint(vocabulary, (size, length), device=device)


def main(path):
    with open(path) as file:
        settings = json.load(file)
    own = settings.pop("milpplan")
    fields = dict(own["model"])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, use_cache=False)
    config._attn_implementation = own["attn_implementation"]
    deepspeed.init_distributed()
    if torch.distributed.get_world_size() != own["world_size"]:
        sys.exit(f"{path} is for {own['world_size']} processes")
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=settings["zero_optimization"]["stage"] == 3):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if own["recompute"]:
        # Every layer, wholly: nothing but its input is kept.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    size, length = settings["train_micro_batch_size_per_gpu"], own["sequence_length"]
    for _ in range(STEPS * settings["gradient_accumulation_steps"]):
        tokens = load_batch(size, length, config.vocab_size, engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main(sys.argv[1])
'''
CONFIG, TRAINER = "deepspeed.json", "deepspeed_train.py"
SCRIPT, BATCH_SCRIPT = "deepspeed.sh", "deepspeed.sbatch"
TRAINING: dict[str, Any] = {
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "steps_per_print": 1,
}
"""Settings that a run needs and a plan does not decide."""


class DeepSpeed:
    """Launcher DeepSpeed, export and import: its JSON configuration and a training program that reads it."""

    capability = DEEPSPEED

    def check(self, problem: Problem, version: str) -> None:
        """Refuse a problem for which DeepSpeed can run no plan.

        Raises:
            IllegalPlanError: gives all reasons.
        """
        refusals = format_refusals(problem, ("flash", "unfused"), ("fp32", "bf16"))
        if config_of(problem.model) is None:
            refusals.append(Refusal(f"{problem.model.name} is none of the dense families that its program builds"))
        refuse(DEEPSPEED.name, refusals)

    def export(self, problem: Problem, plan: Plan, version: str) -> ConfigLaunch:
        """Turn a plan into a launch.

        Raises:
            IllegalPlanError: DeepSpeed's configuration cannot express the plan; gives all reasons.
        """
        check_replicas(DEEPSPEED, plan)
        uneven, fields = whole_nodes(problem, plan.layout)[2], field_refusals(DEEPSPEED, plan.layout)
        refusals = [*job_refusals(problem), *recompute_refusals(plan), *uneven, *fields]
        if problem.job.precision != "bf16":
            refusals.append(Refusal(f"precision {problem.job.precision}: the program computes in bf16"))
        config = config_of(problem.model)
        if config is None:
            names = ", ".join(FAMILIES)
            refusals.append(
                Refusal(f"{problem.model.name} is none of the dense families that the program builds ({names})")
            )
        else:
            refusals += _plan_refusals(problem, plan, config, refusals)
        refuse(DEEPSPEED.name, refusals)
        settings, notes = settings_of(problem, plan, config or {}), _notes(problem, plan, config or {})
        return config_launch(DEEPSPEED, version, problem, plan, settings, notes)

    def files(self, launch: ConfigLaunch, version: str) -> dict[str, str]:
        """Write the launch as files by name; the first is the configuration. ``version`` is milpplan's."""
        before = ('HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)',)
        program = (f'"$HERE/{TRAINER}"', f'"$HERE/{CONFIG}"')
        comment = "\n".join(header(launch, version))
        return {
            CONFIG: _config(launch, version),
            TRAINER: f"{comment}\n{PROGRAM}",
            SCRIPT: torchrun_script(launch, version, program, before),
            BATCH_SCRIPT: slurm_script(launch, version, SCRIPT),
        }

    def read(self, request: ImportRequest) -> Imported:
        """Read a configuration into a problem and a plan."""
        return imported(request)


def config_of(model: ModelSpec) -> dict[str, Any] | None:
    """Return the config of a model; None where no family represents it."""
    kind = model.kinds[0]
    if len(model.kinds) > 1 or not isinstance(kind.attention, GroupedQueryAttention):
        return None
    if not isinstance(kind.mlp, DenseMlp):
        return None
    sizes = {
        "hidden_size": model.hidden_size,
        "intermediate_size": kind.mlp.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": kind.attention.num_attention_heads,
        "num_key_value_heads": kind.attention.num_key_value_heads,
        "head_dim": kind.attention.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "tie_word_embeddings": model.tie_word_embeddings,
    }
    if kind.attention.output_bias:
        sizes["attention_bias"] = True
    if kind.attention.sliding_window is not None:
        sizes["sliding_window"] = kind.attention.sliding_window
    candidates = ({"model_type": family} | sizes for family in FAMILIES)
    return next((config for config in candidates if _builds(config, model)), None)


def _builds(config: dict[str, Any], model: ModelSpec) -> bool:
    try:
        return not model_differences(model_from_config(config, model.name), model)
    except MilpplanError:
        return False


def _plan_refusals(problem: Problem, plan: Plan, config: dict[str, Any], before: list[Refusal]) -> list[Refusal]:
    """List the differences between the plan and the run that the files start."""
    layout, job = plan.layout, problem.job
    stage = stage_of(layout, job.grad_dtype)
    named = {refusal.why.split("=")[0] for refusal in before}
    refusals = [Refusal(text) for text in losses_of(stage, layout.dp, job.grad_dtype, layout.overlap_grad_reduce)]
    if layout.num_gpus == layout.dp:
        runs = layout_of(Settings(settings_of(problem, plan, config), known()), layout.dp)
        reasons = {
            "overlap_grad_reduce": "at stage 0 gradients are reduced after the backward",
            "overlap_param_gather": "up to stage 2 weights are gathered after the update (stage_1_and_2.py, step)",
            "zero_stage": "there is one replica",
            "rank_order": "there are data-parallel ranks alone",
        }
        refusals += layout_differences(plan, runs, reasons, 1, named)
    return refusals


def _notes(problem: Problem, plan: Plan, config: dict[str, Any]) -> tuple[str, ...]:
    notes = [
        f"The model is built as {config.get('model_type')}: which function gates it is no part of a plan.",
        "The program has norms, activations and the loss of transformers, which are not fused as the plan prices "
        "them unless torch.compile fuses them.",
    ]
    if not problem.model.learned_positions:
        notes.append("Rotary base and scaling are not part of a plan: add rope_theta and the like to the model.")
    if plan.layout.zero_stage == 3:
        notes.append("Weights below stage3_param_persistence_threshold stay whole on every rank: the norms.")
    return tuple(notes)


def _config(launch: ConfigLaunch, version: str) -> str:
    tree = nested(launch.settings)
    tree["milpplan"] = {"about": [*launch.title, f"Written by milpplan {version}."], **tree["milpplan"]}
    own = tree.pop("milpplan")
    return json.dumps(tree | TRAINING | {"milpplan": own}, indent=2) + "\n"
