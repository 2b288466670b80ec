"""The messages that are counted are the messages that are priced."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.families import configurations
from milpplan.communication import wires
from milpplan.communication.wires import Message
from milpplan.problem import EXPERT_DISPATCHES, RANK_ORDERS, Layout, Problem
from milpplan.problem.huggingface import model_from_config
from milpplan.simulation import LayoutColumns, states
from milpplan.simulation.layers import (
    Part,
    Phase,
    embedding_endpoint,
    head_endpoint,
    layer_activations,
    layer_seconds,
)
from milpplan.simulation.network import RankGroup, placement, transfer_s
from milpplan.simulation.network.collectives import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    p2p_s,
    reduce_scatter_s,
)
from tests.simulation.cases import (
    MODEL_HARDWARE,
    adapted,
    problem_of,
    random_layout,
    shipped_hardware,
    shipped_model,
)

OF_PART = {Part.TP: ("tp", "sp"), Part.CP: ("cp",), Part.EP: ("ep",)}
GATHERING = (
    *MODEL_HARDWARE,
    ("deepseek-ai--DeepSeek-V4-Flash", "dgx-b200", "flash", "bf16"),
    ("MiniMaxAI--MiniMax-M3", "dgx-h200", "flash", "bf16"),
)
"""Also attention to compressed keys and to blocks of keys, whose context-parallel ranks gather."""
HIDDEN = {Part.TP: Part.TP_HIDDEN, Part.CP: Part.CP_HIDDEN}


def free_of_contention(problem: Problem) -> Problem:
    """Communication takes nothing from compute, so that exposed and hidden add up to its time."""
    hardware = problem.hardware
    tiers = {name: getattr(hardware, name).model_copy(update={"processor_fraction": 0.0}) for name in
             ("scale_up", "scale_out")}  # fmt: skip
    return problem.model_copy(update={"hardware": hardware.model_copy(update=tiers)})


def gathering(problem: Problem) -> Problem:
    """Context-parallel ranks gather keys and values."""
    software = problem.hardware.software.model_copy(update={"gathered_keys": True})
    return problem.model_copy(update={"hardware": problem.hardware.model_copy(update={"software": software})})


def test_gathered_keys_and_values_take_their_memory() -> None:
    """Llama-3 8B has 8 heads of 128 keys and values: 8192 tokens of 2 * 2048 bytes are gathered, more than the
    workspace of the MLP takes for 256 tokens."""
    ring = problem_of(shipped_model("llama3-8b"), shipped_hardware("dgx-h100"), sequence_length=8192)
    kind = ring.model.kinds[0]
    for cp in (1, 32):
        columns = LayoutColumns.of([Layout(cp=cp, global_batch_size=1)])
        sizes = [layer_activations(problem, kind, columns).workspace[0] for problem in (ring, gathering(ring))]
        stream = 2 * 8192 // cp * 4096
        assert sizes[1] == (sizes[0] if cp == 1 else 8192 * 2 * 2048 + stream)


def seconds(problem: Problem, columns: LayoutColumns, message: Message) -> float:
    """Time of one message, from the formulas of collectives."""
    hardware = problem.hardware
    group: RankGroup = getattr(placement, message.group)(columns)
    if message.operation == "send":
        return float(p2p_s(hardware, message.num_bytes, group.stride)[0])
    if message.group in ("head_exchange", "context") and message.operation == "all_to_all":
        return float(all_to_all_s(hardware, message.num_bytes, group.size, group.stride)[0])
    if message.operation == "all_to_all":
        return float(all_to_all_s(hardware, message.num_bytes, group.size, group.stride, message.copies)[0])
    by_name = {"all_reduce": all_reduce_s, "all_gather": all_gather_s, "reduce_scatter": reduce_scatter_s}
    return float(by_name[message.operation](hardware, message.num_bytes, *group)[0])


@pytest.mark.parametrize(("frozen", "gathered"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("case", range(len(GATHERING)))
def test_messages_take_the_time_of_the_layer(case: int, frozen: bool, gathered: bool) -> None:
    """Of every kind of layer the times of the counted messages, added up, are its communication, exposed and
    hidden, forward and backward; likewise at the ends of the model, with adapters, and with gathered keys and
    values."""
    name, hardware, kernel, precision = GATHERING[case]
    model = model_from_config(configurations()[name], name) if "--" in name else name
    problem = free_of_contention(
        problem_of(model, hardware, sequence_length=1024, attention_kernel=kernel, precision=precision)
    )
    random = np.random.default_rng(case)
    problem = adapted(random, problem) if frozen else problem
    problem = gathering(problem) if gathered else problem
    for number in range(3):
        layout = random_layout(random, problem)
        name = EXPERT_DISPATCHES[(case + number) % (4 if layout.etp == 1 else 1)] if layout.ep > 1 else "default"
        columns = LayoutColumns.of([layout.model_copy(update={"expert_dispatch": name})])
        for kind in problem.model.kinds:
            whole = layer_seconds(problem, kind, columns)[..., 0]
            found = wires.layer_messages(problem, kind, columns)
            for part, names in OF_PART.items():
                for phase in (Phase.FORWARD, Phase.BACKWARD):
                    # The messages of weight gradients that run by themselves count as the backward's.
                    phases = [phase] if phase == Phase.FORWARD else [phase, Phase.WEIGHT]
                    expected = whole[part, phases].sum()
                    expected += whole[HIDDEN[part], phases].sum() if part in HIDDEN else 0.0
                    times = [
                        (m.forward if phase == Phase.FORWARD else m.backward)[0] * seconds(problem, columns, m)
                        for m in found
                        if m.parallelism in names
                    ]
                    assert sum(times) == pytest.approx(expected, rel=1e-9)
        for is_head, end in ((False, embedding_endpoint), (True, head_endpoint)):
            expected_s = end(problem, columns).seconds[Part.TP, :, 0]
            found = wires.end_messages(problem, is_head, columns)
            took = [
                sum(getattr(m, p)[0] * seconds(problem, columns, m) for m in found)
                for p in ("forward", "backward")
            ]
            assert took == pytest.approx(expected_s.tolist(), rel=1e-9)


@pytest.mark.parametrize("case", range(len(MODEL_HARDWARE)))
def test_switches_change_messages_and_times_alike(case: int) -> None:
    """With inputs that stay gathered the times of the counted messages are the layer's communication, and those of
    the replayed ones what selective recomputation adds; forwards alone send nothing else."""
    model, hardware, kernel, precision = MODEL_HARDWARE[case]
    for kind_of_job in ("training", "adapters", "inference"):
        options: dict[str, Any] = {"sequence_length": 1024, "attention_kernel": kernel, "precision": precision}
        options["kind"] = "training" if kind_of_job == "adapters" else kind_of_job
        problem = free_of_contention(problem_of(model, hardware, **options))
        if kind_of_job == "adapters":
            problem = adapted(np.random.default_rng(case), problem)
        layout = Layout(tp=2, dp=4, sequence_parallel=True, gather_again=False, global_batch_size=8)
        columns = LayoutColumns.of([layout])
        for kind in problem.model.kinds:
            whole = layer_seconds(problem, kind, columns)[..., 0]
            expected = whole[Part.TP] + whole[Part.TP_HIDDEN]
            sent = [m for m in wires.layer_messages(problem, kind, columns) if m.parallelism in ("tp", "sp")]
            forward = sum(m.forward[0] * seconds(problem, columns, m) for m in sent)
            backward = sum(m.backward[0] * seconds(problem, columns, m) for m in sent)
            assert [forward, backward] == pytest.approx(expected[[Phase.FORWARD, Phase.BACKWARD]], rel=1e-9)
            again = wires.replayed_messages(problem, kind, columns)
            took = sum(m.backward[0] * seconds(problem, columns, m) for m in again)
            assert took == pytest.approx(expected[Phase.SELECTIVE], rel=1e-9)
        for is_head, end in ((False, embedding_endpoint), (True, head_endpoint)):
            found = wires.end_messages(problem, is_head, columns)
            both = [
                sum(getattr(m, p)[0] * seconds(problem, columns, m) for m in found)
                for p in ("forward", "backward")
            ]
            assert both == pytest.approx(end(problem, columns).seconds[Part.TP, :, 0].tolist(), rel=1e-9)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("scattered", [False, True])
def test_transfers_take_the_time_of_their_bytes(sequence_parallel: bool, scattered: bool) -> None:
    """What a rank sends, and what the receivers gather, takes what ``transfers`` says."""
    problem = problem_of("gpt3-175b", "dgx-a100-80", sequence_length=1024)
    layout = Layout(tp=4, pp=8, dp=2, global_batch_size=16, sequence_parallel=sequence_parallel)
    columns = LayoutColumns.of([layout.model_copy(update={"pp_scatter_gather": scattered})])
    sent = wires.transfer_bytes(problem, columns)
    took = p2p_s(problem.hardware, sent, placement.pipeline(columns).stride)
    gathered = wires.gathered_bytes(problem, columns)
    took = took + all_gather_s(problem.hardware, gathered, *placement.tensor(columns)) * (gathered > 0)
    took = took + 2 * problem.hardware.software.message_s
    assert took == pytest.approx(transfer_s(problem, columns), rel=1e-9)


@pytest.mark.parametrize("frozen", [False, True])
def test_messages_of_the_states_take_their_time(frozen: bool) -> None:
    """Reductions and gathers of every ZeRO stage, in every order of ranks, take what ``states`` says, once a step
    or in every micro-batch."""
    problem = problem_of("mixtral-8x7b", "dgx-h200", sequence_length=1024)
    random, kind = np.random.default_rng(1), problem.model.kinds[0]
    problem = adapted(random, problem) if frozen else problem
    for _ in range(30):
        layout = random_layout(random, problem)
        layout = layout.model_copy(update={"rank_order": RANK_ORDERS[random.integers(24)]})
        columns = LayoutColumns.of([layout])
        local = states.local_layer_parameters(problem, kind, columns)
        shapes = dict(zip(("replicas", "expert_replicas"), states.replica_groups(columns, local), strict=True))
        groups = {name: group for name, (_, group) in shapes.items()}
        groups |= {"tensor": placement.tensor(columns), "expert_tensor": placement.expert_tensor(columns)}
        groups |= {"replica_shards": groups["replicas"], "expert_shards": groups["expert_replicas"]}
        often, once = wires.state_messages(problem, columns, local)

        def total(found: list[Message], name: str, attribute: str, groups: dict[str, RankGroup] = groups) -> float:
            """Seconds of a parallelism's messages; copies of shards have no group here, and no bytes."""
            by_name = {"all_reduce": all_reduce_s, "all_gather": all_gather_s, "reduce_scatter": reduce_scatter_s}
            times = [
                getattr(m, attribute) * by_name[m.operation](problem.hardware, m.num_bytes, *groups[m.group])
                for m in found
                if m.parallelism == name and m.group in groups
            ]
            return float(np.sum(times))

        reduce_s = float(states.reduce_s(problem, columns, local)[0])
        gather_s = float(states.gather_s(problem, columns, local)[0])
        stage = layout.zero_stage
        assert total(once, "gradient_reduce", "backward") == pytest.approx(reduce_s if stage <= 1 else 0)
        assert total(often, "gradient_reduce", "backward") == pytest.approx(reduce_s if stage >= 2 else 0)
        assert total(once, "parameter_gather", "forward") == pytest.approx(gather_s if stage in (1, 2) else 0)
        for attribute in ("forward", "backward"):
            assert total(often, "parameter_gather", attribute) == pytest.approx(gather_s if stage == 3 else 0)
