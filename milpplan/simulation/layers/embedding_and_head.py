"""Embedding and encoder of images before the first layer; final norm, language-model head and loss after the last
layer, and layers of multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from milpplan.problem import ModelSpec, Problem
from milpplan.simulation import FloatArray, IntArray, LayoutColumns
from milpplan.simulation.layers import kernels
from milpplan.simulation.layers.activations import layer_activations
from milpplan.simulation.layers.kernels import BF16_BYTES, FP32_BYTES
from milpplan.simulation.layers.layer_time import layer_seconds
from milpplan.simulation.layers.parameter_counts import (
    final_norm_parameters,
    head_parameters,
    padded_vocab_size,
    position_parameters,
)
from milpplan.simulation.layers.residual_streams import mapping_s
from milpplan.simulation.layers.shard import ONCE, Part, Phase, Shard
from milpplan.simulation.layers.vision import encoder_costs
from milpplan.simulation.network import collectives, far_s, placement


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Costs of an end of the model (embedding or head) for one micro-batch."""

    model: ModelSpec
    is_head: bool
    seconds: FloatArray
    """[Part, 2, n] forward and backward."""
    weight_s: FloatArray
    """[Part, n] weight gradients that run apart from the backward. The embedding's gradient is always in its
    backward."""
    kept_bytes: FloatArray
    """[n] activations."""
    workspace_bytes: FloatArray
    """[n] temporary bytes of the backward."""

    @property
    def phases(self) -> FloatArray:
        """Seconds by phase with the weight gradients, [Part, 3, n]."""
        return np.concatenate([self.seconds, self.weight_s[:, None]], axis=1)

    def matrix_parameters(self, tp: IntArray) -> FloatArray:
        """Count the parameters of the (padded) vocabulary matrix on one GPU."""
        rows = padded_vocab_size(self.model.vocab_size, tp) / tp
        return np.asarray(rows * self.model.hidden_size, dtype=np.float64)

    def parameters(self, tp: IntArray) -> FloatArray:
        """Count the parameters of this end on one GPU, without an encoder; a tied head has no matrix, only its
        norm."""
        if not self.is_head:
            return self.matrix_parameters(tp) + position_parameters(self.model)
        matrix = 0.0 if head_parameters(self.model) == 0 else self.matrix_parameters(tp)
        matrix = matrix if self.model.num_labels is None else float(head_parameters(self.model))
        return matrix + np.full(len(tp), float(final_norm_parameters(self.model)))


