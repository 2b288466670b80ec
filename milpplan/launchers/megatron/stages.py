"""Number of layers of every virtual stage, from the several arguments of Megatron-LM that can give it.

Source: NVIDIA/Megatron-LM at d98e8a64, training/arguments.py:928-1009,
core/transformer/transformer_config.py:2229-2415, core/transformer/transformer_block.py:175-190.
"""

from __future__ import annotations

from milpplan.launchers.arguments import Arguments
from milpplan.launchers.megatron.stage_strings import stage_layers

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
