"""The page of a plan: well-formed, complete in itself, and with the numbers of the plan."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milpplan import Layout, Plan, Problem, load_hardware, plan_overview, simulate, solve, step_lanes
from milpplan.errors import IllegalPlanError
from milpplan.explain import Missing
from milpplan.launchers import TARGETS, Launch
from milpplan.launchers.megatron.launcher import Megatron
from milpplan.problem import NodeGroup
from milpplan.reports.documents import (
    EvidenceDocument,
    PriceDocument,
    TargetDocument,
    TermDocument,
    result_document,
)
from milpplan.reports.html.charts import (
    MAX_ITEMS,
    distinct_texts,
    fates_chart,
    matrix_data,
    round_levels,
    shown_ranks,
    timeline_data,
)
from milpplan.reports.html.plan_page import memory_section, plan_page
from milpplan.reports.words.plan_words import TIME_PARTS, plan_sentences
from milpplan.reports.words.result_words import evidence_sentence
from milpplan.simulation.pipeline.lanes import SLICE_KINDS
from milpplan.units import gib_text, seconds_text
from tests.amounts import long_but
from tests.reports.pages import document, piped, shown
from tests.simulation.cases import even_plan, problem_of
from tests.small import small_problem

VOID = {"meta", "link", "br", "hr", "img", "input"}
MOST_BYTES = 3_000_000
MOST_CPU_S = 2.0
"""For the page alone; it takes a tenth of it."""


class Reader(HTMLParser):
    """Reads a page, and holds its elements to being closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.inside: dict[str, str] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element opens."""
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> repeats an attribute"
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element of SVG without contents."""
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        """The last one that is open closes."""
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        """Text, kept apart in scripts and styles."""
        if self.open and self.open[-1] in ("script", "style"):
            name = self.attributes[-1][1].get("id") or self.open[-1]
            self.inside[name] = self.inside.get(name, "") + data
        else:
            self.words.append(data)

    @property
    def text(self) -> str:
        """What is read, with single blanks."""
        return re.sub(r"\s+", " ", "".join(self.words))


@cache
def page() -> str:
    """The page of the small result."""
    return plan_page(shown(), document())


@cache
def read() -> Reader:
    """That page, read."""
    return Reader(page())


def test_the_page_is_well_formed() -> None:
    """Every element is closed in order, ids are unique, and what a label or a tab names is there."""
    assert page().startswith("<!DOCTYPE html>")
    assert read().open == []
    ids = [attrs["id"] for _, attrs in read().attributes if attrs.get("id")]
    assert len(ids) == len(set(ids))
    for _, attrs in read().attributes:
        for name in ("for", "aria-controls", "aria-labelledby"):
            assert attrs.get(name) is None or attrs[name] in ids
        href = attrs.get("href") or ""
        assert not href.startswith("#") or href[1:] in ids


def test_the_page_fetches_nothing() -> None:
    """No attribute names another file, and neither style nor script asks for one."""
    for tag, attrs in read().attributes:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form")
        assert {"src", "srcset", "action", "poster"}.isdisjoint(attrs)
        href = attrs.get("href")
        assert href is None or href.startswith("#") or href == "data:,"
    code = read().inside["style"] + read().inside["script"]
    for word in ("@import", "url(", "fetch(", "XMLHttpRequest", "WebSocket", "import(", "http"):
        assert word not in code


def test_the_numbers_are_those_of_the_plan() -> None:
    """Step time, every part of it, every part of the fullest stage's memory and the proof stand on the page."""
    report, text = shown().report, read().text
    assert f"one step of {seconds_text(report.step_time_s)}" in text
    for name, seconds in report.breakdown_s.items():
        if seconds:
            assert re.search(rf"{TIME_PARTS[name][0]}\s*{re.escape(seconds_text(seconds))}", text), name
    memory = report.stages[report.tightest_stage].memory
    for size in (memory.weights_bytes, memory.optimizer_bytes, memory.activations_bytes, memory.peak_bytes):
        assert gib_text(size) in text
    assert document().proof in text
    assert f"{document().layouts.legal:,} legal layouts" in text


