"""Run as torchtitan's settings in each dialect, and back: ``section.name`` to value.

The dialects: TOML up to 0.2.2; a Python configuration in 0.3.0, with batches in sequences; a Python configuration
on main since 2026-08-20 (b5bcd76c), with batches in tokens. Source: torchtitan/config/job_config.py at 0.2.2,
torchtitan/config/configs.py and trainer.py at 0.3.0 and b5bcd76c; names of earlier dialects: config_manager.py
before 0.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from milpplan.errors import InvalidInputError
from milpplan.launchers import Known, known_settings
from milpplan.launchers.capabilities import Mode
from milpplan.launchers.settings import Settings
from milpplan.launchers.torchtitan.run import NEWEST, V022, Pair, Run, prices_products
from milpplan.problem import ModelSpec
from milpplan.problem.reading import shown

_P, _T = "parallelism", "training"
KEYS = "torchtitan_keys.json"
OLDER = "older"
"""Part of the schema with the settings that only dialects before 0.2.2 have."""
QUIET: Mapping[str, str] = {
    r"job\.(?!custom_config_module$).*|dump_folder|hf_assets_path|"
    r"model\.(hf_assets_path|tokenizer_path|print_after_conversion)": (
        "names of files and what is printed at the start"
    ),
    r"(profiling|profiler|metrics)(\..*)?": "records steps; those that are recorded are no steps that are priced",
    r"checkpoint(\..*)?|(validation|validator)(\..*)?": "works between steps",
    r"lr_scheduler(\..*)?|optimizer\.(lr|beta1|beta2|eps|weight_decay)|training\.(steps|max_norm)": (
        "numbers of the update, whose work does not depend on them"
    ),
    r"training\.(dataset|dataset_path|dataloader\..*|gc_freq|gc_debug)|dataloader(\..*)?|tokenizer|debug\.seed": (
        "data and the host's own work, which are not priced"
    ),
    r"comm\.(init|train)_timeout_seconds|comm\.(trace_buf_size|save_traces_.*)": "limits and records of messages",
    r"comm|debug|override|optimizer|loss\..*|debug\.(print_config|save_config_file|enable_structured_logging)": (
        "the name of a section's class, sizes of the loss's parts, and what is printed"
    ),
    r"debug\.moe_force_load_balance": "experts are priced as balanced",
    r"model\.attn_backend": "every attention that a flavor takes is fused",
    r"training\.disable_cuda_graphs|compile\.backend": "launches of kernels, which are not priced one by one",
    r"parallelism\.(pipeline_parallel_expert_parallel_overlap|spmd_backend)": (
        "acts in schedules that are refused, or chooses between spellings of the same shards"
    ),
    r"parallelism\.context_parallel_.*(?<!degree)": "acts with context parallelism, which is refused",
    r"activation_checkpoint\.(preserve_rng_state|determinism_check|debug|early_stop|visualize.*|selective_ac_option|"
    r"memory_budget|per_op_.*|force_recompute_.*)": "acts in refused modes, or is looked at where it acts",
    r"quantize\..*": "acts where model.converters names a converter, which is refused",
    r"fault_tolerance\.(?!enable$).*|memory_estimation\.disable_fake_mode": "acts where it is enabled: refused",
    r"float8\.(?!enable_float8_linear$).*|mx\..*|model\.norm_type|optimizer\.fused": (
        "acts with float8, which is refused; kernels of norms and of the update, which are priced as fused"
    ),
    r"experimental\.context_parallel_rotate_method": "acts with context parallelism, which is refused",
    r"training\.(warmup_steps|seed|checkpoint_.*)": "older names of what is quiet above",
}
"""Patterns of settings that have no effect on the cost, with reasons."""
RENAMED: Mapping[str, str] = {
    "training.batch_size": f"{_T}.local_batch_size",
    "training.data_parallel_degree": f"{_P}.data_parallel_shard_degree",
    **{
        f"training.{name}": f"{_P}.{name}"
        for name in (
            "data_parallel_shard_degree",
            "data_parallel_replicate_degree",
            "tensor_parallel_degree",
            "context_parallel_degree",
            "pipeline_parallel_degree",
            "fsdp_reshard_after_forward",
            "disable_loss_parallel",
        )
    },
    **{
        f"experimental.{name}": f"{_P}.{name}"
        for name in (
            "pipeline_parallel_degree",
            "context_parallel_degree",
            "enable_async_tensor_parallel",
            "pipeline_parallel_schedule",
            "pipeline_parallel_schedule_csv",
            "pipeline_parallel_layers_per_stage",
            "pipeline_parallel_microbatch_size",
        )
    },
    "training.compile": "compile.enable",
    "training.deterministic": "debug.deterministic",
}
"""Settings of dialects before 0.2.2, with their names in 0.2.2."""


def known(version: str) -> Known:
    """Load every setting of a version with its default, and its choices or type. 0.2.2 also has the settings of
    earlier dialects."""
    schema = known_settings(KEYS, version)
    return {**known_settings(KEYS, OLDER), **schema} if version == V022 else schema


def translated(settings: Settings) -> tuple[Settings, tuple[str, ...]]:
    """Rename settings of older dialects to their names in 0.2.2, with notes.

    Raises:
        InvalidInputError: an older and a newer name have different values.
    """
    values, notes = dict(settings.values), []
    for old in [name for name in RENAMED if name in values]:
        new, value = RENAMED[old], values.pop(old)
        if values.setdefault(new, value) != value:
            raise InvalidInputError(
                f"{old} is {shown(value)}, and {new} is {shown(values[new])}.",
                "Expected one of them: the first is the older name of the second.",
                f"Take {old} out.",
            )
        notes.append(f"{old} is read as {new}, its name in {V022}.")
    return Settings(values, settings.known), tuple(notes)


def head_name(version: str) -> str:
    """Return the head's name in lists of modules (distributed/pipeline_parallel.py)."""
    return "output" if version == V022 else "lm_head"


