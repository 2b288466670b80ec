"""Cost of the encoder of images on the first stage, for one micro-batch on one GPU.

The encoder's layers are priced by the formulas of decoder layers, on a problem of their own (``encoder_problem``)
and on layouts without the parallelism that the encoder lacks (``encoder_columns``). It computes in bf16 with fused
attention, in which a patch attends to all patches of its image (the FLOPs are not halved by a mask). Tensor
parallelism divides it where it divides heads and MLPs, without sequence parallelism; otherwise every rank computes
all images. So do context-parallel ranks, unless they share the images (``Layout.vision_data_parallel``): then each
computes whole images, all wait for the rank with the most, and every projector's outputs are gathered and copied
together, their gradients summed over the ranks, also where the encoder is frozen. The projectors follow, and their
outputs replace rows of the embedding.

Without a distribution of images, micro-batches have equal numbers of tokens, the job's mean: a lower bound where
images differ. With one, memory holds the largest micro-batch (upper), and the time is that of the mean micro-batch
of the replica with the most images (``images_over_mean``). All micro-batches of this replica have this mean, and a
step is convex in their times. So the expected step takes at least as long (Jensen's inequality; lower), where a
time is affine in images, and exactly as long without a pipeline where replicas meet once. Wire bytes, and with a
distribution the gathers of shared images, are means.

Recomputation replays the layers, each from its input. A frozen encoder runs forwards alone: nothing before it is
trained.

Sources: NVIDIA-NeMo/Megatron-Bridge@067f987d models/qwen_vl/modelling_qwen3_vl (``get_vision_model_config``,
``Qwen3VLModel``: the first pipeline stage has the encoder, with tensor parallelism alone, and
``AllGatherVisionEmbeddings`` of ``vision_dp_when_cp``); transformers 5.24.0,
``Qwen3VLMoeVisionModel``. Replicas that wait for images: Zhang et al. 2025 (DistTrain, arXiv 2408.04275).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from milpplan.problem import Images, LayerRun, ModelSpec, Problem, VisionEncoder
from milpplan.simulation import FloatArray, IntArray, LayoutColumns, column_value, unique_rows
from milpplan.simulation.layers.activations import layer_activations
from milpplan.simulation.layers.kernels import BF16_BYTES
from milpplan.simulation.layers.layer_time import flash_core_s, layer_tally
from milpplan.simulation.layers.parameter_counts import encoder_model
from milpplan.simulation.layers.shard import Part, Phase, Shard
from milpplan.simulation.network import collectives, placement


@dataclass(frozen=True, slots=True)
class EncoderCosts:
    """Costs of the encoder and its projectors for one micro-batch."""

    seconds: FloatArray
    """[Part, 2, n] forward and backward, with the replays of recomputation."""
    kept_bytes: FloatArray
    """[n] activations."""
    workspace_bytes: FloatArray
    """[n] temporary bytes of the backward, with a layer's replay."""

    def add(self, seconds: FloatArray, kept: FloatArray | float = 0.0) -> None:
        """Add seconds [Part, 2, n] and kept bytes."""
        self.seconds[:] += seconds
        self.kept_bytes[:] += kept


def encoder_tp(vision: VisionEncoder, tp: IntArray) -> IntArray:
    """Return the tensor-parallel degree of an encoder of images: tp where it divides heads and MLPs, else 1."""
    divides = np.logical_and.reduce([number % tp == 0 for number in vision.divisors])
    return np.where(divides, tp, 1).astype(np.int64)


def image_sharers(columns: LayoutColumns) -> IntArray:
    """Return the number of ranks that share the images of a micro-batch, [n]."""
    return np.where(columns.vision_data_parallel, columns.cp, 1)


