"""Layers of every virtual stage and their recomputation in Megatron-LM's arguments, several of which can give
them.

Source: NVIDIA/Megatron-LM at d98e8a64, training/arguments.py:928-1009,
core/transformer/transformer_config.py:2229-2415, core/transformer/transformer_block.py:175-190.

A string gives uneven stages: ``E`` embedding, ``t`` layer, ``L`` loss, ``|`` between virtual stages. ``x*n``
repeats a character and ``(...)*n`` a group; commas are ignored. The k-th part is virtual stage k (chunk k // pp of
rank k % pp). Source: megatron/core/transformer/pipeline_parallel_layer_layout.py at d98e8a64.

**Recomputation** has one granularity, one method and one number for all virtual stages. ``full`` with ``block`` n
recomputes the first n layers of every virtual stage (core/recompute.py counts per TransformerBlock, which is a
virtual stage); with ``uniform`` 1 it recomputes every layer. ``selective`` applies to all layers, module by
module. Source: NVIDIA/Megatron-LM at d98e8a64, core/transformer/transformer_config.py and core/recompute.py.
"""

from __future__ import annotations

import re
from itertools import groupby

from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.launchers.megatron.arguments import Arguments, Values
from milpplan.problem.model import DenseMlp, LatentAttention, MixtureOfExperts, ModelSpec
from milpplan.problem.plan import Plan, Recompute
from milpplan.problem.problem import Job
from milpplan.problem.reading import shown

MAX_CHARACTERS = 100_000
"""Maximum length of a string after repetition; no model has more layers."""


def stage_string(layers: tuple[int, ...]) -> str:
    """Write the string of stages with given numbers of layers; equal neighbours are written once."""
    parts = [f"t*{count}" if count > 1 else "t" * count for count in layers]
    if len(parts) == 1:
        return f"E{parts[0]}L"
    inner = [(part, len(list(same))) for part, same in groupby(parts[1:-1])]
    middle = "".join(f"({part}|)*{times}" if times > 1 and part else f"{part}|" * times for part, times in inner)
    return f"E{parts[0]}|{middle}{parts[-1]}L"


def stage_layers(text: str) -> tuple[int, ...]:
    """Return the number of layers of every virtual stage, in model order.

    Raises:
        InvalidInputError: Megatron-LM's ``validate_layer_layout`` refuses the string, or it has layers of
            multi-token
            prediction, which a plan does not have.
    """
    if len(text) > MAX_CHARACTERS:
        raise _wrong(text, "it is too long")
    text = text.replace(",", "")
    for repeated in (r"\(([^()]+)\)\*(\d+)", r"(.)\*(\d+)"):
        # Sizes are checked first, because repetitions may need more characters than memory holds.
        total = 0
        for match in re.finditer(repeated, text):
            total += MAX_CHARACTERS + 1 if len(match[2]) > 5 else len(match[1]) * int(match[2])
            if total > MAX_CHARACTERS:
                raise _wrong(text, f"{shown(match[0])} repeats too often")
        text = re.sub(repeated, lambda match: match[1] * int(match[2]), text)
        if len(text) > MAX_CHARACTERS:
            raise _wrong(text, "it is too long")
    strange = sorted(set(text) - set("EtmL|"))
    if strange:
        raise _wrong(text, f"it holds {shown(strange[0])}")
    if "m" in text:
        raise _wrong(text, "it places layers of multi-token prediction (m), which a plan does not have")
    order = text.replace("|", "")
    if order != f"E{'t' * order.count('t')}L":
        raise _wrong(text, "embedding (E), layers (t) and loss (L) do not come once each and in this order")
    if text[0] != "E" or text[-1] != "L":
        raise _wrong(text, "embedding and loss are not in the first and the last part, where a plan has them")
    return tuple(part.count("t") for part in text.split("|"))


def _wrong(text: str, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"--pipeline-model-parallel-layout is {shown(text)}: {why}.",
        "Expected E first, L last, t for every layer and | between virtual stages, such as 'Et*19|t*21|t*20L'.",
        "Correct the string (core/transformer/pipeline_parallel_layer_layout.py).",
    )


