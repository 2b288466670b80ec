"""The traffic of a plan as a document, as tables and as a page."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from milpplan import Layout, TrafficReport, traffic
from milpplan.communication import NodeBlock
from milpplan.errors import InvalidInputError
from milpplan.reports import terminal_text
from milpplan.reports.answers import NAMES, traffic_blocks, traffic_document
from milpplan.reports.html.charts import domain_edges, gpus_per_row, row_of_gpu, row_word
from milpplan.reports.html.traffic_page import traffic_page
from milpplan.reports.notebook.figures import traffic_figures
from milpplan.units import percent_text
from tests.simulation.cases import even_plan, problem_of


@cache
def report(dp: int = 4) -> TrafficReport:
    """Llama-3 8B on tp=2, pp=2 and ``dp`` replicas."""
    problem = problem_of("llama3-8b", "dgx-h100", sequence_length=2048)
    layout = Layout(tp=2, pp=2, dp=dp, global_batch_size=2 * dp, zero_stage=1)
    return traffic(problem, even_plan(problem, layout))


def test_the_document_holds_the_matrix() -> None:
    """The JSON gives every pair of every parallelism, and the same sums."""
    found = json.loads(traffic_document(report()))
    assert found["num_gpus"] == 16
    for name, wire in report().wire_bytes.items():
        pairs = found["pairs"][name]
        assert len(pairs["sender"]) == len(pairs["receiver"]) == len(pairs["num_bytes"])
        assert sum(pairs["num_bytes"]) == pytest.approx(wire)
    assert sum(found["timeline"]["between_bytes"]) == pytest.approx(
        sum(tiers["between"] for tiers in found["tier_bytes"].values())
    )
    assert len(found["gpu_links"]["out_between"]) == 16
    assert len(found["node_links"]["out_between"]) == 2


def test_tables_name_what_is_sent() -> None:
    """Every parallelism that sends has its line; one that does not has none."""
    console = Console(width=110, file=None, record=True, quiet=False)
    with console.capture() as capture:
        console.print(terminal_text(traffic_blocks(report())))
    text = capture.get()
    for name, wire in report().wire_bytes.items():
        assert (NAMES[name] in text) == (wire > 0)
    assert "GPUs busy" in text


def test_the_heat_map_is_the_matrix() -> None:
    """Its first map is of all pairs, each cell the bytes between two GPUs; there is one for each parallelism that
    sends, and one button each."""
    heat = traffic_figures(report())[0]
    assert np.array_equal(np.asarray(heat.data[0].customdata), report().all_pairs.matrix(16))
    in_use = [NAMES[name] for name, wire in report().wire_bytes.items() if wire]
    assert [trace.name for trace in heat.data] == ["all", *in_use]
    assert [button.label for button in heat.layout.updatemenus[0].buttons] == ["all", *in_use]
    total = sum(np.nansum(np.asarray(trace.customdata)) for trace in heat.data[1:])
    assert total == pytest.approx(sum(report().wire_bytes.values()))


def test_many_gpus_are_shown_by_node() -> None:
    """Beyond 256 GPUs a row of the map is a node, and the map still holds all bytes."""
    many = report(dp=128)
    assert gpus_per_row(report()) == 1
    assert gpus_per_row(many) == 8
    cells = np.asarray(traffic_figures(many)[0].data[0].customdata)
    assert cells.shape == (64, 64)
    assert cells.sum() == pytest.approx(sum(many.wire_bytes.values()))


def test_rows_of_several_node_types_hold_one_type() -> None:
    """Where GPUs are many, a row of the map is nodes of one type, also where types have nodes of several sizes and
    leave one half empty; every GPU is in a row, and there are no more rows than asked for."""
    whole, four = report(), NodeBlock(1, "nodes of four", 12, 6, 4, 4)
    mixed = replace(
        whole, blocks=(NodeBlock(0, "nodes of eight", 0, 12, 8, 8), four), num_gpus=18, gpus_per_node=8
    )
    assert row_of_gpu(mixed, 18).tolist() == list(range(18))
    assert domain_edges(mixed) == [8, 12, 16]
    assert row_of_gpu(mixed, 5).tolist() == [0] * 8 + [1] * 4 + [2] * 4 + [3] * 2
    assert row_of_gpu(mixed, 3).tolist() == [0] * 12 + [1] * 6
    assert (row_word(mixed, 18), row_word(mixed, 5), row_word(mixed, 3)) == ("GPU", "node", "group of 2 nodes")


def read_page(page: str) -> dict[str, Any]:
    """The numbers that its script draws."""
    found = re.search(r'<script type="application/json" id="matrix-data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found.group(1))
    return data


def test_the_page_needs_nothing_else() -> None:
    """One HTML document with its script inside, no reference to another host, the title escaped, and no chart
    library in it: it is a hundredth of what that takes."""
    page = traffic_page(report(), "<b> & co")
    assert page.startswith("<!DOCTYPE html>")
    assert not re.search(r"""(src|href)=["'](?!data:)|url\(|@import|fetch\(|XMLHttpRequest""", page)
    assert "&lt;b&gt; &amp; co" in page
    assert len(page) < 100_000


