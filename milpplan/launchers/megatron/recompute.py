"""Recomputation as Megatron-LM's arguments: one granularity, one method and one number for all virtual stages.

``full`` with ``block`` n recomputes the first n layers of every virtual stage (core/recompute.py counts per
TransformerBlock, which is a virtual stage); with ``uniform`` 1 it recomputes every layer. ``selective`` applies to
all layers, module by module. Source: NVIDIA/Megatron-LM at d98e8a64, core/transformer/transformer_config.py and
core/recompute.py.
"""

from __future__ import annotations

from milpplan.errors import IllegalPlanError
from milpplan.launchers.megatron.arguments import Values
from milpplan.problem.model import DenseMlp, LatentAttention, MixtureOfExperts, ModelSpec
from milpplan.problem.plan import Plan, Recompute
from milpplan.problem.problem import Job

DO = (
    "Solve again with --fix recompute=none or recompute=full (any stages), or with --space uniform, where all "
    "layers recompute alike."
)


def selective_modules(model: ModelSpec, job: Job) -> tuple[str, ...]:
    """List the modules of selective recomputation for the model; empty where Megatron-LM has none.

    Without a flash kernel these are the attention scores (``core_attn``). With one: norms, activations of experts,
    and the expanded queries, keys and values of latent attention. A dense layer with grouped-query attention has
    none of them, because Transformer Engine fuses its norms into its products.
    """
    if job.attention_kernel == "unfused":
        return ("core_attn",)
    latent = [isinstance(kind.attention, LatentAttention) for kind in model.kinds]
    experts = [isinstance(kind.mlp, MixtureOfExperts) for kind in model.kinds]
    if not all(a or b for a, b in zip(latent, experts, strict=True)):
        return ()
    modules = ["layernorm"]
    if any(experts):
        modules.append("moe_act")
    if any(latent):
        modules.append("mla_up_proj")
    return tuple(modules)


def kept_notes(model: ModelSpec, job: Job) -> tuple[str, ...]:
    """Note activations that the plan's selective recomputation drops and Megatron-LM's modules keep."""
    if job.attention_kernel == "unfused":
        return ()
    notes = []
    if not all(isinstance(kind.attention, LatentAttention) for kind in model.kinds):
        notes.append(
            "Selective recomputation: the norm before the attention is part of a product of Transformer Engine "
            "and keeps its output, which the plan counts as dropped."
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
    if sum(stage.recompute.selective for stage in stages):
        return _selective(model, job, plan)
    number = max(full)
    if number == 0:
        return {}
    if full == sizes:
        return _whole("uniform", 1)
    if full != [min(number, size) for size in sizes]:
        raise IllegalPlanError(
            f"The virtual stages recompute {_listed(full)} layers wholly, and hold {_listed(sizes)}.",
            "Expected one number for all virtual stages: --recompute-method block takes the first "
            "--recompute-num-layers layers of each (core/recompute.py).",
            DO,
        )
    return _whole("block", number)


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
    modules = selective_modules(model, job)
    if not modules:
        raise IllegalPlanError(
            "All layers are recomputed selectively, with a flash attention kernel.",
            "Expected layers with experts or latent attention: of others --recompute-modules can drop neither the "
            "norms, which are part of the products, nor the activation.",
            "Solve again with --fix recompute=none or recompute=full.",
        )
    return {"--recompute-granularity": ("selective",), "--recompute-modules": modules}


def _listed(counts: list[int]) -> str:
    return ", ".join(map(str, counts[:16])) + (", ..." if len(counts) > 16 else "")