def test_every_layout_is_in_the_picture() -> None:
    """The numbers behind the bars are all that was listed: refused, too large, or in a class of bounds, where no
    layout that was left open or solved is further away than those that bounds decided allow."""
    layouts = document().layouts
    inside = re.search(r'<div class="rows counted">(.*?)<div class="keys">', page(), re.DOTALL)
    assert inside is not None
    numbers = [int(text.replace(",", "")) for text in re.findall(r'class="number">([\d,]+)<', inside[1])]
    assert numbers[0] == sum(layouts.rejected.values())
    assert numbers[1] == layouts.does_not_fit
    assert numbers[1:] == [layouts.does_not_fit, *(sum(one.fates.values()) for one in layouts.bounds)]
    assert sum(numbers[1:]) == layouts.legal
    near = sum(one.fates[fate] for one in layouts.bounds[:2] for fate in ("solved", "open"))
    assert near == layouts.solved + layouts.open


def test_without_a_plan_there_is_no_picture() -> None:
    """What has no best plan to measure by has no classes."""
    nothing = result_document(solve(small_problem(memory_gib=1)), 1e-3)
    assert nothing.plan is None
    assert nothing.layouts.bounds == ()
    assert fates_chart(nothing.layouts.rejected, nothing.layouts.model_dump(), nothing.layouts.bounds) == ""


def test_the_certificate_is_on_the_page() -> None:
    """Cost model and digests, and how to prove it again."""
    certificate = document().certificate
    assert certificate is not None
    assert certificate.problem_sha256[:16] in read().text
    assert "milpplan certify" in read().text


def test_every_part_of_the_time_has_words() -> None:
    """What a breakdown can hold is explained on the page."""
    assert set(TIME_PARTS) == set(shown().report.breakdown_s)


def test_the_time_line_is_the_step() -> None:
    """The numbers that the script draws, summed up again, are the slices of the simulated step."""
    lanes = step_lanes(*piped())
    data = json.loads(json.dumps(timeline_data(lanes)))
    assert data["step_ns"] == lanes.step_time_ns
    for row, rank in zip(data["rows"], lanes.ranks, strict=True):
        work = rank.lane("compute")
        assert work is not None
        numbers = np.array(row["slices"]).reshape(-1, 5)
        ends = np.cumsum(numbers[:, 0] + numbers[:, 1]) * data["unit_ns"]
        assert np.abs(ends - work.end_ns).max() <= 2 * data["unit_ns"]
        assert (numbers[:, 2] == work.kind).all()
        assert (numbers[:, 4] == work.micro_batch).all()


def test_the_matrix_is_the_traffic() -> None:
    """Cells and values, put together again, are the bytes between GPUs to four digits."""
    report = shown().traffic
    assert not isinstance(report, Missing)
    data = matrix_data(report)
    for name, pairs in {"all together": report.all_pairs}.items():
        cells = np.array(data["maps"][name]["cells"]).reshape(-1, 2)
        found = np.zeros(data["places"] ** 2)
        found[np.cumsum(cells[:, 0])] = np.array(data["maps"][name]["values"])[cells[:, 1]]
        expected = pairs.matrix(report.num_gpus).ravel()
        assert found == pytest.approx(expected, rel=1e-3)


@cache
def large() -> tuple[Any, str, float]:
    """A page of 1,024 GPUs, 16 stages and 512 micro-batches, and the CPU seconds that it took to write."""
    problem = problem_of("gpt3-175b", "dgx-h100", num_gpus=1024, global_batch_size=4096)
    layout = Layout(
        tp=8, pp=16, dp=8, vpp=6, schedule="interleaved", zero_stage=1, global_batch_size=4096,
        sequence_parallel=True, overlap_grad_reduce=True, overlap_param_gather=True,
    )  # fmt: skip
    overview = plan_overview(problem, even_plan(problem, layout), time_limit_s=0.0)
    started = time.process_time()
    text = plan_page(overview)
    return overview, text, time.process_time() - started


