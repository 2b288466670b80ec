"""The list of tensors is the model that the parameter counts speak about."""

from __future__ import annotations

import pytest

from milpplan import load_model
from milpplan.errors import InvalidInputError
from milpplan.problem import ModelSpec, model_names
from milpplan.simulation.layers import (
    embedding_parameters,
    final_norm_parameters,
    head_parameters,
    layer_parameters,
    position_parameters,
    total_parameters,
)
from milpplan.switching.ownership import EMBEDDING, HEAD, model_tensors
from tests.amounts import long_but
from tests.switching.cases import EXPERTS, mixed_model


def check_counts(model: ModelSpec) -> None:
    """Every layer, both ends and each way of dividing agree with ``costs.parameters`` to the unit."""
    tensors = model_tensors(model)
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    assert sum(tensor.shape.size for tensor in tensors) == total_parameters(model)
    for number, kind in enumerate(model.layer_kinds):
        counts = layer_parameters(model, model.kinds[kind])
        own = [tensor for tensor in tensors if tensor.place == number]
        dense = [tensor.shape for tensor in own if tensor.expert is None]
        assert sum(tensor.shape.size for tensor in own if tensor.expert is not None) == counts.experts
        assert sum(shape.size for shape in dense if shape.split != "none") == counts.tensor_parallel
        assert sum(shape.size for shape in dense if shape.split == "none") == counts.replicated
    ends = {place: sum(t.shape.size for t in tensors if t.place == place) for place in (EMBEDDING, HEAD)}
    assert ends[EMBEDDING] == embedding_parameters(model) + position_parameters(model)
    assert ends[HEAD] == head_parameters(model) + final_norm_parameters(model)


DECODERS = tuple(name for name in model_names() if load_model(name).vision is None)


@pytest.mark.parametrize("name", long_but({*DECODERS[::3]} - {"deepseek-v3", "qwen3-235b-a22b"}, DECODERS))
def test_tensors_are_the_parameters_of_every_shipped_model(name: str) -> None:
    """Dense, experts, latent attention; tied and not."""
    check_counts(load_model(name))


@pytest.mark.parametrize("tied", [False, True])
def test_tensors_of_all_kinds_at_once(tied: bool) -> None:
    """Biases, sinks, norms of heads, gates, routers and positions are all there."""
    check_counts(mixed_model(tied))


def test_a_model_too_large_to_list_is_refused() -> None:
    """Experts by the billion would fill the memory before anything is said."""
    model = mixed_model()
    run = model.layers[1].model_copy(update={"mlp": EXPERTS.model_copy(update={"num_experts": 10**9})})
    with pytest.raises(InvalidInputError, match="routed experts"):
        model_tensors(model.model_copy(update={"layers": (run,)}))
