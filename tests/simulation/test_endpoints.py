"""The two ends of the model: bytes of Korthikanti et al. 2022 section 4.3, operation counts,
communication."""

from __future__ import annotations

import numpy as np
import pytest

from milpplan.simulation.layers import Part, Phase, embedding_endpoint, head_endpoint
from milpplan.simulation.network import collectives
from tests.simulation.cases import MODEL_HARDWARE, columns_of, ideal_hardware, problem_of


@pytest.mark.parametrize("tp", [1, 8])
def test_published_bytes_of_the_head(tp: int) -> None:
    """Final norm, projection input and fp32 logits keep 4sbh/t (1 + v/h) bytes (section 4.3)."""
    problem = problem_of("gpt3-175b")
    s, b, h, v = 2048, 2, 12288, 51200
    kept = head_endpoint(problem, columns_of(tp=tp, micro_batch_size=b, sequence_parallel=tp > 1)).kept_bytes
    assert kept == pytest.approx(4 * s * b * h / tp * (1 + v / h))


@pytest.mark.parametrize("tp", [1, 8])
def test_published_bytes_of_the_embedding(tp: int) -> None:
    """Dropout keeps a mask of sbh/t bytes (section 4.3), besides token ids, labels and positions."""
    s, b, h = 2048, 2, 12288
    columns = columns_of(tp=tp, micro_batch_size=b, sequence_parallel=tp > 1)
    kept = embedding_endpoint(problem_of("gpt3-175b"), columns).kept_bytes
    assert kept == pytest.approx(s * b * h / tp + 3 * 8 * s * b)
    without_dropout = embedding_endpoint(problem_of("llama3-8b"), columns_of()).kept_bytes
    assert without_dropout == pytest.approx(3 * 8 * 8192)


@pytest.mark.parametrize("tp", [1, 4])
def test_logits_take_six_flops_a_weight(tp: int) -> None:
    """On an ideal accelerator the head costs 2shv/t FLOPs forward and twice that backward."""
    s, h, v = 8192, 4096, 128512 if tp == 4 else 128256
    found = head_endpoint(problem_of("llama3-8b", ideal_hardware()), columns_of(tp=tp)).seconds[..., 0]
    forward, backward = found[Part.COMPUTE] * 312e12 * tp
    assert forward == pytest.approx(2 * s * h * v)
    assert backward == pytest.approx(4 * s * h * v)


def test_vocabulary_is_padded() -> None:
    """Llama-3's 128,256 rows become 129,024 on 8 ranks (a multiple of 8 * 128), 16,128 each."""
    head = head_endpoint(problem_of("llama3-8b"), columns_of(tp=8))
    assert head.matrix_parameters(np.array([8])) == 16_128 * 4096
    assert head.parameters(np.array([8])) == 16_128 * 4096 + 4096
    # The logits, and a weight gradient beside the accumulated one.
    assert head.workspace_bytes == 2 * 16_128 * (8192 + 4096)


def test_tied_head_owns_only_its_norm() -> None:
    """A tied matrix belongs to the embedding; GPT-3's final LayerNorm has two vectors."""
    problem = problem_of("gpt3-175b")
    head, embedding = head_endpoint(problem, columns_of()), embedding_endpoint(problem, columns_of())
    assert head.parameters(np.array([1])) == 2 * 12288
    assert embedding.parameters(np.array([1])) == (51200 + 2048) * 12288


@pytest.mark.parametrize("case", MODEL_HARDWARE, ids=lambda case: case[0])
def test_no_tensor_parallelism_no_communication(case: tuple[str, str, str, str]) -> None:
    """With tp = 1 both ends compute only, and backward costs more than forward."""
    model, hardware, kernel, precision = case
    problem = problem_of(model, hardware, attention_kernel=kernel, precision=precision)
    for end in (embedding_endpoint(problem, columns_of()), head_endpoint(problem, columns_of())):
        assert np.all(np.delete(end.seconds, Part.COMPUTE, axis=0) == 0)
        assert np.all(end.seconds[Part.COMPUTE, Phase.BACKWARD] > end.seconds[Part.COMPUTE, Phase.FORWARD])


def test_communication_by_hand() -> None:
    """Sequence parallelism scatters after the look-up and gathers before the logits; the loss adds three
    small all-reduces (maximum, sum, target)."""
    problem = problem_of("llama3-8b", "dgx-h100")
    message = 2 * 8192 * 4096
    gather = collectives.all_gather_s(problem.hardware, message, 8, 1)
    scatter = collectives.reduce_scatter_s(problem.hardware, message, 8, 1)
    small = collectives.all_reduce_s(problem.hardware, 4 * 8192, 8, 1)
    columns = columns_of(tp=8, sequence_parallel=True)
    embedding = embedding_endpoint(problem, columns).seconds[Part.TP, :, 0]
    head = head_endpoint(problem, columns).seconds[Part.TP, :, 0]
    assert embedding == pytest.approx([float(scatter), float(gather)])
    assert head == pytest.approx([float(gather + 3 * small), float(scatter)])


def test_more_tokens_never_cheaper() -> None:
    """A longer micro-batch never makes an end faster or smaller."""
    problem = problem_of("llama3-8b", "dgx-h100")
    for rule in (embedding_endpoint, head_endpoint):
        found = [rule(problem, columns_of(tp=2, micro_batch_size=b)) for b in (1, 2, 3, 4, 8)]
        assert np.all(np.diff([end.seconds.sum(axis=0) for end in found], axis=0) >= 0)
        assert np.all(np.diff([end.kept_bytes for end in found], axis=0) > 0)