def copied_embedding(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Count the parameters of the embedding's copy on the last rank of a pipeline, [n].

    A tied head and layers of multi-token prediction need it, unless the last rank is the first.
    """
    needed = problem.model.tie_word_embeddings or problem.job.mtp_layers > 0
    rows = padded_vocab_size(problem.model.vocab_size, columns.tp) / columns.tp
    return np.where(needed & (columns.pp > 1) & ~columns.ends_meet, rows * problem.model.hidden_size, 0.0)


def embedding_endpoint(problem: Problem, columns: LayoutColumns) -> Endpoint:
    """Price the embedding, with the encoder of images of a job that has some.

    The embedding is a look-up (read and write a row per token), reduced over tp ranks. Each tensor-parallel rank
    holds a part of the rows. A frozen embedding has no backward.
    """
    embedding = _embedding(problem, columns)
    if problem.job.has_images:
        encoder = encoder_costs(problem, columns)
        embedding = replace(
            embedding,
            seconds=embedding.seconds + encoder.seconds,
            kept_bytes=embedding.kept_bytes + encoder.kept_bytes,
            workspace_bytes=encoder.workspace_bytes,
        )
    return _with_reference(problem, embedding)


def _with_reference(problem: Problem, end: Endpoint) -> Endpoint:
    """Add the forward of a frozen reference, whose ends have no adapters."""
    if problem.job.further_forwards:
        end.seconds[:, Phase.FORWARD] *= 1 + problem.job.further_forwards
    return end


def _embedding(problem: Problem, columns: LayoutColumns) -> Endpoint:
    """Price the embedding alone."""
    shard = Shard.of(problem, columns)
    message = BF16_BYTES * shard.tokens * shard.hidden
    seconds = np.zeros((len(Part), 2, len(columns)))
    lookup = shard.memory_bound(2 * message)
    seconds[Part.COMPUTE, Phase.FORWARD] = lookup
    seconds[Part.COMPUTE, Phase.BACKWARD] = 1.5 * lookup
    if (streams := problem.model.residual_streams) > 1:
        # Embeddings are copied to all streams, and their gradients added.
        seconds[Part.COMPUTE] += shard.memory_bound((streams + 1) * message / shard.sequence_tp)
    sp, group = columns.sequence_parallel, placement.tensor(columns)
    scatter = collectives.reduce_scatter_s(problem.hardware, message, *group)
    gather = collectives.all_gather_s(problem.hardware, message, *group)
    whole = collectives.all_reduce_s(problem.hardware, message, *group)
    seconds[Part.TP, Phase.FORWARD] = np.where(sp, scatter, whole)
    seconds[Part.TP, Phase.BACKWARD] = np.where(sp, gather, 0.0)
    if not problem.job.trains("embedding"):
        seconds[:, Phase.BACKWARD] = 0.0
    no_weight_s = np.zeros_like(seconds[:, 0])
    if problem.inference:
        return Endpoint(problem.model, False, seconds, no_weight_s, *[np.zeros(len(columns))] * 2)
    masks = shard.tokens * shard.hidden / shard.sequence_tp if problem.model.drops_embedding else 0.0
    # Token ids, labels and position ids, eight bytes each.
    kept = 24 * shard.tokens + masks
    return Endpoint(problem.model, False, seconds, no_weight_s, kept, np.zeros(len(columns)))


def head_endpoint(problem: Problem, columns: LayoutColumns) -> Endpoint:
    """Price the head, of training with the layers of multi-token prediction."""
    if problem.inference:
        head = _next_tokens(problem, columns)
    elif problem.model.num_labels is not None:
        head = _scores(problem, columns)
    else:
        head = _head_of_training(problem, columns)
    if problem.model.residual_streams > 1:
        head = _of_streams(problem, columns, head)
    head = _with_reference(problem, head)
    return _with_mtp_layers(problem, columns, head) if problem.job.mtp_layers else head


def _of_streams(problem: Problem, columns: LayoutColumns, head: Endpoint) -> Endpoint:
    """Add the mapping that weights the residual streams to the input of the final norm; it keeps the streams.

    2 u h bytes for each of n + 1 tensors forward and 2 n + 1 backward, beside the mapping's products.
    """
    shard, streams = Shard.of(problem, columns), problem.model.residual_streams
    tokens = shard.tokens / shard.sequence_tp
    if problem.inference:
        tokens = columns.micro_batch_size.astype(np.float64)
    stream, trained = BF16_BYTES * tokens * shard.hidden, problem.job.trains("head")
    forward, inputs, weight = mapping_s(shard, tokens, streams)
    apart = np.where(columns.split_backward, weight * trained, 0.0)
    seconds, weight_s = head.seconds.copy(), head.weight_s.copy()
    seconds[Part.COMPUTE, Phase.FORWARD] += forward + shard.memory_bound((streams + 1) * stream)
    if problem.inference:
        return replace(head, seconds=seconds)
    back = inputs + shard.memory_bound((2 * streams + 1) * stream)
    seconds[Part.COMPUTE, Phase.BACKWARD] += back + weight * trained - apart
    weight_s[Part.COMPUTE] += apart
    return replace(head, seconds=seconds, weight_s=weight_s, kept_bytes=head.kept_bytes + streams * stream)


def _head_of_training(problem: Problem, columns: LayoutColumns) -> Endpoint:
    """Price final norm, logits in bf16, and cross-entropy in fp32 over the vocabulary split by tp.

    The fp32 softmax is kept from forward to backward (or the tensors that the framework's loss keeps). Bf16 logits
    are temporary (Megatron-LM core/tensor_parallel/cross_entropy.py). So is a bf16 weight gradient, which exists
    beside the accumulated gradient even where the sum is fused (core/tensor_parallel/layers.py). A frozen head has
    no weight gradient and does not keep its input.
    """
    shard = Shard.of(problem, columns)
    gpu = problem.hardware.accelerator
    vocab = padded_vocab_size(problem.model.vocab_size, columns.tp) / columns.tp
    stream = BF16_BYTES * shard.tokens * shard.hidden / shard.sequence_tp
    seconds = np.zeros((len(Part), 2, len(columns)))
    norm = shard.memory_bound(2 * stream)
    loss = shard.memory_bound(16.0 * shard.tokens * vocab)
    hidden = float(shard.hidden)
    forward = kernels.gemm_s(gpu, "bf16", shard.tokens, vocab, hidden)
    weight = kernels.weight_gradient_s(
        gpu, "bf16", vocab, hidden, shard.tokens, 1.0, shard.grad_bytes, shard.fused_sums
    )
    trained = problem.job.trains("head")
    weight = weight * trained
    backward = kernels.gemm_s(gpu, "bf16", shard.tokens, hidden, vocab) + weight
    seconds[Part.COMPUTE, Phase.FORWARD] = norm + forward + loss
    seconds[Part.COMPUTE, Phase.BACKWARD] = 1.5 * norm + backward + 0.5 * loss
    apart = np.zeros_like(seconds[:, 0])
    apart[Part.COMPUTE] = np.where(columns.split_backward, weight, 0.0)
    seconds[Part.COMPUTE, Phase.BACKWARD] -= apart[Part.COMPUTE]
    message = BF16_BYTES * shard.tokens * shard.hidden
    sp, group = columns.sequence_parallel, placement.tensor(columns)
    gather = collectives.all_gather_s(problem.hardware, message, *group)
    scatter = collectives.reduce_scatter_s(problem.hardware, message, *group)
    whole = collectives.all_reduce_s(problem.hardware, message, *group)
    small = collectives.all_reduce_s(problem.hardware, FP32_BYTES * shard.tokens, *group)
    software = problem.hardware.software
    far = far_s(problem.hardware, software.far_micro_batch_s, group.size, group.stride)
    seconds[Part.TP, Phase.FORWARD] = np.where(sp, gather, 0.0) + 3 * small + far
    seconds[Part.TP, Phase.BACKWARD] = np.where(sp, scatter, whole)
    logits = shard.tokens * vocab * (columns.tp if software.gathered_logits else 1)
    kept = (1 + trained) * stream + software.logit_kept_bytes * logits
    workspace = BF16_BYTES * (logits + vocab * hidden * trained)
    return Endpoint(problem.model, True, seconds, apart, kept, workspace)


def score_bytes(shard: Shard) -> FloatArray:
    """Size the scores of a micro-batch in fp32, which sequence parallelism gathers."""
    return np.asarray(FP32_BYTES * shard.tokens * shard.problem.model.head_outputs, np.float64)


def _scores(problem: Problem, columns: LayoutColumns) -> Endpoint:
    """Price final norm, scores of every token, and their loss in fp32.

    Every tensor-parallel rank has the whole matrix and applies it to its tokens: all, or with sequence parallelism
    its share, and then gathers the scores. A class or a reward takes the score of a sequence's last token, whose
    choice has no price of its own. The loss reads and writes scores, targets and gradients, 32 bytes a score.

    Source: transformers 5.24.0 modeling_layers.py, which scores all tokens; verl@c3b20575
    verl/models/llama/megatron/layers/parallel_linear.py (``LinearForLastLayer``), of PPO's critic.
    """
    shard, gpu = Shard.of(problem, columns), problem.hardware.accelerator
    tokens, hidden, labels = shard.tokens / shard.sequence_tp, float(shard.hidden), problem.model.head_outputs
    stream = BF16_BYTES * tokens * hidden
    seconds = np.zeros((len(Part), 2, len(columns)))
    norm, loss = shard.memory_bound(2 * stream), shard.memory_bound(32.0 * shard.tokens * labels)
    trained = problem.job.trains("head")
    weight = trained * kernels.weight_gradient_s(
        gpu, "bf16", labels, hidden, tokens, 1.0, shard.grad_bytes, shard.fused_sums
    )
    seconds[Part.COMPUTE, Phase.FORWARD] = norm + kernels.gemm_s(gpu, "bf16", tokens, labels, hidden) + loss
    apart = np.zeros_like(seconds[:, 0])
    apart[Part.COMPUTE] = np.where(columns.split_backward, weight, 0.0)
    backward = 1.5 * norm + kernels.gemm_s(gpu, "bf16", tokens, hidden, labels) + weight
    seconds[Part.COMPUTE, Phase.BACKWARD] = backward + 0.5 * loss - apart[Part.COMPUTE]
    gather = collectives.all_gather_s(problem.hardware, score_bytes(shard), *placement.tensor(columns))
    seconds[Part.TP, Phase.FORWARD] = np.where(columns.sequence_parallel, gather, 0.0)
    kept = (1 + trained) * stream + score_bytes(shard)
    workspace = score_bytes(shard) + BF16_BYTES * labels * hidden * trained
    return Endpoint(problem.model, True, seconds, apart, kept, workspace)


def _with_mtp_layers(problem: Problem, columns: LayoutColumns, head: Endpoint) -> Endpoint:
    """Add the layers of multi-token prediction to the head; each is a transformer layer, embedding and head again.

    Between them are the norms of hidden states and embeddings (without images), and the projection of both, 2h to
    h. Of n residual streams each has a norm and a product of its own, to which that of the embedding is added.
    Outputs of the projection are divided by tp and gathered, and nothing hides its communication: an upper bound.
    The transformer layer keeps its activations (Megatron-LM skips it in recomputation) and runs in no pairs.

    Source: DeepSeek-AI 2024 (DeepSeek-V3), equations 21 to 23; Megatron-LM
    core/transformer/multi_token_prediction.py; the code beside the weights of deepseek-ai/DeepSeek-V4-Flash,
    inference/model.py (``MTPBlock``).
    """
    streams = problem.model.residual_streams
    shard, embedding = Shard.of(problem, columns), _embedding(problem, columns)
    layer = layer_seconds(problem, problem.model.mtp_kind, columns)[:, ONCE]
    kept = layer_activations(problem, problem.model.mtp_kind, columns)
    phases = layer + embedding.phases + head.phases
    width, hidden = shard.hidden / shard.tp, float(shard.hidden)
    products = [shard.gemm(shard.tokens, width, 2 * hidden, {})]
    if streams > 1:
        products = [shard.gemm(number * shard.tokens, width, hidden, {}) for number in (1, streams)]
    forward, dgrad, wgrad = np.sum([[one.forward, one.dgrad, one.wgrad] for one in products], axis=0)
    apart = np.where(columns.split_backward, wgrad, 0.0)
    stream = BF16_BYTES * shard.tokens * shard.hidden / shard.sequence_tp
    # Two norms, and the concatenation: each reads and writes two tensors. Of several streams, norms of embeddings
    # and streams, and a sum; its copies of the embedding are in ``embedding``.
    between = shard.memory_bound((8 if streams == 1 else 3 * streams + 2) * stream)
    phases[Part.COMPUTE, Phase.FORWARD] += between + forward
    phases[Part.COMPUTE, Phase.BACKWARD] += 1.5 * between + dgrad + wgrad - apart
    phases[Part.COMPUTE, len(ONCE) - 1] += apart
    message = BF16_BYTES * shard.tokens * shard.hidden
    sp, group = columns.sequence_parallel, placement.tensor(columns)
    output = collectives.all_gather_s(problem.hardware, message, *group)
    inputs = collectives.all_gather_s(problem.hardware, 2 * message, *group)
    scatter = collectives.reduce_scatter_s(problem.hardware, 2 * message, *group)
    whole = collectives.all_reduce_s(problem.hardware, 2 * message, *group)
    phases[Part.TP, Phase.FORWARD] += output + np.where(sp, inputs, 0.0)
    phases[Part.TP, Phase.BACKWARD] += np.where(sp, inputs + scatter + output, whole)
    count, added = problem.job.mtp_layers, head.phases + problem.job.mtp_layers * phases
    # The embeddings before their norm, and the inputs of the projection; hidden states are the head's input.
    kept_bytes = kept.kept + embedding.kept_bytes + head.kept_bytes + (2 + streams) * stream
    return Endpoint(
        problem.model,
        True,
        added[:, : len(ONCE) - 1],
        added[:, len(ONCE) - 1],
        head.kept_bytes + count * kept_bytes,
        np.maximum(head.workspace_bytes, kept.workspace),
    )


def _next_tokens(problem: Problem, columns: LayoutColumns) -> Endpoint:
    """Price the head of inference: final norm and bf16 logits of the last token of every sequence.

    The logits are gathered over tp ranks. There is no loss, no activations are kept, and the logits are the
    workspace. The context-parallel rank with the last tokens counts. Source: prefill of vLLM
    (model_executor/layers/logits_processor.py), which selects the hidden states in this way.
    """
    shard, gpu = Shard.of(problem, columns), problem.hardware.accelerator
    tokens = columns.micro_batch_size.astype(np.float64)
    padded = padded_vocab_size(problem.model.vocab_size, columns.tp)
    seconds = np.zeros((len(Part), 2, len(columns)))
    product = kernels.gemm_s(gpu, "bf16", tokens, padded / columns.tp, float(shard.hidden))
    seconds[Part.COMPUTE, Phase.FORWARD] = shard.memory_bound(2 * BF16_BYTES * tokens * shard.hidden) + product
    logits = BF16_BYTES * tokens * padded
    gather = collectives.all_gather_s(problem.hardware, logits, *placement.tensor(columns))
    seconds[Part.TP, Phase.FORWARD] = gather
    return Endpoint(problem.model, True, seconds, np.zeros_like(seconds[:, 0]), np.zeros(len(columns)), logits)