def stage_modules(version: str, stages: tuple[int, ...]) -> list[list[str]]:
    """Write ``module_fqns_per_model_part`` for stages with given numbers of layers."""
    parts, layer = [], 0
    for size in stages:
        parts.append([f"layers.{index}" for index in range(layer, layer + size)])
        layer += size
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", head_name(version)]
    return parts


def settings_of(run: Run) -> dict[str, Any]:
    """Write the settings of a run, with those that every launch needs."""
    settings: dict[str, Any] = {"model.name": run.flavor[0], "model.flavor": run.flavor[1]}
    settings |= _batch(run)
    settings |= {
        f"{_T}.dtype": "float32",
        f"{_T}.mixed_precision_param": "bfloat16",
        f"{_T}.mixed_precision_reduce": "float32",
        f"{_P}.data_parallel_replicate_degree": run.replicate,
        f"{_P}.data_parallel_shard_degree": run.shard,
        f"{_P}.fsdp_reshard_after_forward": run.reshard,
        f"{_P}.tensor_parallel_degree": run.tp,
        f"{_P}.context_parallel_degree": run.cp,
        f"{_P}.pipeline_parallel_degree": run.pp,
    }
    if run.version != V022:
        settings[f"{_P}.enable_sequence_parallel"] = run.sequence_parallel
        # torchtitan cannot compile the whole step with a pipeline or with the experts' messages.
        settings[f"{_T}.disable_cuda_graphs"] = True
    if run.pp > 1:
        settings[f"{_P}.pipeline_parallel_schedule"] = run.schedule
        settings[f"{_P}.module_fqns_per_model_part"] = stage_modules(run.version, run.stages)
    if run.experts:
        settings[f"{_P}.expert_parallel_degree"] = run.ep
        if run.version == V022:
            settings[f"{_P}.expert_tensor_parallel_degree"] = run.etp
        backend = "deepep" if run.deduplicated else "standard"
        settings[_backend(run.version)] = backend
    if run.version == V022:
        settings["activation_checkpoint.mode"] = run.recompute
        if run.recompute == "selective":
            settings["activation_checkpoint.selective_ac_option"] = "op"
    else:
        settings["activation_checkpoint.policy"] = POLICIES[run.recompute]
    return settings | {"compile.enable": True, "compile.components": ["model", "loss"]}


def _backend(version: str) -> str:
    return f"{_P}.expert_parallel_comm_backend" if version == V022 else "model.moe_comm_backend"


