"""Rules of launchers on several fields of a layout, as the enumeration asks them: whether each layout keeps one.

Columns [N] are numbers; a schedule is its place in ``SCHEDULES``. Columns that a table does not have yet are at
their defaults.
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
    """As many processes on every node: less than a node, or whole ones."""
    gpus, node = c["tp"] * c["cp"] * c["pp"] * c["dp"], problem.hardware.gpus_per_node
    return np.asarray((gpus <= node) | (gpus % node == 0))


def equal_stages(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """As many layers in every virtual stage."""
    return np.asarray(problem.model.num_layers % (c["pp"] * c["vpp"]) == 0)


def whole_kv_heads(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Tensor parallelism that splits no key/value head."""
    keeps = np.ones(len(c["tp"]), dtype=np.bool_)
    for kind in problem.model.kinds:
        if kind.attention.type == "gqa":
            keeps &= kind.attention.num_key_value_heads % c["tp"] == 0
        else:
            keeps &= c["tp"] == 1
    return keeps


def fsdp_states(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """FSDP2 gathers weights and reduces gradients beside the work of every micro-batch. With resharding that is
    ZeRO 3; without it ZeRO 2, but gathered once a step only with one micro-batch. DDP alone is ZeRO 0."""
    several, stage = c["cp"] * c["dp"] > 1, c["zero_stage"]
    sharded = (stage == 3) | ((stage == 2) & (c["num_micro_batches"] == 1))
    overlaps = (c["overlap_grad_reduce"] == 1) & ((stage == 0) | (c["overlap_param_gather"] == 1))
    return np.asarray(np.where(several, ((stage == 0) | sharded) & overlaps, stage == 0))


def piped_states(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """The same without a pipeline. Under one, weights stay gathered and gradients whole until all micro-batches
    have run, and are reduced after them: ZeRO 1 without overlap."""
    several, stage = c["cp"] * c["dp"] > 1, c["zero_stage"]
    after = (stage == 1) & (c["overlap_grad_reduce"] == 0) & (c["overlap_param_gather"] == 0)
    return np.asarray(np.where(several & (c["pp"] > 1), after, fsdp_states(problem, c)))


def replicas_are_plain(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Replicas that are not sharded, beside neither tensor nor context parallelism."""
    return np.asarray((c["zero_stage"] > 0) | (c["tp"] * c["cp"] == 1))


def unsharded_is_alone(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Replicas that are not sharded, beside no other parallelism."""
    plain = (c["cp"] * c["dp"] == 1) | (c["tp"] * c["pp"] * c["ep"] == 1)
    return np.asarray((c["zero_stage"] > 0) | plain)


def fills_the_pipeline(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """As many micro-batches as pipeline ranks."""
    return np.asarray((c["pp"] == 1) | (c["num_micro_batches"] >= c["pp"]))


def experts_are_not_split(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """No tensor parallelism of models with experts."""
    return np.asarray((c["tp"] == 1) | (not problem.model.has_experts))


def titan_states(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """As ``piped_states``, but replicas that are not sharded reduce in every micro-batch, and after a pipeline."""
    several, stage, piped = c["cp"] * c["dp"] > 1, c["zero_stage"], c["pp"] > 1
    once = c["num_micro_batches"] == 1
    late = (c["overlap_grad_reduce"] == 0) & (c["overlap_param_gather"] == 0)
    unsharded = np.where(piped, late, once & (c["overlap_grad_reduce"] == 1))
    # Experts are carved out of sharded replicas alone (distributed/parallel_dims.py:187-192).
    unsharded &= (c["tp"] * c["cp"]) % (c["ep"] * c["etp"]) == 0
    if problem.space.target_version == OLD_TITAN:
        unsharded &= c["tp"] * c["pp"] * c["ep"] == 1
        alone = c["tp"] * c["pp"] * c["ep"] == 1
    else:
        alone = np.ones(len(stage), dtype=np.bool_)
    found = np.where(stage == 0, unsharded, piped_states(problem, c))
    return np.asarray(np.where(several, found, (stage == 0) & alone))


def titan_experts(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Experts are cut over tp without expert parallelism; with it over one rank, up to 0.2.2 also over tp."""
    if not problem.model.has_experts:
        return np.ones(len(c["tp"]), dtype=np.bool_)
    whole = c["etp"] == 1
    if problem.space.target_version == OLD_TITAN:
        whole |= c["etp"] == c["tp"]
        if problem.hardware.software.deduplicated_dispatch:
            # Its dispatcher deepep is there for one model and whole experts only.
            whole &= c["ep"] == 1
    return np.asarray(np.where(c["ep"] == 1, c["etp"] == c["tp"], whole))


def titan_sequences(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """With sequence parallelism gathered inputs are kept; up to 0.2.2 it always comes with tensor parallelism."""
    again = c["gather_again"] if "gather_again" in c else np.ones(len(c["tp"]), dtype=np.int64)
    keeps = (c["sequence_parallel"] == 1) == (again == 0)
    if problem.space.target_version == OLD_TITAN:
        keeps &= (c["tp"] == 1) | (c["sequence_parallel"] == 1)
    return np.asarray(keeps)


def titan_pipelines(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """1F1B wants as many micro-batches as stages; up to 0.2.2 only dense models and DeepSeek's have a pipeline."""
    enough = (c["pp"] == 1) | (c["schedule"] != _ONE_F_ONE_B) | (c["num_micro_batches"] >= c["pp"])
    if problem.space.target_version == OLD_TITAN:
        enough &= c["pp"] == 1
    return np.asarray(enough)


def whole_words(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Tensor parallelism that divides the vocabulary."""
    return np.asarray(problem.model.vocab_size % c["tp"] == 0)


def nanotron_stages(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Equal stages, where its own placement makes them."""
    layers = problem.model.num_layers
    equal = {int(pp): stage_sizes(problem.model, int(pp)) == (layers // int(pp),) * int(pp) for pp in set(c["pp"])}
    return np.asarray([equal[int(pp)] for pp in c["pp"]], dtype=np.bool_)


def nanotron_pipelines(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """1F1B wants at least one micro-batch less than ranks (parallel/pipeline_parallel/engine.py)."""
    few = (c["pp"] > 1) & (c["schedule"] == _ONE_F_ONE_B) & (c["num_micro_batches"] < c["pp"] - 1)
    return np.asarray(~few)


def reduces_beside(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Gradients of several replicas are always reduced beside the last backward."""
    return np.asarray((c["cp"] * c["dp"] == 1) | (c["overlap_grad_reduce"] == 1))


def deepspeed_states(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Up to ZeRO 2 weights are gathered after the update; gradients in fp32 want ZeRO 2 or 3."""
    stage = c["zero_stage"]
    keeps = c["overlap_param_gather"] == (stage == 3)
    keeps &= (stage > 0) | (c["overlap_grad_reduce"] == 0)
    if problem.job.grad_dtype == "fp32":
        keeps &= stage >= 2
    return np.asarray(keeps)
