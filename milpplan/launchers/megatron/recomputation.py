"""Recomputation in Megatron-LM's arguments: which layers and modules, written and read.

It has one granularity, one method and one number for all virtual stages. ``full`` with ``block`` n recomputes the
first n layers of every virtual stage (core/recompute.py counts per TransformerBlock, which is a virtual stage);
with ``uniform`` 1 it recomputes every layer. ``selective`` applies to all layers, module by module. Source:
NVIDIA/Megatron-LM at d98e8a64, core/transformer/transformer_config.py and core/recompute.py.
"""

from __future__ import annotations

from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.launchers.megatron.flags import Arguments, Values
from milpplan.problem import (
    NO_MODULES,
    OFFLOAD_MODULES,
    RECOMPUTE_MODULES,
    DenseMlp,
    Job,
    LatentAttention,
    MixtureOfExperts,
    ModelSpec,
    Plan,
    Recompute,
    module_set,
)
from milpplan.problem.plan import HELD_BY_MOE

DO = (
    "Solve again with --fix recompute=none or recompute=full (any stages), or with --space uniform, where all "
    "layers recompute alike."
)


def selective_modules(model: ModelSpec, job: Job) -> tuple[str, ...]:
    """List the modules of selective recomputation for the model; empty where Megatron-LM has none.

    Without a flash kernel these are the attention scores (``core_attn``). With one: norms, activations of experts,
    and the expanded queries, keys and values of latent attention. A dense layer with grouped-query attention has
    none of them, because Transformer Engine fuses its norms into its products. Delayed scaling of fp8 leaves only
    the latter (core/transformer/transformer_config.py:2002).
    """
    if job.attention_kernel == "unfused":
        return ("core_attn",)
    latent = [isinstance(kind.attention, LatentAttention) for kind in model.kinds]
    experts = [isinstance(kind.mlp, MixtureOfExperts) for kind in model.kinds]
    if not all(a or b for a, b in zip(latent, experts, strict=True)):
        return ()
    wanted = {"layernorm": job.precision != "fp8", "moe_act": any(experts) and job.precision != "fp8"}
    wanted["mla_up_proj"] = any(latent)
    return tuple(name for name, is_so in wanted.items() if is_so)


def kept_notes(model: ModelSpec, job: Job, modules: str) -> tuple[str, ...]:
    """Note activations that the plan's selective recomputation drops and Megatron-LM's modules keep; ``modules``
    are those that its layout names."""
    notes = []
    if job.mtp_layers:
        notes.append(
            "Selective recomputation: layers of multi-token prediction have it here, and not in the plan."
        )
    if job.attention_kernel == "unfused" or modules != NO_MODULES:
        return tuple(notes)
    if not all(isinstance(kind.attention, LatentAttention) for kind in model.kinds):
        notes.append(
            "Selective recomputation: the norm before the attention is part of a product of Transformer Engine "
            "and keeps its output, which the plan counts as dropped."
        )
    if job.precision == "fp8":
        notes.append(
            "Selective recomputation: with delayed scaling Megatron-LM keeps norms and activations of experts, "
            "which the plan counts as dropped."
        )
    dense = any(isinstance(kind.mlp, DenseMlp) for kind in model.kinds)
    shared = any(
        isinstance(kind.mlp, MixtureOfExperts) and kind.mlp.shared_intermediate_size for kind in model.kinds
    )
    if dense or shared:
        where = " and ".join(
            name for name, there in (("dense layers", dense), ("shared experts", shared)) if there
        )
        notes.append(
            f"Selective recomputation: no module drops the activation of {where}; Megatron-LM keeps it, the plan "
            "counts it as dropped."
        )
    return tuple(notes)


def recompute_arguments(model: ModelSpec, job: Job, plan: Plan) -> dict[str, Values]:
    """Write a plan's recomputation as arguments.

    Raises:
        IllegalPlanError: a single number for all virtual stages cannot express it.
    """
    stages = plan.virtual_stages
    full = [stage.recompute.full for stage in stages]
    sizes = [stage.num_layers for stage in stages]
    if plan.selects:
        return _selective(model, job, plan)
    number = max(full)
    if number == 0:
        return {}
    if full == sizes:
        # By blocks, layers of multi-token prediction keep their activations, as in a plan.
        return _whole("block", number) if job.mtp_layers else _whole("uniform", 1)
    if full != [min(number, size) for size in sizes]:
        raise IllegalPlanError(
            f"The virtual stages recompute {_listed(full)} layers wholly, and hold {_listed(sizes)}.",
            "Expected one number for all virtual stages: --recompute-method block takes the first "
            "--recompute-num-layers layers of each (core/recompute.py).",
            DO,
        )
    return _whole("block", number)