def _batch(run: Run) -> dict[str, Any]:
    local, total = run.micro_batch_size * run.micro_batches, run.global_batch_size
    if run.version == NEWEST:
        settings: dict[str, Any] = {
            f"{_T}.num_tokens_per_microbatch_per_dp_rank": run.micro_batch_size * run.sequence_length,
            f"{_T}.num_tokens_per_train_step": total * run.sequence_length,
            f"{_T}.max_context_length": run.sequence_length,
        }
        return settings | ({f"{_P}.num_pp_microbatches": run.micro_batches} if run.pp > 1 else {})
    settings = {
        f"{_T}.local_batch_size": local,
        f"{_T}.global_batch_size": total,
        f"{_T}.seq_len": run.sequence_length,
    }
    return settings | ({f"{_P}.pipeline_parallel_microbatch_size": run.micro_batch_size} if run.pp > 1 else {})


def run_of(settings: Settings, version: str, flavor: Pair, model: ModelSpec, world: int | None) -> Run:
    """Read the run that settings describe.

    Args:
        settings: by ``section.name``.
        version: the dialect.
        flavor: the model's name and flavor.
        model: the model of that name and flavor.
        world: processes, where data_parallel_shard_degree is -1.

    Raises:
        InvalidInputError: settings contradict each other, or no plan can express them.
    """
    names = (
        "data_parallel_replicate",
        "context_parallel",
        "tensor_parallel",
        "pipeline_parallel",
        "expert_parallel",
    )
    replicate, cp, tp, pp, ep = (settings.degree(f"{_P}.{name}_degree") for name in names)
    shard = _shard(settings, replicate * cp * tp * pp, world)
    etp = settings.degree(f"{_P}.expert_tensor_parallel_degree") if version == V022 else 1
    sequence, size, count, steps = _batches(settings, version, pp, replicate * shard)
    reshard = settings.text(f"{_P}.fsdp_reshard_after_forward")
    schedule = settings.text(f"{_P}.pipeline_parallel_schedule")
    # Looked up even where it has no effect, so that it is never reported as not priced.
    parallel = version == V022 or settings.switch(f"{_P}.enable_sequence_parallel")
    deduplicated, experts = settings.text(_backend(version)) == "deepep", model.has_experts
    return Run(
        version=version,
        flavor=flavor,
        experts=experts,
        sequence_length=sequence,
        replicate=replicate,
        shard=shard,
        cp=cp,
        tp=tp,
        pp=pp,
        ep=ep,
        etp=etp if experts and ep > 1 else 1,
        sequence_parallel=tp > 1 and parallel,
        schedule=schedule if pp > 1 else "1F1B",
        stages=_stages(settings, version, model.num_layers, pp, schedule),
        micro_batch_size=size,
        micro_batches=count,
        accumulations=steps,
        reshard=("never" if pp > 1 else "always") if reshard == "default" else reshard,
        recompute=_recompute(settings, version, model),
        deduplicated=experts and ep > 1 and deduplicated,
    )


def _shard(settings: Settings, others: int, world: int | None) -> int:
    shard = settings.number(f"{_P}.data_parallel_shard_degree")
    if shard >= 1:
        if world is not None and shard * others != world:
            raise InvalidInputError(
                f"The degrees make {shard * others} processes, and {world} are given.",
                "Expected their product to be the number of processes (distributed/parallel_dims.py).",
                "Correct the degrees, or leave --gpus out.",
            )
        return shard
    if shard != -1 or world is None or world % others:
        raise InvalidInputError(
            f"data_parallel_shard_degree is {shard}, with {world or 'unknown'} processes over {others}.",
            "Expected a degree, or -1 and a number of processes that the other degrees divide.",
            "Give --gpus, or write the degree.",
        )
    return world // others


def _batches(settings: Settings, version: str, pp: int, dp: int) -> tuple[int, int, int, int]:
    """Return tokens per sequence, sequences per micro-batch, micro-batches per pipeline run, and runs per step."""
    if version == NEWEST:
        sequence = settings.size(f"{_T}.max_context_length")
        size = _quotient(
            settings.size(f"{_T}.num_tokens_per_microbatch_per_dp_rank"),
            sequence,
            "num_tokens_per_microbatch_per_dp_rank over max_context_length",
        )
        count = settings.size(f"{_P}.num_pp_microbatches") if pp > 1 else 1
        total = settings.number(f"{_T}.num_tokens_per_train_step")
        return (
            sequence,
            size,
            count,
            _quotient(total, sequence * size * count * dp, "num_tokens_per_train_step") if total > 0 else 1,
        )
    local = settings.size(f"{_T}.local_batch_size")
    size = settings.size(f"{_P}.pipeline_parallel_microbatch_size") if pp > 1 else local
    total = settings.number(f"{_T}.global_batch_size")
    steps = _quotient(total, local * dp, "global_batch_size") if total > 0 else 1
    return settings.size(f"{_T}.seq_len"), size, _quotient(local, size, "local_batch_size"), steps