def images_over_mean(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Return the expected images of the slowest ranks over the mean of a replica, [n], of a job with a
    distribution.

    E[max_r S_r] / E[images of a replica] over dp replicas. S_r adds up the images of the replica's micro-batches,
    of each those of the rank with the most, which without sharing are all.
    """
    assert problem.job.images is not None
    sharers, dp = image_sharers(columns), columns.dp
    # Without sharing, the division into micro-batches does not matter.
    grouped = np.where(sharers > 1, columns.micro_batch_size, 1)
    groups = columns.global_batch_size // (dp * grouped)
    rows, inverse = unique_rows(groups, grouped, dp, sharers)
    keys = ((int(column[row]) for column in (groups, grouped, dp, sharers)) for row in rows)
    return np.array([_most_over_mean(problem.job.images, *key) for key in keys])[inverse]


@lru_cache(maxsize=4096)
def _most_over_mean(images: Images, num_groups: int, group: int, num_replicas: int, sharers: int) -> float:
    """Divide the expected maximum over replicas by their mean: sum_k (1 - F(k)^d) / (groups * group * E[images]).

    F is the distribution function of the sum, over a replica's groups of sequences, of the most images that one of
    the sharing ranks has of a group: a share of the group's, rounded up.
    """
    if num_replicas == sharers == 1:
        return 1.0
    one = np.zeros(images.maximum + 1)
    one[list(images.numbers)] = np.array(images.shares) / sum(images.shares)
    of_group = _distribution_of_sum(one, group)
    most = np.zeros(-(-(len(of_group) - 1) // sharers) + 1)
    np.add.at(most, -(-np.arange(len(of_group)) // sharers), of_group)
    below = np.clip(np.cumsum(_distribution_of_sum(most, num_groups)), 0.0, 1.0)
    expected = float(np.sum(1.0 - below**num_replicas)) / (num_groups * group * images.mean)
    return min(max(expected, 1.0 / sharers), images.maximum / images.mean)


def _distribution_of_sum(one: FloatArray, number: int) -> FloatArray:
    """Return the distribution of a sum of independent numbers, whose transform is a power of one's."""
    if number == 1:
        return one
    size = 1 << (number * (len(one) - 1)).bit_length()
    return np.maximum(np.fft.irfft(np.fft.rfft(one, size) ** number, size), 0.0)


def _most_images(number: FloatArray, sharers: IntArray) -> FloatArray:
    """Return the images of the rank with the most, a mean over micro-batches that hold the integers next to a mean
    ``number``, [n]."""
    whole = np.floor(number + 1e-9)
    below, above = -(-whole // sharers), -(-(whole + 1) // sharers)
    return np.where(sharers > 1, below + np.maximum(number - whole, 0.0) * (above - below), number)


def mean_patches(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Count the patches of a micro-batch, a mean, [n]."""
    patches = problem.vision_tokens * _vision(problem).patches_per_token
    return np.asarray(columns.micro_batch_size * patches)


def encoder_problem(problem: Problem) -> Problem:
    """Describe the encoder's layers as a problem, whose sequences are single patches."""
    vision, job = _vision(problem), problem.job
    changes = {
        "kind": "training" if job.trains("vision") else "inference",
        "sequence_length": 1,
        "precision": "bf16",
        "attention_kernel": "flash",
        "lora": None,
        "frozen": (),
        "vision_tokens": 0,
        "image_tokens": None,
        "images": None,
    }
    return problem.model_copy(update={"model": encoder_model(vision), "job": job.model_copy(update=changes)})


def encoder_columns(model: ModelSpec, columns: LayoutColumns, patches: FloatArray) -> LayoutColumns:
    """Take the parallelism that the encoder lacks out of layouts; tensor-parallel groups stay where they are.

    ``patches``: of a micro-batch, [n]; at least one counts, parts of one do not.
    """
    assert model.vision is not None
    # Ranks inside the tensor-parallel groups, if there are any, count as replicas.
    degrees = {"tp": encoder_tp(model.vision, columns.tp), "dp": placement.tensor(columns).stride}
    switches = {"rank_order": "dp-tp-cp-pp", "schedule": "1f1b", "sequence_parallel": False, "ep": 1, "etp": 1}
    switches |= {"cp": 1, "pp": 1, "ulysses": 1, "tp_overlap": "none", "gather_again": True}
    # The slack absorbs rounding errors of floats.
    degrees["micro_batch_size"] = np.floor(np.maximum(patches, 1.0) + 1e-6).astype(np.int64)
    numbers = {name: np.full(len(columns), column_value(name, value)) for name, value in switches.items()}
    return LayoutColumns.from_mapping(columns.mapping | degrees | numbers)


def _vision(problem: Problem) -> VisionEncoder:
    """Return the encoder of a model that has one."""
    assert problem.model.vision is not None
    return problem.model.vision


def encoder_costs(problem: Problem, columns: LayoutColumns) -> EncoderCosts:
    """Price the encoder of a job with images: time of the mean micro-batch of the slowest replica, memory of the
    largest micro-batch."""
    images, mean, sharers = problem.job.images, mean_patches(problem, columns), image_sharers(columns)
    of_image = float(problem.image_tokens * _vision(problem).patches_per_token)
    if images is None:
        own = np.where(sharers > 1, of_image * _most_images(mean / of_image, sharers), mean)
        return _costs_of(problem, columns, own, mean)
    maximum = of_image * np.ceil(columns.micro_batch_size * images.maximum / sharers)
    most = mean * images_over_mean(problem, columns)
    slowest, largest = (_costs_of(problem, columns, patches, mean) for patches in (most, maximum))
    return replace(slowest, kept_bytes=largest.kept_bytes, workspace_bytes=largest.workspace_bytes)


def _costs_of(
    problem: Problem, columns: LayoutColumns, patches: FloatArray, all_patches: FloatArray
) -> EncoderCosts:
    """Price the encoder for ``patches`` [n] of a micro-batch on a rank, which may share ``all_patches`` [n]."""
    vision, part = _vision(problem), encoder_problem(problem)
    shard = Shard.of(part, encoder_columns(problem.model, columns, patches))
    zeros = np.zeros(len(columns))
    costs = EncoderCosts(np.zeros((len(Part), 2, len(columns))), zeros, zeros.copy())
    again = columns.recompute_vision.astype(np.float64)
    for kind in vision.layers:
        one = kind.model_copy(update={"count": 1})
        layer = _layer_seconds(shard, one, problem.image_tokens * vision.patches_per_token)
        activations = layer_activations(part, one, shard.columns)
        seconds = layer[:, : Phase.BACKWARD + 1].copy()
        seconds[:, Phase.BACKWARD] += again * layer[:, Phase.FULL]
        dropped = again * activations.dropped_full
        costs.add(kind.count * seconds, kind.count * (activations.kept - dropped))
        np.maximum(costs.workspace_bytes, activations.workspace + dropped, out=costs.workspace_bytes)
    _patches(shard, vision, costs)
    _projectors(shard, vision, costs, problem.model.hidden_size)
    if part.inference:
        costs.seconds[:, Phase.BACKWARD] = 0.0
        costs.kept_bytes[:] = 0.0
    if columns.vision_data_parallel.any():
        _gather_embeddings(problem, columns, shard, all_patches, costs)
    return costs


def _layer_seconds(shard: Shard, kind: LayerRun, image_patches: int) -> FloatArray:
    """Time a layer of the encoder, [Part, Phase, n]; a window limits the patches that a patch attends to."""
    attention = kind.attention
    assert attention.type == "gqa"
    keys = min(image_patches, attention.sliding_window or image_patches)
    whole = attention.model_copy(update={"sliding_window": None, "chunked": False})
    core = flash_core_s(shard, whole, keys, shard.tokens, 1, "full")
    return layer_tally(shard.problem, kind, shard.columns, core).seconds


def _patches(shard: Shard, vision: VisionEncoder, costs: EncoderCosts) -> None:
    """Add the product of the patches, of whose input nothing needs a gradient; every rank computes all of it."""
    product = shard.gemm(shard.tokens, float(vision.hidden_size), float(vision.patch_inputs), {})
    seconds = np.zeros_like(costs.seconds)
    seconds[Part.COMPUTE] = np.stack([product.forward, product.wgrad])
    costs.add(seconds, BF16_BYTES * shard.tokens * vision.patch_inputs)


def _projectors(shard: Shard, vision: VisionEncoder, costs: EncoderCosts, hidden: int) -> None:
    """Add norm, products, activation and communication of the projectors, and the copies into the embedding.

    Kept are the norm's input and output and the activation's input and output. Two matrices have an all-reduce
    behind them forwards, and of the gradient of their input backwards.
    """
    hardware = shard.problem.hardware
    for projector in vision.projectors:
        tokens = shard.tokens / (1 if projector.of_patches else vision.patches_per_token)
        inputs, output = float(projector.widths[0]), float(projector.widths[-1])
        seconds, inner = np.zeros_like(costs.seconds), np.zeros_like(tokens)
        copies = 2 * BF16_BYTES * tokens * hidden
        norm = shard.memory_bound(2 * BF16_BYTES * tokens * inputs)
        parts = [(norm + shard.memory_bound(copies), 1.5 * norm + shard.memory_bound(copies))]
        if len(projector.widths) == 2:
            products = [shard.gemm(tokens, output, inputs, {})]
        else:
            inner = projector.widths[1] / shard.tp
            products = [shard.gemm(tokens, inner, inputs, {}), shard.gemm(tokens, output, inner, {})]
            passes = [shard.memory_bound(BF16_BYTES * tokens * inner * number) for number in (2, 3)]
            parts.append((passes[0], passes[1]))
            group = placement.tensor(shard.columns)
            for phase, width in ((Phase.FORWARD, output), (Phase.BACKWARD, inputs)):
                seconds[Part.TP, phase] = collectives.all_reduce_s(hardware, BF16_BYTES * tokens * width, *group)
        parts += [(product.forward, product.dgrad + product.wgrad) for product in products]
        for part in parts:
            seconds[Part.COMPUTE] += np.stack(part)
        costs.add(projector.count * seconds, projector.count * BF16_BYTES * tokens * 2 * (inputs + inner))


def _gather_embeddings(
    problem: Problem, columns: LayoutColumns, shard: Shard, patches: FloatArray, costs: EncoderCosts
) -> None:
    """Add the exchange of shared images' embeddings: they are gathered and copied together, and those of other
    ranks copied into the embedding, too; gradients of all are summed on every rank."""
    group, hardware, vision = placement.context(columns), problem.hardware, _vision(problem)
    shared = columns.vision_data_parallel.astype(np.float64)
    for projector in vision.projectors:
        a_patch = BF16_BYTES * projector.widths[-1] / (1 if projector.of_patches else vision.patches_per_token)
        size, others = a_patch * patches, a_patch * np.maximum(patches - shard.tokens, 0.0)
        seconds = np.zeros_like(costs.seconds)
        seconds[Part.COMPUTE, Phase.FORWARD] = shard.memory_bound(2 * size) + shard.memory_bound(2 * others)
        seconds[Part.CP, Phase.FORWARD] = collectives.all_gather_s(hardware, size, *group)
        if not problem.inference:
            seconds[Part.COMPUTE, Phase.BACKWARD] = shard.memory_bound(2 * others)
            seconds[Part.CP, Phase.BACKWARD] = collectives.all_reduce_s(hardware, size, *group)
        costs.add(projector.count * shared * seconds)
