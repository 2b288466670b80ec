"""Frameworks' rules that split a model's layers over virtual stages: numbers of layers, in model order."""

from __future__ import annotations

from milpplan.problem.model import DenseMlp, ModelSpec


def even_split(model: ModelSpec, stages: int) -> tuple[int, ...]:
    """Split into equal virtual stages; else embedding and loss count as a layer each; else ceil, with the rest
    last.

    Source: Megatron-LM ``--account-for-embedding-in-pipeline-split`` and ``--account-for-loss-...``.
    """
    layers = model.num_layers
    if layers % stages and stages > 1 and (layers + 2) % stages == 0:
        return _shorter_ends((layers + 2) // stages, stages)
    return ceil_split(model, stages)


def ceil_split(model: ModelSpec, stages: int) -> tuple[int, ...]:
    """Give ceil(layers / stages) to virtual stages from the first on, and the rest to the last ones.

    Source: DeepSpeed ``partition_balanced`` with equal weights (runtime/utils.py).
    """
    left, counts = model.num_layers, []
    size = -(-model.num_layers // stages)
    for _ in range(stages):
        counts.append(min(size, left))
        left -= counts[-1]
    return tuple(counts)


def split_with_embeddings(model: ModelSpec, stages: int) -> tuple[int, ...]:
    """Split with the embedding and the (tied) head as layers: DeepSpeed ``type:transformer|embedding``."""
    left, counts = model.num_layers + 2, []
    size = -(-left // stages)
    for _ in range(stages):
        counts.append(min(size, left))
        left -= counts[-1]
    counts[0] -= 1
    last = max(index for index, count in enumerate(counts) if count)
    counts[last] -= 1
    return tuple(max(count, 0) for count in counts)


def split_by_cost(model: ModelSpec, stages: int) -> tuple[int, ...]:
    """Fill each stage until its layers, and all before, cost more than its share of layers and head.

    A layer costs 4 h^2 + 3 h f and the head vocab * h; the remainder of a full stage moves on. Source:
    huggingface/nanotron src/nanotron/models/base.py (build_model) and models/llama.py (get_block_compute_costs),
    as printed in the Ultra-Scale Playbook.
    """
    return _by_cost(model, stages, 1)


def split_by_cost_with_ties(model: ModelSpec, stages: int) -> tuple[int, ...]:
    """Split as ``split_by_cost``, but end a stage as soon as it costs exactly its share.

    Source: bytes that nanotron's runs with the mended pipeline engine have allocated on their first stage where
    costs and shares tie (10 of 16 layers of the 1.34 B model with pp=2, 5 with pp=4; docs/accuracy.md).
    """
    return _by_cost(model, stages, 0)


def _by_cost(model: ModelSpec, stages: int, above: int) -> tuple[int, ...]:
    """Split into stages that end once they cost at least ``above`` more than their share."""
    hidden = model.hidden_size
    costs = []
    for run in model.layers:
        mlp = run.mlp
        width = mlp.intermediate_size if isinstance(mlp, DenseMlp) else mlp.intermediate_size * mlp.num_experts
        costs += [4 * hidden * hidden + 3 * hidden * width] * run.count
    total = sum(costs) + model.vocab_size * hidden
    counts, stage, spent = [0] * stages, 0, 0
    for cost in costs:
        counts[stage] += 1
        spent += cost
        if spent * stages >= total * (stage + 1) + above and stage + 1 < stages:
            stage += 1
    return tuple(counts)


def _shorter_ends(size: int, stages: int) -> tuple[int, ...]:
    counts = [size] * stages
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)
