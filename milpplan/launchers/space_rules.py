"""Rules of launchers on several fields of a layout, for the enumeration of layouts.

Each rule takes a problem and columns [N] of numbers, and returns booleans [N]: True where the layout keeps the
rule. A schedule is given by its index in ``SCHEDULES``. Columns that are not enumerated yet have their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from milpplan.launchers.nanotron.settings import stage_sizes
from milpplan.problem.plan import SCHEDULES
from milpplan.problem.problem import Problem

Columns = Mapping[str, npt.NDArray[np.int64]]
OLD_TITAN = "0.2.2"
_ONE_F_ONE_B = SCHEDULES.index("1f1b")


def whole_nodes(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require the number of GPUs to fit on one node or to fill whole nodes."""
    gpus, node = c["tp"] * c["cp"] * c["pp"] * c["dp"], problem.hardware.gpus_per_node
    return np.asarray((gpus <= node) | (gpus % node == 0))


def equal_stages(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require an equal number of layers in every virtual stage."""
    return np.asarray(problem.model.num_layers % (c["pp"] * c["vpp"]) == 0)


def whole_kv_heads(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require that tensor parallelism does not split a key/value head."""
    keeps = np.ones(len(c["tp"]), dtype=np.bool_)
    for kind in problem.model.kinds:
        if kind.attention.type == "gqa":
            keeps &= kind.attention.num_key_value_heads % c["tp"] == 0
        else:
            keeps &= c["tp"] == 1
    return keeps


def fsdp_states(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require ZeRO states that FSDP2 or DDP can produce.

    FSDP2 gathers weights and reduces gradients beside the work of every micro-batch. With resharding this is ZeRO
    3. Without resharding it is ZeRO 2, but weights are gathered once per step only with a single micro-batch. DDP
    is ZeRO 0.
    """
    several, stage = c["cp"] * c["dp"] > 1, c["zero_stage"]
    sharded = (stage == 3) | ((stage == 2) & (c["num_micro_batches"] == 1))
    overlaps = (c["overlap_grad_reduce"] == 1) & ((stage == 0) | (c["overlap_param_gather"] == 1))
    return np.asarray(np.where(several, ((stage == 0) | sharded) & overlaps, stage == 0))


def piped_states(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require ZeRO states that FSDP2 or DDP can produce, with or without a pipeline.

    In a pipeline, weights stay gathered and gradients unreduced until all micro-batches have run, and gradients
    are reduced afterwards: ZeRO 1 without overlap. Without a pipeline ``fsdp_states`` applies.
    """
    several, stage = c["cp"] * c["dp"] > 1, c["zero_stage"]
    after = (stage == 1) & (c["overlap_grad_reduce"] == 0) & (c["overlap_param_gather"] == 0)
    return np.asarray(np.where(several & (c["pp"] > 1), after, fsdp_states(problem, c)))


def replicas_are_plain(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require unsharded replicas to have neither tensor nor context parallelism."""
    return np.asarray((c["zero_stage"] > 0) | (c["tp"] * c["cp"] == 1))


def unsharded_is_alone(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require unsharded replicas to have no other parallelism."""
    plain = (c["cp"] * c["dp"] == 1) | (c["tp"] * c["pp"] * c["ep"] == 1)
    return np.asarray((c["zero_stage"] > 0) | plain)


def fills_the_pipeline(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require at least as many micro-batches as pipeline ranks."""
    return np.asarray((c["pp"] == 1) | (c["num_micro_batches"] >= c["pp"]))


def experts_are_not_split(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require models with experts to have no tensor parallelism."""
    return np.asarray((c["tp"] == 1) | (not problem.model.has_experts))


def titan_states(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require ZeRO states that torchtitan can produce.

    Unlike in ``piped_states``, unsharded replicas reduce gradients in every micro-batch, and after a pipeline.
    """
    several, stage, piped = c["cp"] * c["dp"] > 1, c["zero_stage"], c["pp"] > 1
    once = c["num_micro_batches"] == 1
    late = (c["overlap_grad_reduce"] == 0) & (c["overlap_param_gather"] == 0)
    unsharded = np.where(piped, late, once & (c["overlap_grad_reduce"] == 1))
    # Experts are sharded only over sharded replicas (distributed/parallel_dims.py:187-192).
    unsharded &= (c["tp"] * c["cp"]) % (c["ep"] * c["etp"]) == 0
    if problem.space.target_version == OLD_TITAN:
        unsharded &= c["tp"] * c["pp"] * c["ep"] == 1
        alone = c["tp"] * c["pp"] * c["ep"] == 1
    else:
        alone = np.ones(len(stage), dtype=np.bool_)
    keeps = np.where(stage == 0, unsharded, piped_states(problem, c))
    return np.asarray(np.where(several, keeps, (stage == 0) & alone))


def titan_experts(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require expert parallelism that torchtitan supports.

    Without expert parallelism tp shards the experts. With it, experts are on one tp rank, or up to 0.2.2 also over
    tp.
    """
    if not problem.model.has_experts:
        return np.ones(len(c["tp"]), dtype=np.bool_)
    whole = c["etp"] == 1
    if problem.space.target_version == OLD_TITAN:
        whole |= c["etp"] == c["tp"]
        if problem.hardware.software.deduplicated_dispatch:
            # Its DeepEP dispatcher supports one model and whole experts only.
            whole &= c["ep"] == 1
    return np.asarray(np.where(c["ep"] == 1, c["etp"] == c["tp"], whole))


def titan_sequences(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require gathered inputs to be kept under sequence parallelism, which up to 0.2.2 always comes with tp."""
    again = c["gather_again"] if "gather_again" in c else np.ones(len(c["tp"]), dtype=np.int64)
    keeps = (c["sequence_parallel"] == 1) == (again == 0)
    if problem.space.target_version == OLD_TITAN:
        keeps &= (c["tp"] == 1) | (c["sequence_parallel"] == 1)
    return np.asarray(keeps)


def titan_pipelines(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require pipelines that torchtitan can run.

    1F1B needs at least as many micro-batches as stages. Up to 0.2.2 only dense models and DeepSeek's have a
    pipeline.
    """
    enough = (c["pp"] == 1) | (c["schedule"] != _ONE_F_ONE_B) | (c["num_micro_batches"] >= c["pp"])
    if problem.space.target_version == OLD_TITAN:
        enough &= c["pp"] == 1
    return np.asarray(enough)


def whole_words(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require a tensor-parallel degree that divides the vocabulary."""
    return np.asarray(problem.model.vocab_size % c["tp"] == 0)


def nanotron_stages(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require equal stages where nanotron's own placement makes equal stages."""
    layers = problem.model.num_layers
    equal = {int(pp): stage_sizes(problem.model, int(pp)) == (layers // int(pp),) * int(pp) for pp in set(c["pp"])}
    return np.asarray([equal[int(pp)] for pp in c["pp"]], dtype=np.bool_)


def nanotron_pipelines(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require at least pp - 1 micro-batches for 1F1B (parallel/pipeline_parallel/engine.py)."""
    few = (c["pp"] > 1) & (c["schedule"] == _ONE_F_ONE_B) & (c["num_micro_batches"] < c["pp"] - 1)
    return np.asarray(~few)


def reduces_beside(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require the gradient reduction of several replicas to overlap with the last backward pass."""
    return np.asarray((c["cp"] * c["dp"] == 1) | (c["overlap_grad_reduce"] == 1))


def deepspeed_states(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require ZeRO states that DeepSpeed can produce.

    Up to ZeRO 2 weights are gathered after the update. Gradients in fp32 require ZeRO 2 or 3.
    """
    stage = c["zero_stage"]
    keeps = c["overlap_param_gather"] == (stage == 3)
    keeps &= (stage > 0) | (c["overlap_grad_reduce"] == 0)
    if problem.job.grad_dtype == "fp32":
        keeps &= stage >= 2
    return np.asarray(keeps)