def test_a_large_plan_has_a_small_page() -> None:
    """Nearly 100,000 work items are drawn from less than 3 MB, written in less than 2 s of CPU time; the steady
    part is one block and says how much it stands for."""
    overview, text, seconds = large()
    assert len(text.encode()) < MOST_BYTES
    assert seconds < MOST_CPU_S
    assert Reader(text).open == []
    data = timeline_data(overview.lanes)
    assert data["shortened"]
    assert sum(len(row["slices"]) // 5 for row in data["rows"]) <= MAX_ITEMS + len(data["rows"])
    for row, rank in zip(data["rows"], overview.lanes.ranks, strict=True):
        work = rank.lane("compute")
        numbers = np.array(row["slices"]).reshape(-1, 5)
        steady = numbers[:, 2] == len(SLICE_KINDS)
        assert steady.sum() == 1
        assert len(numbers) - 1 + int(numbers[steady, 4][0]) == len(work)
        assert (numbers[:, 0].sum() + numbers[:, 1].sum()) * data["unit_ns"] == pytest.approx(
            int(work.end_ns[-1]), abs=2 * data["unit_ns"]
        )


def test_ranks_are_chosen_from_end_to_end() -> None:
    """Of more ranks than rows the first and the last are among those shown; of fewer all are."""
    assert shown_ranks(5) == [0, 1, 2, 3, 4]
    chosen = shown_ranks(1000, 10)
    assert (chosen[0], chosen[-1], len(chosen)) == (0, 999, 10)


def test_names_from_files_cannot_become_markup() -> None:
    """A model's name is text wherever it stands."""
    name = "</script><b>&"
    problem = shown().problem.model_copy(update={"model": shown().problem.model.model_copy(update={"name": name})})
    text = plan_page(replace(shown(), problem=problem), document())
    assert "<b>&" not in text
    assert Reader(text).open == []


def test_tabs_say_which_launchers_cannot() -> None:
    """Every launcher has a tab and a panel; refusals are marked, and the one in front runs the plan."""
    tabs = [attrs for _, attrs in read().attributes if attrs.get("role") == "tab"]
    panels = [attrs for _, attrs in read().attributes if attrs.get("role") == "tabpanel"]
    refusals = [export.refusal is not None for export in shown().exports]
    assert 0 < sum(refusals) < len(refusals) == len(tabs) == len(panels)
    assert [tab.get("class") == "refused" for tab in tabs] == refusals
    front = refusals.index(False)
    assert [tab["aria-selected"] == "true" for tab in tabs] == [place == front for place in range(len(tabs))]
    assert ["hidden" not in panel for panel in panels] == [place == front for place in range(len(tabs))]


def test_what_is_proved_says_what_it_rests_on() -> None:
    """The price of a launcher and what measured runs say stand beside the proof, in words of their own."""
    price = PriceDocument(
        objective=1.0,
        objective_bound=1.0,
        least_fraction=0.05,
        most_fraction=0.05,
        status="optimal",
        wall_time_s=1.0,
    )
    problem = document().problem
    space = problem.space.model_copy(update={"target": "megatron"})
    term = TermDocument(
        term="pipeline", num_runs=2, num_sources=1, mean_abs_error=0.08, share=None, share_doubled=None
    )
    evidence = EvidenceDocument(
        generation="Hopper", num_runs=20, num_memory_runs=1, terms=(term,), unexercised=(), share=None,
        elsewhere=(), num_plans=0, ablations=(),
    )  # fmt: skip
    result = document().model_copy(
        update={
            "problem": problem.model_copy(update={"space": space}),
            "target": TargetDocument(name="megatron", version=None, price=price),
            "evidence": evidence,
        }
    )
    text = Reader(plan_page(shown(), result)).text
    assert "Price of that launcher: 5.0 % slower than the best plan of the same space without --target" in text
    assert "held to 20 measured runs on Hopper" in text
    assert "errors of at most 8 %" in text
    for update, words in (
        ({"num_runs": 0}, "No measured run on Hopper is known"),
        ({"unexercised": ("ring",), "share": 0.03}, "No measured run covers ring (3 % of the step)"),
    ):
        assert words in evidence_sentence(evidence.model_copy(update=update))


def test_a_new_launcher_gets_a_tab(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered as a target appears by itself; a refusal shows its reason."""

    class Other(Megatron):
        def export(self, problem: Problem, plan: Plan, version: str) -> Launch:
            raise IllegalPlanError(f"Other {version} has no such thing.", "Expected <another>.", "Do otherwise.")

    monkeypatch.setitem(TARGETS, "other", Other())
    problem = small_problem()
    plan = even_plan(problem, Layout(dp=4, global_batch_size=8, zero_stage=1))
    overview = plan_overview(problem, plan, time_limit_s=0.0)
    assert [tab.target for tab in overview.exports] == list(TARGETS)
    text = Reader(plan_page(overview)).text
    assert "has no such thing. Expected <another>. Do otherwise." in text
    launched = overview.exports[0]
    assert launched.refusal is None
    first = next(iter(launched.files.values()))
    assert re.sub(r"\s+", " ", first).strip() in text


def test_what_cannot_be_shown_says_why() -> None:
    """Inference has no rule of thumb: the page has the reason, and the rest."""
    problem = small_problem(kind="inference")
    plan = even_plan(problem, Layout(dp=4, global_batch_size=8, schedule="gpipe"))
    overview = plan_overview(problem, plan, time_limit_s=0.0)
    text = Reader(plan_page(overview)).text
    assert not isinstance(overview.traffic, Missing)
    assert "The published rule of thumb is for training" in text
    assert "nothing is claimed here" in text
    assert seconds_text(overview.report.step_time_s) in text


def test_words_name_every_degree_and_node_type() -> None:
    """What a plan splits is said once for every degree above one, and in a mixed cluster where the stages are."""
    problem, plan = piped("zb-v")
    words = " ".join(plan_sentences(problem, plan, simulate(problem, plan)))
    for degree in ("tp=2", "pp=4", "vpp=2", "dp=2", "ZB-V", "ZeRO 1", "Nothing is recomputed"):
        assert words.count(degree) == 1, degree
    assert "cp=" not in words
    assert "Every stage is on nodes" not in words
    alone = small_problem()
    group = NodeGroup(hardware=load_hardware("dgx-a100-80"), num_gpus=2)
    mixed = alone.model_copy(update={"other_hardware": (group,)})
    two = even_plan(mixed, Layout(pp=2, dp=2, global_batch_size=8, node_order=(0, 1)))
    words = " ".join(plan_sentences(mixed, two, simulate(mixed, two)))
    assert "stages 0: dgx-h100; 1: dgx-a100-80" in words


@pytest.mark.parametrize("pp", long_but((4,), (4, 8, 16)))
def test_every_stage_has_a_line_and_a_key(pp: int) -> None:
    """The chart of memory draws every stage; each line has its own key, told apart by colour and dashes."""
    problem, plan = piped("1f1b", pp, 16)
    chart = memory_section(plan_overview(problem, plan, time_limit_s=1.0))["chart_html"]
    keys = re.findall(r'<span class="key">(.*?)</span>', chart)
    looks = [re.sub(r">[^<>]*$", ">", key) for key in keys]
    for stage in range(pp):
        assert sum(key.endswith(f">stage {stage}") for key in keys) == 1
        assert f"<title>stage {stage}</title>" in chart
    assert len(set(looks[:pp])) == pp


@pytest.mark.long
def test_a_chart_of_some_stages_says_so() -> None:
    """Of 32 stages 16 have lines, and the keys say that."""
    problem, plan = piped("1f1b", 32, 32)
    chart = memory_section(plan_overview(problem, plan, time_limit_s=1.0))["chart_html"]
    assert "(16 of 32 stages, the fullest among them)" in chart


@given(st.floats(1e-3, 1e3), st.floats(1e-9, 1.0))
def test_ticks_that_differ_have_texts_that_differ(low: float, share: float) -> None:
    """However narrow the range of a chart is, no two of its levels read the same."""
    levels = round_levels(low, low * (1 + share))
    texts = distinct_texts(levels, lambda level, digits: f"{level:,.{digits}g} s", 6)
    assert len(set(texts)) == len(set(levels))
