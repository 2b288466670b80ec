"""The traffic of one step: who sends how much to whom, over which tier, and when.

The matrix is made of the edges of every collective (``wires``) on every group of ranks; its sum is that of the
collectives' wire bytes in closed form. Over time each message is spread evenly over the work item that it belongs
to.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from milpplan.communication import messages, wires
from milpplan.communication.effective_bandwidth import effective_bandwidths
from milpplan.communication.flows import Flow, flows
from milpplan.communication.messages import PARALLELISMS, Transport
from milpplan.communication.rank_lists import gpus_per_domain, rank_lists
from milpplan.communication.records import Links, Pairs, Tier, TrafficReport, Utilisation, pairs_of
from milpplan.communication.timeline import DEFAULT_BINS, StageTraffic, timeline_of
from milpplan.communication.wires import ALGORITHMS, Algorithm
from milpplan.costs import states
from milpplan.costs.columns import FloatArray, IntArray, LayoutColumns
from milpplan.costs.endpoints import embedding_endpoint
from milpplan.costs.simulator import simulate
from milpplan.errors import InvalidInputError
from milpplan.specs.plan import Plan
from milpplan.specs.problem import Problem

MAX_PAIRS = 50_000_000
"""Most edges that are written out (a few GiB)."""


@dataclass(frozen=True, slots=True)
class _Wiring:
    """Edges of one collective on all groups, for a message of one byte: arrays [edges] with the pipeline rank
    ``stage`` (of transfers: the pair of ranks); ``wire_bytes`` [pp] of all groups of a rank in closed form."""

    key: IntArray
    share: FloatArray
    stage: IntArray
    wire_bytes: FloatArray


@dataclass(slots=True)
class _Wires:
    """Makes wirings, each once; ``found`` collects what the parallelisms send."""

    num_gpus: int
    domain: int
    algorithm: Algorithm
    groups: dict[str, IntArray]
    known: dict[tuple[Transport, str, float | None], _Wiring] = field(default_factory=dict)
    found: dict[str, list[tuple[IntArray, FloatArray]]] = field(default_factory=lambda: defaultdict(list))
    closed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    edges: int = 0

    def wiring(self, operation: Transport, group: str, copies: float | None = None) -> _Wiring:
        """The edges of a collective on a family of groups."""
        key = operation, group, copies
        if key not in self.known:
            self.known[key] = self._made(operation, self.groups[group], copies)
        return self.known[key]

    def _made(self, operation: Transport, groups: IntArray, copies: float | None) -> _Wiring:
        stages, number, size = groups.shape
        rows = groups.reshape(-1, size)
        wire = np.zeros(len(rows))
        keys, shares, stage = [np.zeros(0, np.int64)], [np.zeros(0)], [np.zeros(0, np.int64)]
        cuts = np.diff(rows // self.domain, axis=1) != 0
        patterns, inverse = np.unique(cuts, axis=0, return_inverse=True)
        for place, pattern in enumerate(patterns):
            ends = [0, *(np.flatnonzero(pattern) + 1).tolist(), size]
            parts = tuple(np.diff(ends).tolist())
            mine = np.flatnonzero(inverse.reshape(-1) == place)
            channels = min(parts) if len(parts) > 1 else 1
            self._count(len(mine) * size * (size if operation == "all_to_all" else channels))
            edges = wires.edges(operation, self.algorithm, parts, copies)
            keys.append((rows[mine][:, edges.sender] * self.num_gpus + rows[mine][:, edges.receiver]).ravel())
            shares.append(np.tile(edges.share, len(mine)))
            stage.append(np.repeat(mine // number, len(edges.share)))
            wire[mine] = wires.wire_bytes(operation, 1.0, parts, copies)
        per_stage = wire.reshape(stages, number).sum(axis=1)
        return _Wiring(np.concatenate(keys), np.concatenate(shares), np.concatenate(stage), per_stage)

    def _count(self, most: int) -> None:
        """Refuse more edges than memory holds, before they are made."""
        self.edges += most
        if self.edges > MAX_PAIRS:
            raise InvalidInputError(
                f"The traffic has more than {MAX_PAIRS:,} pairs of GPUs.",
                "Expected a plan whose GPUs send to fewer others.",
                "Use a plan on fewer GPUs: the pattern is the same, and repeats.",
            )

    def send(self, parallelism: str, wiring: _Wiring, num_bytes: FloatArray) -> None:
        """Add messages of ``num_bytes`` [pp] to a parallelism."""
        self.found[parallelism].append((wiring.key, wiring.share * num_bytes[wiring.stage]))
        self.closed[parallelism] += float((wiring.wire_bytes * num_bytes).sum())

    def tiers(self, wiring: _Wiring) -> FloatArray:
        """Bytes by pipeline rank and tier [pp, 2] for a message of one byte."""
        sender, receiver = wiring.key // self.num_gpus, wiring.key % self.num_gpus
        between = sender // self.domain != receiver // self.domain
        size = len(wiring.wire_bytes)
        counted = np.bincount(wiring.stage * 2 + between, wiring.share, minlength=2 * size)
        return np.asarray(counted.reshape(size, 2), dtype=np.float64)

    def pairs(self) -> dict[str, Pairs]:
        """What was sent, by parallelism."""
        found: dict[str, Pairs] = {}
        for name in PARALLELISMS:
            parts = self.found.get(name, [])
            key = np.concatenate([np.zeros(0, np.int64), *(part[0] for part in parts)])
            sent = np.concatenate([np.zeros(0), *(part[1] for part in parts)])
            found[name] = pairs_of(key[sent > 0], sent[sent > 0], self.num_gpus)
        return found


def traffic(
    problem: Problem, plan: Plan, algorithm: Algorithm = "ring", num_bins: int = DEFAULT_BINS
) -> TrafficReport:
    """The traffic of one training step of a plan.

    ``algorithm``: what collectives are made of. ``tree`` serves all-reduces (two binary trees over the domains, a
    chain inside), ``hierarchical`` groups with as many ranks in each of their domains; else rings. Reductions in
    the network are not in the matrix: their other end is a switch.

    Raises:
        IllegalPlanError: the plan cannot run.
        InvalidInputError: a plan whose messages are not counted, an unknown algorithm, no bin, or more pairs than
            memory holds.
    """
    if algorithm not in ALGORITHMS or num_bins < 1:
        raise InvalidInputError(
            f"algorithm={algorithm!r}, num_bins={num_bins}.",
            f"Expected one of {', '.join(ALGORITHMS)}, and at least one bin.",
            "Correct the argument.",
        )
    report = simulate(problem, plan)
    layout = plan.layout
    _check_counted(problem, plan)
    made = _wires_of(problem, plan, algorithm)
    sent = _within_stages(made, plan, flows(problem, plan))
    _between_stages(made, problem, plan, sent)
    pairs = made.pairs()
    everything = pairs_of(
        np.concatenate([part.sender * layout.num_gpus + part.receiver for part in pairs.values()]),
        np.concatenate([part.num_bytes for part in pairs.values()]),
        layout.num_gpus,
    )
    comm = {name: value for name, value in report.breakdown_s.items() if name.endswith("_exposed")}
    return TrafficReport(
        algorithm=algorithm,
        num_gpus=layout.num_gpus,
        gpus_per_domain=made.domain,
        gpus_per_node=problem.hardware.gpus_per_node,
        step_time_s=report.step_time_s,
        pairs=pairs,
        wire_bytes={name: float(made.closed[name]) for name in PARALLELISMS},
        tier_bytes={name: _tier_bytes(part, made.domain) for name, part in pairs.items()},
        rail_change_bytes=_rail_change_bytes(everything, made.domain),
        gpu_links=links_of(everything, made.domain, layout.num_gpus, 1),
        node_links=links_of(everything, made.domain, layout.num_gpus, problem.hardware.gpus_per_node),
        timeline=timeline_of(problem, plan, sent, num_bins),
        utilisation=_utilisation(report.step_time_s, [stage.breakdown_s for stage in report.stages], comm),
        exposed_s=comm | {"gradient_norm": report.breakdown_s["grad_norm"]},
        hidden_s=dict(report.hidden_s),
        bandwidths=effective_bandwidths(problem.hardware, layout.num_gpus),
    )


def _check_counted(problem: Problem, plan: Plan) -> None:
    """Refuse what ``messages`` does not know: forwards alone, two switches that change what is sent, and nodes of
    several sizes."""
    seen = [
        *(["a cluster of several node types"] if problem.other_hardware else []),
        *(["inference"] if problem.inference else []),
        *(["pp_scatter_gather=true"] if plan.layout.pp_scatter_gather else []),
        *(["gather_again=false"] if not plan.layout.gather_again else []),
    ]
    if seen:
        raise InvalidInputError(
            f"The traffic of {' and '.join(seen)} is not counted.",
            "Expected a training plan on one node type that gathers inputs again and sends whole activations "
            "between stages.",
            "Plan without --inference and --allow scatter-gather or kept-gathered, on nodes of one type.",
        )


def _wires_of(problem: Problem, plan: Plan, algorithm: Algorithm) -> _Wires:
    """An empty collection for the groups of a plan."""
    layout = plan.layout
    columns = LayoutColumns.of([layout])
    shards, expert_shards = (
        int(states.num_shards(problem, count)[0]) for count in (columns.cp * columns.dp, columns.expert_dp)
    )
    groups = rank_lists(layout, shards, expert_shards)
    stages = groups.pop("stage")
    groups["pair"] = np.sort(np.stack([stages[0, 0], stages[-1, 0]], axis=-1), axis=-1)[None]
    groups["everyone"] = np.arange(layout.num_gpus)[None, None]
    groups["stage"] = stages
    return _Wires(layout.num_gpus, gpus_per_domain(problem.hardware, layout.num_gpus), algorithm, groups)


def _within_stages(made: _Wires, plan: Plan, found: list[Flow]) -> StageTraffic:
    """Send the messages of the virtual stages; returns their bytes by tier and phase."""
    layout = plan.layout
    stages = layout.num_virtual_stages
    rank_of = np.array(layout.stage_ranks)
    calls = np.array([layout.num_micro_batches, layout.num_micro_batches, 1, 1])
    items = np.zeros((stages, 4, 2))
    for flow in found:
        wiring = made.wiring(flow.operation, flow.group, flow.copies)
        step = np.bincount(rank_of, flow.message_bytes @ calls, minlength=layout.pp)
        made.send(flow.parallelism, wiring, step.astype(np.float64))
        items += flow.message_bytes[:, :, None] * made.tiers(wiring)[rank_of][:, None, :]
    return StageTraffic(items, np.zeros((max(stages - 1, 0), 2)), np.zeros(2))


def _between_stages(made: _Wires, problem: Problem, plan: Plan, sent: StageTraffic) -> None:
    """Send activations and their gradients, the gradient of a tied embedding, and the norm of the gradients."""
    layout, columns = plan.layout, LayoutColumns.of([plan.layout])
    message = float(messages.transfer_bytes(problem, columns)[0])
    if layout.pp > 1:
        rank_of = np.array(layout.stage_ranks)
        # Where a V turns, both virtual stages are on one rank and nothing is sent.
        moves = np.flatnonzero(rank_of[:-1] != rank_of[1:])
        hops = np.stack([rank_of[moves], rank_of[moves + 1]], axis=1)
        distinct, hop, counts = np.unique(hops, axis=0, return_inverse=True, return_counts=True)
        sender, receiver = (made.groups["stage"][distinct[:, end], 0] for end in range(2))
        number = np.repeat(np.arange(len(distinct)), sender.shape[1])
        each, ones = np.full(len(distinct), float(sender.shape[1])), np.ones(sender.size)
        there = _Wiring((sender * made.num_gpus + receiver).ravel(), ones, number, each)
        back = _Wiring((receiver * made.num_gpus + sender).ravel(), ones, number, each)
        often = np.asarray(counts * (message * layout.num_micro_batches))
        made.send("pp", there, often)
        made.send("pp", back, often)
        sent.hops[moves] = message * made.tiers(there)[hop.reshape(-1)]
    tied = messages.tied_bytes(problem, columns, embedding_endpoint(problem, columns))
    if tied[0] > 0:
        wiring = made.wiring("all_reduce", "pair")
        made.send("tied_embedding", wiring, tied)
        # Both ends wait for it; half of its bytes stands in each one's reduction.
        sent.items[[0, -1], 3] += made.tiers(wiring)[0] * tied[0] / 2
    norm = made.wiring("all_reduce", "everyone")
    made.send("gradient_norm", norm, np.array([4.0]))
    sent.norm[:] = made.tiers(norm)[0] * 4.0


def _tier_bytes(pairs: Pairs, domain: int) -> dict[Tier, float]:
    between = pairs.sender // domain != pairs.receiver // domain
    return {
        "inside": float(pairs.num_bytes[~between].sum()),
        "between": float(pairs.num_bytes[between].sum()),
    }


def _rail_change_bytes(pairs: Pairs, domain: int) -> float:
    between = pairs.sender // domain != pairs.receiver // domain
    changes = between & (pairs.sender % domain != pairs.receiver % domain)
    return float(pairs.num_bytes[changes].sum())


def links_of(pairs: Pairs, domain: int, num_gpus: int, gpus_per_place: int) -> Links:
    """Bytes over the links and over the network of every place of so many GPUs. Pairs within a place do not use
    its links to others."""
    places = -(-num_gpus // gpus_per_place)
    sender, receiver = pairs.sender // gpus_per_place, pairs.receiver // gpus_per_place
    between = pairs.sender // domain != pairs.receiver // domain
    inside = ~between & (sender != receiver)

    def summed(where: IntArray, chosen: FloatArray) -> FloatArray:
        return np.asarray(np.bincount(where, pairs.num_bytes * chosen, minlength=places), dtype=np.float64)

    return Links(
        summed(sender, inside), summed(receiver, inside), summed(sender, between), summed(receiver, between)
    )


def _utilisation(
    step_s: float, breakdowns: list[dict[str, float]], comm: dict[str, float]
) -> tuple[Utilisation, ...]:
    """Of every pipeline rank, from where its step goes."""
    found = []
    for parts in breakdowns:
        computing = parts["compute"] + parts["recompute"]
        inside = [name for name in comm if name not in ("param_gather_exposed", "grad_reduce_exposed")]
        busy = computing + parts["launch"] + sum(parts[name] for name in inside)
        found.append(Utilisation(busy / step_s, computing / step_s))
    return tuple(found)
