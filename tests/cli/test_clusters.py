"""Clusters of several node types on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_cli import refused, run

CLUSTER = "dgx-a100-80:16+dgx-h100:16"
SOLVE = [
    "solve",
    "llama3-8b",
    CLUSTER,
    "--global-batch",
    "64",
    "--fix",
    "tp=2,cp=1,pp=2,vpp=1,micro_batch_size=1,zero_stage=1",
]


@pytest.mark.long
def test_solved_simulated_and_said() -> None:
    """The report says on which nodes every stage is, and so does the JSON, which simulates to the same time."""
    result = run(*SOLVE, "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["status"] == "optimal"
    types = [stage["node_type"] for stage in document["plan"]["stages"]]
    assert sorted(types) == ["dgx-a100-80", "dgx-h100"]
    layers = {stage["node_type"]: stage["layers"][1] - stage["layers"][0] for stage in document["plan"]["stages"]}
    assert layers["dgx-h100"] > layers["dgx-a100-80"]
    assert [group["num_gpus"] for group in document["problem"]["other_hardware"]] == [16]


def test_simulate_reads_what_solve_wrote(tmp_path: object) -> None:
    """``simulate`` of the file gives the same step, and names both types."""
    path = f"{tmp_path}/plan.json"
    solved = run(*SOLVE, "--space", "uniform", "--out", path)
    assert solved.exit_code == 0, solved.stderr
    assert "nodes" in solved.stdout
    again = run("simulate", path)
    assert again.exit_code == 0, again.stderr
    assert "16 x dgx-a100-80 + 16 x dgx-h100" in again.stdout.replace("\n", " ")
    assert "stages 0: " in again.stdout


@pytest.mark.parametrize(
    ("hardware", "words", "seen"),
    [
        ("dgx-a100-80:16+dgx-h100", [], "'dgx-h100'"),
        ("dgx-a100-80:16+dgx-h100:0", [], "'dgx-h100:0'"),
        ("dgx-a100-80:16+", [], "''"),
        ("dgx-a100-80:8+dgx-h100:8+l40s:8+mi300x:8+b200:8", [], "5 node types"),
        (CLUSTER, ["--gpus", "64"], "32 GPUs"),
        (CLUSTER, ["--gpus", "8:64"], "32 GPUs"),
        (CLUSTER, ["--fix", "node_order=1-1"], "node_order"),
        (CLUSTER, ["--fix", "node_order=0-1-2"], "node_order"),
        (CLUSTER, ["--fix", "node_order=first"], "node_order"),
        (CLUSTER, ["--precision", "fp8"], "no fp8"),
        ("dgx-a100-80:16+nowhere:16", [], "nowhere"),
        ("dgx-h100", [], "--gpus is missing"),
    ],
)
def test_malformed_clusters_are_refused(hardware: str, words: list[str], seen: str) -> None:
    """Every mistake says what was seen, what was expected and what to do."""
    assert seen in refused(run("solve", "llama3-8b", hardware, "--global-batch", "64", *words))


def test_gpus_may_be_the_sum() -> None:
    """``--gpus`` may repeat the sum; a fixed order of the types holds."""
    result = run(*SOLVE, "--gpus", "32", "--space", "uniform", "--fix", "node_order=1-0", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["plan"]["layout"]["node_order"] == [1, 0]


def test_clusters_are_compared_as_they_are(tmp_path: Path) -> None:
    """As many GPUs with the same first type are another problem if the others differ: no bound of one is held
    against the plan of the other."""
    names = ("dgx-a100-80:16+dgx-h100:16", "dgx-a100-80:24+dgx-h100:8")
    words = ["--global-batch", "64", "--space", "uniform", "--fix", "tp=2,cp=1,pp=4,vpp=1,zero_stage=1"]
    files = [str(tmp_path / f"{number}.json") for number in range(2)]
    for name, path in zip(names, files, strict=True):
        assert run("solve", "llama3-8b", name, *words, "--out", path).exit_code == 0
    document = json.loads(run("compare", *files, "--json").stdout)
    assert not document["same_problem"]
    assert document["differences"]["hardware"] == [
        "16 x dgx-a100-80 + 16 x dgx-h100",
        "24 x dgx-a100-80 + 8 x dgx-h100",
    ]
    assert [plan["gap_to_bound"] for plan in document["plans"]] == [None, None]


def test_no_whole_ranks_is_explained() -> None:
    """Where no pipeline rank is of one type, the rule that forbids it is named."""
    result = run("solve", "llama3-8b", CLUSTER, "--global-batch", "64", "--fix", "pp=1")
    assert result.exit_code == 3
    assert "node_types_hold_whole_ranks" in result.stderr


REPLICAS = [
    *("solve", "llama3-8b", CLUSTER, "--global-batch", "64", "--allow", "replicas"),
    *("--fix", "mixing=replicas,tp=2,cp=1,pp=2,vpp=1,micro_batch_size=1,zero_stage=1"),
]


@pytest.mark.long
def test_replicas_of_different_make_are_solved_simulated_and_said(tmp_path: Path) -> None:
    """The report says how many replicas are on which nodes and what each does; the JSON has the stages of both,
    and simulates to the same time."""
    path = tmp_path / "plan.json"
    result = run(*REPLICAS, "--verbose", "--out", str(path))
    assert result.exit_code == 0, result.stderr
    words = " ".join(result.stdout.split())
    assert "4 replicas on dgx-a100-80 with" in words
    assert "Stages on dgx-h100" in words
    document = json.loads(path.read_text())
    slow, fast = document["plan"]["layout"]["replica_micro_batches"]
    assert 4 * (slow + fast) == 64
    assert slow < fast
    own, other = document["plan"]["stages"], document["plan"]["other_stages"]
    assert [stage["layers"] for stage in own] == [stage["layers"] for stage in other]
    assert {stage["node_type"] for stage in own} == {"dgx-a100-80"}
    assert {stage["node_type"] for stage in other} == {"dgx-h100"}
    again = run("simulate", str(path), "--json")
    assert again.exit_code == 0, again.stderr
    assert json.loads(again.stdout)["step_time_s"] == document["step_time_s"]
    traffic = run("traffic", str(path))
    assert traffic.exit_code == 0, traffic.stderr
    assert "0-15: dgx-a100-80, 8 in a fast domain; 16-31: dgx-h100" in " ".join(traffic.stdout.split())
    assert "Bytes a step, by node type" in traffic.stdout
    assert "of different make" in refused(run("gap", str(path)))
    document["plan"]["other_stages"][0]["layers"][1] -= 1
    document["plan"]["other_stages"][1]["layers"][0] -= 1
    path.write_text(json.dumps(document))
    assert "other layers" in refused(run("simulate", str(path)))


@pytest.mark.parametrize(
    ("hardware", "words", "seen"),
    [
        ("dgx-a100-80:16+dgx-h100:8+l40s:8", ["--fix", "replica_micro_batches=4-8"], "each of 3 node types"),
        ("dgx-h100", ["--gpus", "16", "--allow", "replicas"], "1 node types"),
        (CLUSTER, ["--fix", "mixing=rows"], "mixing"),
        (CLUSTER, ["--fix", "replica_micro_batches=4"], "replica_micro_batches"),
        (CLUSTER, ["--fix", "replica_micro_batches=0-4"], "replica_micro_batches"),
        (CLUSTER, ["--fix", "replica_micro_batches=some"], "replica_micro_batches"),
    ],
)
def test_malformed_replicas_are_refused(hardware: str, words: list[str], seen: str) -> None:
    """Every mistake says what was seen, what was expected and what to do."""
    assert seen in refused(run("solve", "llama3-8b", hardware, "--global-batch", "64", *words))
