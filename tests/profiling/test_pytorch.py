"""The machine of PyTorch, on the CPU; skipped where PyTorch is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from milpplan import load_hardware
from milpplan.profiling.overlay import layers_cost
from milpplan.profiling.records import MODES, Attention, Copy, Exchange, Layers, MeasurementError, Product, Traffic
from tests.cli.test_cli import run
from tests.profiling.cases import BASE

torch = pytest.importorskip("torch")

LAYERS = Layers(
    hidden_size=128,
    intermediate_size=320,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=64,
    sequence_length=64,
    micro_batch_size=2,
    num_layers=2,
    recompute="none",
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tests share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def machine() -> Any:
    """The CPU."""
    from milpplan.profiling.pytorch.machine import TorchMachine

    return TorchMachine("cpu")


def test_operators_are_timed(machine: Any) -> None:
    """Each gives positive seconds; a CPU has no copies."""
    assert machine.product(Product(m=64, n=64, k=64)).median_s > 0
    attention = Attention(sequence_length=64, micro_batch_size=1, num_heads=2, head_dim=64)
    assert all(one.median_s > 0 for one in machine.attention(attention))
    for operator in ("add", "norm"):
        assert machine.traffic(Traffic(operator=operator, num_bytes=65536)).median_s > 0
    with pytest.raises(MeasurementError):
        machine.copy(Copy(direction="host_to_device", num_bytes=4096))


def test_what_cannot_be_done_is_a_measurement_error(machine: Any) -> None:
    """A product larger than any memory."""
    with pytest.raises(MeasurementError):
        machine.product(Product(m=10**9, n=1, k=10**9))


@pytest.mark.parametrize("recompute", MODES)
def test_layers_keep_what_the_model_says(machine: Any, recompute: str) -> None:
    """Bytes from forward to backward, to the byte but for two statistics of each norm (16 bits on a CPU)."""
    shape = LAYERS.model_copy(update={"recompute": recompute})
    found = machine.layers(shape)
    tokens = shape.micro_batch_size * shape.sequence_length
    statistics = 0 if recompute == "full" else 2 * 2 * 2 * tokens * shape.num_layers
    assert found.kept_bytes == layers_cost(shape, load_hardware(BASE)).kept_bytes + statistics
    assert found.peak_bytes is None
    assert found.backward.median_s > 0


def _gradients(recompute: str) -> tuple[Any, list[Any]]:
    from milpplan.profiling.pytorch.machine import Flash, _forward, blocks, pointwise

    torch.manual_seed(3)
    device = torch.device("cpu")
    shape = LAYERS.model_copy(update={"recompute": recompute})
    stack = blocks(shape, device, pointwise(device), Flash(device, lambda run: None))  # type: ignore[arg-type]
    x = torch.randn(128, 128, dtype=torch.bfloat16).requires_grad_()
    out = _forward(stack, x)
    torch.autograd.backward(out, torch.randn_like(out))
    return x.grad, [weight.sum for block in stack for weight in block.weights]


def test_recomputation_changes_no_gradient() -> None:
    """Of the input and of every weight, whatever is replayed."""
    plain = _gradients("none")
    assert float(plain[0].abs().max()) > 0
    for recompute in ("selective", "full"):
        again = _gradients(recompute)
        assert torch.equal(again[0], plain[0])
        assert all(torch.equal(a, b) for a, b in zip(again[1], plain[1], strict=True))


def test_a_block_is_a_transformer_layer() -> None:
    """Its output and the gradient of its input are those of the same layer written with PyTorch's own autograd."""
    from milpplan.profiling.pytorch.machine import Flash, blocks, pointwise

    torch.manual_seed(5)
    device = torch.device("cpu")
    (block,) = blocks(
        LAYERS.model_copy(update={"num_layers": 1}),
        device,
        pointwise(device),
        Flash(device, lambda run: None),  # type: ignore[arg-type]
    )
    x = torch.randn(128, 128).bfloat16()
    grad = torch.randn(128, 128).bfloat16()
    own, plain = x.clone().requires_grad_(), x.double().requires_grad_()
    out, reference = block(own), _plain_layer(block, plain)
    torch.autograd.backward(out, grad)
    torch.autograd.backward(reference, grad.double())
    assert _distance(out, reference) < 0.02
    assert _distance(own.grad, plain.grad) < 0.02


def _plain_layer(block: Any, x: Any) -> Any:
    functional = torch.nn.functional
    gains = [(gain.value.double(), shift.value.double()) for gain, shift in block.norms]
    packed, out, up, down = (one.value.double() for one in (block.packed, block.out, block.up, block.down))
    y = (functional.layer_norm(x, (128,), *gains[0]) @ packed.t()).view(2, 64, 3, 2, 64).permute(2, 0, 3, 1, 4)
    cos, sin = (angle.double().view(2, 1, 64, 32) for angle in block.angles)

    def turned(part: Any) -> Any:
        left, right = part.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)

    scores = turned(y[0]) @ turned(y[1]).transpose(-1, -2) / 8.0
    scores = scores.masked_fill(torch.ones(64, 64).triu(1).bool(), float("-inf"))
    x = x + (scores.softmax(-1) @ y[2]).transpose(1, 2).reshape(128, 128) @ out.t()
    gate, rest = (functional.layer_norm(x, (128,), *gains[1]) @ up.t()).chunk(2, dim=-1)
    return x + (functional.silu(gate) * rest) @ down.t()


def _distance(found: Any, reference: Any) -> float:
    found, reference = found.detach().double(), reference.detach()
    return float((found - reference).norm() / reference.norm())


def test_collectives_among_processes(machine: Any) -> None:
    """Two ranks, every operation."""
    rows = list(machine.collectives(Exchange(num_ranks=2, message_bytes=(4096,))))
    assert [one.operation for one in rows] == ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    assert all(one.message_bytes == 4096 for one in rows)
    assert all(one.time.median_s > 0 for one in rows)


def test_the_command_on_the_cpu(tmp_path: Path) -> None:
    """It measures, says that this is no accelerator, and writes an overlay that can be read."""
    out = tmp_path / "cpu.toml"
    words = ["profile", "--hardware", BASE, "--out", str(out), "--device", "cpu", "--quick"]
    done = run(*words, "--time-limit", "20")
    assert done.exit_code in (0, 4), done.output
    assert "describe no accelerator" in done.stderr
    assert "measured on the CPU" in done.stdout
    assert load_hardware(out).software.name == f"{BASE}-profile"