ENDS = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
ACCOUNTS = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
WAYS = (
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--pipeline-model-parallel-layout",
)


def virtual_stages(given: Arguments, layers: int, pp: int) -> int:
    """Return the number of virtual stages per rank (vpp)."""
    text = given.text(WAYS[2])
    if text is not None:
        return max(len(stage_layers(text)) // pp, 1)
    chunk = given.number(WAYS[0])
    if chunk:
        return max((layers + sum(given.given(flag) for flag in ACCOUNTS)) // pp // chunk, 1)
    return max(given.count(WAYS[1], 1), 1)


def stage_sizes(given: Arguments, layers: int, pp: int) -> tuple[tuple[int, ...], str]:
    """Return the layers of every virtual stage in model order, or an empty tuple and a description of the
    error."""
    given_flags = [flag for flag in WAYS if given.given(flag)]
    ends = [flag for flag in ENDS if given.given(flag)]
    accounts = [flag for flag in ACCOUNTS if given.given(flag)]
    if len(given_flags) > 1:
        return (), f"{' and '.join(given_flags)} are given together"
    if (ends and accounts) or (WAYS[2] in given_flags and ends + accounts) or (WAYS[0] in given_flags and ends):
        return (), f"{' and '.join(given_flags + ends + accounts)} do not go together"
    if WAYS[2] in given_flags:
        return _by_string(given.text(WAYS[2]) or "", layers, pp)
    vpp = virtual_stages(given, layers, pp)
    if ends:
        return _by_ends([given.number(flag) for flag in ENDS], layers, pp, vpp)
    return _evenly(layers, pp, vpp, given.given(ACCOUNTS[0]), given.given(ACCOUNTS[1]), given.number(WAYS[0]))


def _by_string(text: str, layers: int, pp: int) -> tuple[tuple[int, ...], str]:
    sizes = stage_layers(text)
    if len(sizes) % pp:
        return (), f"the layout string has {len(sizes)} virtual stages for pp={pp}"
    if sum(sizes) != layers:
        return (), f"the layout string places {sum(sizes)} layers of {layers}"
    return sizes, ""


def _evenly(
    layers: int, pp: int, vpp: int, embedding: bool, loss: bool, chunk: int | None
) -> tuple[tuple[int, ...], str]:
    """Split the layers into equal virtual stages; the embedding and the loss may count as a layer each."""
    total = layers + embedding + loss
    if total % pp:
        return (), f"{total} layers are no multiple of pp={pp}; uneven stages need a layout string"
    if (total // pp) % (chunk or vpp):
        return (), f"the {total // pp} layers of a rank are no multiple of {chunk or vpp}"
    sizes = [total // pp // vpp] * (pp * vpp)
    sizes[0] -= embedding
    sizes[-1] -= loss
    return (tuple(sizes), "") if min(sizes) >= 0 else ((), "a virtual stage would hold fewer layers than none")


def _by_ends(ends: list[int | None], layers: int, pp: int, vpp: int) -> tuple[tuple[int, ...], str]:
    """Split the layers where the first and last rank have their own numbers and the others equal shares."""
    named = [size for size in ends if size is not None]
    inner = pp - len(named)
    left = layers - sum(named)
    if min(named) < 1 or inner < 0 or left < 0 or (left > 0) != (inner > 0):
        return (), f"{' and '.join(map(str, named))} layers at the ends leave {left} for {inner} ranks"
    if inner and left % inner:
        return (), f"the {left} layers left are no multiple of the {inner} ranks left"
    ranks = [left // inner if inner else 0] * pp
    ranks[0] = ends[0] or ranks[0]
    ranks[-1] = ends[1] or ranks[-1]
    if any(size % vpp for size in ranks):
        return (), f"layers of the ranks ({', '.join(map(str, ranks))}) are no multiples of vpp={vpp}"
    return tuple(ranks[rank] // vpp for _ in range(vpp) for rank in range(pp)), ""


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