def offload_arguments(plan: Plan) -> dict[str, Values]:
    """Write the modules whose inputs lie on the host as arguments.

    Raises:
        IllegalPlanError: layers are recomputed wholly besides.
    """
    named = plan.layout.offload_modules
    if named == NO_MODULES:
        return {}
    if any(stage.recompute.full for stage in plan.virtual_stages):
        raise IllegalPlanError(
            f"The plan keeps inputs of {named.replace('+', ', ')} on the host and recomputes layers wholly.",
            "Expected selective recomputation or none: a checkpoint of a whole layer offloads its input alone "
            "(core/transformer/transformer_layer.py).",
            "Solve again with --fix recompute=none or --fix offload_modules=default.",
        )
    return {"--fine-grained-activation-offloading": (), "--offload-modules": tuple(named.split("+"))}


def read_offload(given: Arguments, model: ModelSpec) -> str:
    """Read the modules whose inputs lie on the host; those that no layer has change nothing.

    Raises:
        InvalidInputError: a module is not priced, or one flag is given without the other.
    """
    modules = set(given.texts("--offload-modules"))
    strange = modules - set(OFFLOAD_MODULES)
    if strange or bool(modules) != given.given("--fine-grained-activation-offloading"):
        raise InvalidInputError(
            f"Inputs of {', '.join(sorted(modules)) or 'none'} on the host (--offload-modules) are not priced.",
            f"Expected --fine-grained-activation-offloading with modules of {', '.join(OFFLOAD_MODULES)}.",
            "Change the modules.",
        )
    present = {name for run in model.layers for name in run.offload_modules}
    return module_set(modules & present, OFFLOAD_MODULES)


def _whole(method: str, number: int) -> dict[str, Values]:
    return {
        "--recompute-granularity": ("full",),
        "--recompute-method": (method,),
        "--recompute-num-layers": (str(number),),
    }


def _selective(model: ModelSpec, job: Job, plan: Plan) -> dict[str, Values]:
    wanted = [Recompute(selective=stage.num_layers) for stage in plan.virtual_stages]
    if [stage.recompute for stage in plan.virtual_stages] != wanted:
        counts = [stage.recompute.selective for stage in plan.virtual_stages]
        raise IllegalPlanError(
            f"The virtual stages recompute {_listed(counts)} layers selectively, and not all of them.",
            "Expected all layers or none: --recompute-granularity selective is for every layer, and full cannot "
            "stand beside it.",
            DO,
        )
    named = plan.layout.recompute_modules
    modules = selective_modules(model, job) if named == NO_MODULES else tuple(named.split("+"))
    if not modules:
        raise IllegalPlanError(
            "All layers are recomputed selectively, with a flash attention kernel.",
            "Expected layers with experts (not with delayed fp8) or latent attention: of others "
            "--recompute-modules can drop neither the norms, which are part of the products, nor the activation.",
            "Solve again with --fix recompute=none or recompute=full, or --fix recompute_modules=mlp.",
        )
    return {"--recompute-granularity": ("selective",), "--recompute-modules": modules}


def _listed(counts: list[int]) -> str:
    return ", ".join(map(str, counts[:16])) + (", ..." if len(counts) > 16 else "")


def granularity_of(given: Arguments) -> str | None:
    """Read the granularity of recomputation; None without any."""
    granularity = given.text("--recompute-granularity")
    return "selective" if granularity is None and given.given("--recompute-activations") else granularity


def read_counts(given: Arguments, layers: tuple[int, ...], *, has_modules: bool) -> list[dict[str, int]]:
    """Read the recompute counts of every virtual stage.

    Args:
        given: the arguments.
        layers: layers of every virtual stage.
        has_modules: the model has some module of selective recomputation.

    Raises:
        InvalidInputError: one input is kept for several layers.
    """
    granularity = granularity_of(given)
    if granularity == "selective":
        return [{"selective": size * has_modules} for size in layers]
    if granularity is None:
        return [{} for _ in layers]
    number = given.needed("--recompute-num-layers")
    if given.text("--recompute-method") == "block":
        return [{"full": min(number, size)} for size in layers]
    if number > 1:
        raise InvalidInputError(
            f"--recompute-method uniform keeps the input of every {number}th layer alone.",
            "Expected --recompute-num-layers 1: a plan keeps the input of every layer that is recomputed.",
            "Use 1 to compare it as such a run.",
        )
    return [{"full": size} for size in layers]


def read_modules(given: Arguments, model: ModelSpec, job: Job) -> str:
    """Read the modules of selective recomputation; empty if the model has none of them.

    Modules that no layer has change nothing. The attention scores alone, without a flash kernel, are the default.

    Raises:
        InvalidInputError: a module is not priced, or is inside another.
    """
    modules = set(given.texts("--recompute-modules")) or {"core_attn"}
    if modules == {"core_attn"} and job.attention_kernel == "unfused":
        return NO_MODULES
    strange = modules - set(RECOMPUTE_MODULES)
    inside = modules & HELD_BY_MOE if "moe" in modules else set()
    if strange or inside:
        raise InvalidInputError(
            f"Selective recomputation of {', '.join(sorted(modules))} is not priced.",
            f"Expected modules of {', '.join(RECOMPUTE_MODULES)}, and moe without those inside it.",
            "Change the modules, or import it without recomputation to see the difference that they make at most.",
        )
    present = modules & set(model.recompute_modules)
    return module_set(present) if present else ""