def test_the_page_holds_the_matrix() -> None:
    """Cell by cell, to the four digits that are shown, and one map for each parallelism that sends."""
    data = read_page(traffic_page(report(), "any"))
    assert list(data["maps"]) == ["all together", *(NAMES[n] for n, wire in report().wire_bytes.items() if wire)]
    cells = np.zeros(data["places"] ** 2)
    steps = np.array(data["maps"]["all together"]["cells"]).reshape(-1, 2)
    cells[np.cumsum(steps[:, 0])] = np.array(data["maps"]["all together"]["values"])[steps[:, 1]]
    assert cells.reshape(16, 16) == pytest.approx(report().all_pairs.matrix(16), rel=1e-3)


def test_the_page_draws_what_the_tables_say() -> None:
    """Both tiers over the step, both ways of every node, a bar for each overhead, and a chart of bandwidth for
    every operation with a line for each of its groups."""
    page = traffic_page(report(), "any")
    charts = re.findall(r'aria-label="([^"]*)">(<svg.*?</svg>)', page, re.DOTALL)
    lines = {label: drawn.count("<path") for label, drawn in charts}
    assert lines["Bytes a second over the step"] == lines["Bytes a step over the network, by node"] == 2
    for operation in {row.operation for row in report().bandwidths}:
        groups = {(row.num_gpus, row.stride) for row in report().bandwidths if row.operation == operation}
        assert lines[f"Bus bandwidth of {operation.replace('_', '-')}"] == len(groups)
    # Tensor parallelism, gathers and reductions are all that this plan has.
    assert page.count('<div class="row">') == 3
    exposed = report().exposed_s["tp_exposed"] / report().step_time_s
    assert percent_text(exposed) in page


def test_a_page_of_many_gpus_has_a_row_a_node() -> None:
    """Beyond 256 GPUs, and the map still holds all bytes."""
    many = report(dp=128)
    data = read_page(traffic_page(many, "any"))
    assert (data["word"], data["places"]) == ("node", 64)
    assert data["maps"]["all together"]["total"] == pytest.approx(sum(many.wire_bytes.values()))


def test_a_page_of_one_gpu_has_nothing_to_draw() -> None:
    """No pairs, no matrix, and no script that misses them."""
    problem = problem_of("llama2-7b", "dgx-h100", num_gpus=1, sequence_length=2048)
    alone = traffic(problem, even_plan(problem, Layout(global_batch_size=8)))
    page = traffic_page(alone, "any")
    assert not sum(alone.wire_bytes.values())
    assert 'id="matrix"' not in page
    assert re.search(r'id="matrix-data">\s*</script>', page)


@pytest.mark.parametrize(
    ("missing", "make"),
    [
        ("plotly.graph_objects", lambda: traffic_figures(report())),
        ("jinja2", lambda: traffic_page(report(), "any")),
    ],
)
def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch, missing: str, make: Any) -> None:
    """Without plotly no figures, without jinja2 no page, with what to install."""
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InvalidInputError, match=r"\.\[report\]"):
        make()