def _quotient(whole: int, part: int, name: str) -> int:
    if whole % part:
        raise InvalidInputError(
            f"{name} is {whole}, no multiple of {part}.",
            "Expected whole micro-batches (torchtitan refuses others, too).",
            "Correct the batch or the degrees.",
        )
    return whole // part


POLICIES: dict[Mode, str | None] = {"none": None, "selective": "SelectiveAC", "full": "FullAC"}
"""Policies of ``activation_checkpoint``, by recompute mode."""


def _recompute(settings: Settings, version: str, model: ModelSpec) -> Mode:
    """Read what is recomputed: whole layers, no layers, or all but the operators that SelectiveAC keeps.

    Source: torchtitan at b5bcd76c, distributed/activation_checkpoint.py, SelectiveAC; 0.2.2 has it as
    ``selective_ac_option`` "op", and "1" is every layer.

    Raises:
        InvalidInputError: what is recomputed is not priced.
    """
    section = "activation_checkpoint."
    names = "per_op_sac_force_recompute_mm_shapes_by_fqns", "force_recompute_mm_shapes_by_fqns"
    forced = settings.get(section + names[version != V022])
    if version == V022:
        mode, option = settings.text(f"{section}mode"), settings.get(f"{section}selective_ac_option")
        words: dict[object, Mode] = {"full": "full", "none": "none"}
        if mode == "selective" and option in ("1", "op"):
            words["selective"] = "full" if option == "1" else "selective"
    else:
        mode = settings.get(f"{section}policy")
        words = {policy: name for name, policy in POLICIES.items()}
    if words.get(mode) == "selective" and not (prices_products(model, version) and forced == ["moe.router.gate"]):
        del words[mode]
    if mode not in words:
        raise InvalidInputError(
            f"activation_checkpoint.{'mode' if version == V022 else 'policy'} is {shown(mode)}.",
            "Expected full or none, or every second product of layers with grouped-query attention without biases "
            f"(with experts not in {V022}): what others keep is not priced.",
            "Use full or none to see the two ends between which it lies.",
        )
    return words[mode]


def _stages(settings: Settings, version: str, layers: int, pp: int, schedule: str) -> tuple[int, ...]:
    """Return the layers of every virtual stage.

    They are the listed modules, or torchtitan's even split with embedding and head as layers
    (distributed/pipeline_parallel.py, generate_llm_fqn_per_model_part).
    """
    listed = settings.get(f"{_P}.module_fqns_per_model_part")
    first = settings.number(f"{_P}.pipeline_parallel_first_stage_less_layers")
    last = settings.number(f"{_P}.pipeline_parallel_last_stage_less_layers")
    each = settings.get(f"{_P}.pipeline_parallel_layers_per_stage")
    if pp == 1:
        return (layers,)
    if listed is not None:
        return _listed(listed, version)
    total = layers + first + last
    count = pp * (1 if schedule in ("1F1B", "GPipe") else 2)
    if each is not None:
        count = -(-total // settings.degree(f"{_P}.pipeline_parallel_layers_per_stage"))
    if count > total or min(first, last) < 0 or max(first, last) > total // count:
        raise InvalidInputError(
            f"Stages with {first} and {last} layers less at the ends, over {count} stages of {total} layers.",
            "Expected no more than the layers of a stage (distributed/pipeline_parallel.py).",
            "Correct pipeline_parallel_first_stage_less_layers and its twin, or list the modules.",
        )
    sizes = [total // count + (index < total % count) for index in range(count)]
    sizes[0] -= first
    sizes[-1] -= last
    return tuple(sizes)


def _listed(listed: list[list[str]], version: str) -> tuple[int, ...]:
    sizes = tuple(sum(name.startswith("layers.") for name in part) for part in listed)
    if not listed or listed != stage_modules(version, sizes):
        raise InvalidInputError(
            f"module_fqns_per_model_part is {shown(listed)}.",
            f"Expected tok_embeddings first, layers.0 and so on in order, norm and {head_name(version)} last.",
            "Correct the list: a plan has embedding and head at the ends.",
        )
    return sizes
