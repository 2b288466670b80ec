"""HotSPa's switches: its planner and its order against the best senders, relays and the best order.

    python -m benchmarks.switching [--markdown benchmarks/results/switching.md] [--json]

Instances: HotSPa's published strategies (``tests/data/switching``), with volumes and times of its own choice of
senders. Links are its assumed ones, 200 GB/s inside a node and 25 GB/s between nodes per GPU, no latencies.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown_table, measured_on, replace_section
from milpplan import (
    Layout,
    Links,
    ModelSpec,
    Plan,
    SwitchCosts,
    SwitchOrder,
    VirtualStage,
    best_order,
    switch_costs,
)
from milpplan.problem.model import DenseMlp, GroupedQueryAttention, LayerRun
from milpplan.switching.ownership import ShardRules
from milpplan.switching.records import GradientRoute
from milpplan.units import bytes_text

Strategy = Sequence[int]
"""dp, tp, pp."""
Case = dict[str, Any]

DATA = Path(__file__).parents[1] / "tests" / "data" / "switching" / "hotspa_switch_volumes.json"
LINKS = Links(8, 200e9, 25e9)
HETU = ShardRules(shards="hetu", padded_vocabulary=False)
SCATTERED = ShardRules(padded_vocabulary=False)
"""Shares of gradients as a reduce-scatter leaves them."""
GRAD_BYTES = 2
SIZES = {"7b": (32, 32, 4096, 11008), "13b": (40, 40, 5120, 13824), "32b": (60, 208, 6656, 17920)}
"""Layers, heads, hidden size, feed-forward width. HotSPa cuts the 52 heads of its 32B model in 16 parts; 208 heads
of 32 are cut at the same rows."""


@cache
def cases() -> tuple[Case, ...]:
    """The instances."""
    found: list[Case] = json.loads(DATA.read_text(encoding="utf-8"))["cases"]
    return tuple(found)


def name_of(case: Case) -> str:
    """Model, GPUs and set of buckets."""
    return f"{case['model'].upper()}, {case['gpus']} GPUs, {case['comb']}"


def model_of(case: Case) -> ModelSpec:
    """The LLaMA of an instance."""
    layers, heads, hidden, width = SIZES[case["model"]]
    attention = GroupedQueryAttention(
        num_attention_heads=heads, num_key_value_heads=heads, head_dim=hidden // heads
    )
    run = LayerRun(count=layers, attention=attention, mlp=DenseMlp(intermediate_size=width))
    return ModelSpec(
        name=case["model"], hidden_size=hidden, vocab_size=30592, max_position_embeddings=32768, layers=(run,)
    )


def plan_of(case: Case, strategy: Strategy) -> Plan:
    """A strategy as a plan; HotSPa scatters gradients wherever there are replicas."""
    dp, tp, pp = strategy
    layers = SIZES[case["model"]][0]
    layout = Layout(dp=dp, tp=tp, pp=pp, zero_stage=1 if dp > 1 else 0, global_batch_size=512)
    cuts = [layers * stage // pp for stage in range(pp + 1)]
    stages = tuple(VirtualStage(layers=(cuts[stage], cuts[stage + 1])) for stage in range(pp))
    return Plan(layout=layout, virtual_stages=stages)


@dataclass(frozen=True, slots=True)
class Compared:
    """One instance: seconds of a step's switches, HotSPa's first. ``direct``: best senders in HotSPa's order, in
    the best order from its home, and with the best home; ``relay``: the same with relays; ``scattered``: with
    relays and the shares that a reduce-scatter leaves, best order."""

    name: str
    hotspa_s: float
    direct_s: tuple[float, float, float]
    relay_s: tuple[float, float, float]
    scattered_s: float
    gradients: GradientRoute
    order: tuple[tuple[int, ...], ...]
    step_bytes: int
    best_bytes: int


def step_s(costs: SwitchCosts) -> float:
    """Seconds in the given order, gradients handed on."""
    size = len(costs.parameters_s)
    arcs = [(a, (a + 1) % size) for a in range(size)]
    return float(sum(costs.parameters_s[arc] + (costs.gradients_s[arc] if arc[0] else 0.0) for arc in arcs))


def step_bytes(costs: SwitchCosts, found: SwitchOrder) -> int:
    """Bytes of all switches of one step in an order."""
    home, size = found.order[0], len(found.order)
    total = 0
    for a, b in zip(found.order, (*found.order[1:], home), strict=True):
        total += int(costs.parameters_bytes[a, b])
        if a != home:
            total += int(costs.gradients_bytes[a, b if found.gradients == "pairwise" else home])
    return total if size > 1 else 0


def compare(case: Case) -> Compared:
    """All switches of one instance."""
    model, plans = model_of(case), [plan_of(case, strategy) for strategy in case["order"]]
    direct = switch_costs(model, plans, LINKS, "exact", GRAD_BYTES, HETU)
    relay = switch_costs(model, plans, LINKS, "relay", GRAD_BYTES, HETU)
    scattered = best_order(switch_costs(model, plans, LINKS, "relay", GRAD_BYTES, SCATTERED))
    best = best_order(relay)
    given = SwitchOrder(tuple(range(len(plans))), "pairwise", 0.0, 0.0, 0.0)
    return Compared(
        name_of(case),
        case["t_order_greedy_s"],
        (step_s(direct), best_order(direct, 0).time_s, best_order(direct).time_s),
        (step_s(relay), best_order(relay, 0).time_s, best.time_s),
        scattered.time_s,
        best.gradients,
        tuple(tuple(case["order"][number]) for number in best.order),
        step_bytes(direct, given),
        step_bytes(relay, best),
    )


def tables(found: Sequence[Compared]) -> str:
    """The Markdown table."""
    header = ("instance", "HotSPa", "best senders", "best order", "best home", "relays", "relays, best order")
    header = (*header, "gain", "scattered", "bytes", "best bytes", "order with relays, gradients")
    rows = []
    for one in found:
        times = (one.hotspa_s, *one.direct_s, one.relay_s[0], one.relay_s[2])
        order = " ".join("x".join(map(str, strategy)) for strategy in one.order)
        gain = f"{one.hotspa_s / one.relay_s[2]:.2f}x"
        sizes = bytes_text(one.step_bytes), bytes_text(one.best_bytes)
        last = f"{order}, {one.gradients}"
        rows.append((one.name, *(f"{t:.4f}" for t in times), gain, f"{one.scattered_s:.4f}", *sizes, last))
    return markdown_table(header, rows)


def main() -> None:
    """Compare, print, and write the table into the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--markdown", type=Path, help="replace the table in this document")
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    found = [compare(case) for case in cases()]
    if words.json:
        print(json.dumps({**measured_on(), "instances": [asdict(one) for one in found]}))
    else:
        print(tables(found))
    if words.markdown is not None:
        replace_section(words.markdown, "hotspa", tables(found))


if __name__ == "__main__":
    main()
