"""``milpplan solve ... --lengths FILE``: one document, tables, and clear refusals."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from milpplan.cli.app import app, load_command
from milpplan.errors import InvalidInputError
from milpplan.lengths.dispatch import Dispatcher
from milpplan.reports import lengths_in
from milpplan.reports.answers import LengthsFile

BASE = [
    "solve",
    "llama3-8b",
    "dgx-h100",
    "--gpus",
    "8",
    "--fix",
    "tp=2",
    "--fix",
    "pp=1",
    "--fix",
    "recompute=none",
]


def run(*words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    done = CliRunner().invoke(app, [*BASE, *words])
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """Thirty sequences, two of them long."""
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(["300", "700", "1500"] * 9 + ["2000", "9000", "14000"]) + "\n", encoding="utf-8")
    return path


def assert_described(document: dict[str, Any]) -> None:
    """Every field is in the schema with its type, and comes back the same."""
    described = LengthsFile.model_validate(document).model_dump(mode="json", by_alias=True, exclude_unset=True)
    assert described == document


@pytest.mark.long
def test_json_is_one_document(lines: Path, tmp_path: Path) -> None:
    """The keys of the issue, a proof, and the same document in the file."""
    out = tmp_path / "step.json"
    code, text, _ = run("--lengths", str(lines), "--gap", "0.02", "--json", "--out", str(out))
    document = json.loads(text)
    assert code == 0
    assert document["gap"] <= 0.02
    assert document["num_sequences"] == 30
    assert document["max_strategies"] == 2
    assert document["tolerance"] == 0.02
    said = document["proof"]
    assert re.match(r"Optimal within 0\.02 for cost model milpplan \S+, steps of one strategy, at most 2 in", said)
    assert document["lower_bound_s"] <= document["step_time_s"] <= document["static"]["step_time_s"]
    assert [group["strategy"] for group in document["groups"]] == document["order"]
    assert json.loads(out.read_text(encoding="utf-8")) == document
    assert_described(document)
    # One plan is no step of several: whoever wants to see, start or change it is told so.
    for command in (["simulate"], ["certify"], ["export", "--to", "megatron"]):
        done = CliRunner().invoke(app, [command[0], str(out), *command[1:]])
        assert done.exit_code == 2
        assert "solve with --lengths" in done.stderr
    trace = tmp_path / "trace.json"
    assert CliRunner().invoke(app, ["report", str(out), "--trace", str(trace)]).exit_code == 0
    assert json.loads(trace.read_text(encoding="utf-8"))["otherData"]["order"] == document["order"]
    for name, value in (("step_time_s", 1.0), ("lower_bound_s", 0.0), ("timeline", []), ("sha256", "")):
        out.write_text(json.dumps(document | {name: value}), encoding="utf-8")
        with pytest.raises(InvalidInputError, match="was changed since"):
            lengths_in(out)


def test_tables_say_what_runs(lines: Path) -> None:
    """The step, the best single strategy, and the groups."""
    code, text, _ = run("--lengths", str(lines), "--global-batch", "12", "--max-strategies", "1", "--turns-only")
    assert code == 0
    assert "for cost model milpplan" in text
    assert "steps of one strategy (" in text
    assert "12 sequences" in text
    assert "Best single strategy" in text
    assert "Groups in order" in text


def test_padded_buckets_without_a_causal_mask(lines: Path) -> None:
    """Two buckets with the least padding, one length a micro-batch, and what was padded on standard error."""
    words = (
        "--bucket-count",
        "2",
        "--padding",
        "--mask",
        "full",
        "--max-strategies",
        "1",
        "--gap",
        "0.2",
        "--json",
    )
    code, text, errors = run("--lengths", str(lines), *words)
    document = json.loads(text)
    assert code == 0
    assert "are padding" in errors
    assert (document["padding"], document["mask"]) == (True, "full")
    lengths = {one["tokens"] for group in document["groups"] for one in group["buckets"]}
    assert len(lengths) == 2
    assert max(lengths) == 14_080
    packs = [one for group in document["groups"] for replica in group["micro_batches"] for one in replica]
    assert {len(set(one)) for one in packs} == {1}


@pytest.mark.long
def test_baselines_are_compared(lines: Path, tmp_path: Path) -> None:
    """The rules by name, in the tables and in the document."""
    out = tmp_path / "step.json"
    words = ("--baselines", "--max-strategies", "1", "--gap", "0.05", "--time-limit", "1.5", "--out", str(out))
    _, text, _ = run("--lengths", str(lines), *words)
    assert "Others' rules" in text
    document = json.loads(out.read_text(encoding="utf-8"))
    assert_described(document)
    rules = document["baselines"]
    assert [one["rule"] for one in rules] == ["bucketing", "HotSPa", "FlexSP"]
    assert all(one["rule"] in text for one in rules)


@pytest.mark.long
def test_degrees_side_by_side(tmp_path: Path) -> None:
    """One sequence that only the whole cluster holds, and many short ones: which GPUs run what and when, in the
    tables and in the document, and a step shorter than that of the best single strategy."""
    path, out = tmp_path / "lengths.txt", tmp_path / "step.json"
    path.write_text("1500\n700\n" * 60 + "50000\n", encoding="utf-8")
    words = ("--max-strategies", "1", "--gap", "0.02", "--time-limit", "4", "--out", str(out))
    code, text, _ = run("--lengths", str(path), *words)
    assert code == 0
    assert "Degrees side by side gain" in text
    assert "0 to 7" in text
    document = json.loads(out.read_text(encoding="utf-8"))
    assert_described(document)
    turns = document["side_by_side"]["turns"]
    assert document["side_by_side"]["step_time_s"] == document["step_time_s"] < document["static"]["step_time_s"]
    assert document["side_by_side"]["lower_bound_s"] >= document["lower_bound_s"] >= 0.98 * document["step_time_s"]
    assert sorted({one["num_gpus"] for one in turns}) == [2, 8]
    assert sum(len(batch) for one in turns for batch in one["micro_batches"]) == 121
    assert document["switches"] == []
    _, text, _ = run("--lengths", str(path), "--turns-only", *words)
    assert "Degrees side by side" not in text
    document = json.loads(out.read_text(encoding="utf-8"))
    assert "side_by_side" not in document
    assert document["step_time_s"] == document["static"]["step_time_s"]


@pytest.mark.long
def test_unlike_replicas(tmp_path: Path) -> None:
    """Without context parallelism one long sequence makes all others pay for its tensor parallelism, unless the
    other replicas are unlike: in the tables, in the document, and as a time line; files of HotSPa's runtime cannot
    say it."""
    path, out, trace = tmp_path / "lengths.txt", tmp_path / "step.json", tmp_path / "trace.json"
    path.write_text("1500\n700\n" * 200 + "30000\n", encoding="utf-8")
    free = [word for word in BASE if word not in ("tp=2",)]
    free.pop(free.index("--fix"))
    words = [*free, "--fix", "cp=1", "--lengths", str(path), "--unlike-replicas", "--max-strategies", "1"]
    words += ["--gap", "0.02", "--time-limit", "12", "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.stderr
    assert "Unlike replicas gain" in done.stdout
    document = json.loads(out.read_text(encoding="utf-8"))
    assert_described(document)
    unlike = document["unlike_replicas"]
    assert unlike["step_time_s"] == document["step_time_s"] < document["static"]["step_time_s"]
    assert unlike["lower_bound_s"] >= document["lower_bound_s"] >= 0.98 * document["step_time_s"]
    assert sum(len(batch) for one in unlike["replicas"] for batch in one["micro_batches"]) == 401
    assert len({one["num_gpus"] for one in unlike["replicas"]}) > 1
    done = CliRunner().invoke(app, ["report", str(out), "--trace", str(trace)])
    assert done.exit_code == 0, done.stderr
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert sum(one.get("cat") == "group" for one in events) == len(unlike["replicas"])
    done = CliRunner().invoke(app, [*words, "--hetu", str(tmp_path / "hetu")])
    assert done.exit_code == 2
    assert "unlike replicas" in done.stderr


def test_a_step_becomes_files_of_hotspas_runtime(lines: Path, tmp_path: Path) -> None:
    """A file for every strategy, the script with the buckets, and what they leave out; a space of what the runtime
    does not know is refused before anything is sought."""
    folder = tmp_path / "hetu"
    words = ("--max-strategies", "1", "--gap", "0.05", "--hetu", str(folder))
    code, _, errors = run("--lengths", str(lines), "--fix", "cp=1", "--turns-only", *words)
    assert code == 0, errors
    assert "packs by itself" in errors
    configurations = list((folder / "ds_parallel_config" / "gpus8").iterdir())
    assert [json.loads(one.read_text())["devices"] for one in configurations] == [list(range(8))]
    assert "14080" in (folder / "hotspa.sh").read_text(encoding="utf-8")
    code, _, errors = run("--lengths", str(lines), "--fix", "cp=2", *words)
    assert (code, "--turns-only, --fix cp=1." in errors) == (2, True), errors


def test_a_step_becomes_a_scheduler_for_megatron(lines: Path, tmp_path: Path) -> None:
    """Three files, and the price of micro-batches of one sequence; what the runtime cannot run is refused before
    anything is sought."""
    folder = tmp_path / "hybrid"
    words = ("--max-strategies", "1", "--gap", "0.05", "--megatron", str(folder))
    code, _, errors = run("--lengths", str(lines), *words)
    assert code == 0, errors
    assert {path.name for path in folder.iterdir()} == {"step.json", "hybrid_cp.py", "arguments.txt"}
    assert "a micro-batch of its own" in errors
    free = CliRunner().invoke(app, [*BASE[:-2], "--lengths", str(lines), *words])
    assert (free.exit_code, "--fix recompute=none" in free.stderr) == (2, True), free.stderr
    code, _, errors = run("--lengths", str(lines), "--turns-only", *words)
    assert (code, "no --turns-only" in errors) == (2, True), errors


def test_a_file_of_a_step_is_enough_to_dispatch_batches(lines: Path, tmp_path: Path) -> None:
    """It has its problem: batches of strategies in turn and of degrees side by side are dispatched from it as from
    the result, exactly."""
    out, lengths = tmp_path / "step.json", [int(one) for one in lines.read_text().split()]
    assert run("--lengths", str(lines), "--gap", "0.02", "--turns-only", "--out", str(out))[0] == 0
    step = lengths_in(out)
    assert step is not None
    assert step.problem is not None
    found = Dispatcher(step.ran, step.problem).dispatch(lengths)
    assert found.order == step.order
    assert found.step_time_s == pytest.approx(step.step_time_s, rel=0.02)
    assert found.lower_bound_s <= step.step_time_s
    beside = Dispatcher(replace(step.ran, beside="degrees side by side"), step.problem).dispatch(lengths)
    assert beside.side_by_side
    assert beside.step_time_s > 0.0
    with pytest.raises(InvalidInputError, match="has no problem"):
        Dispatcher(step.ran)


REFUSED = {
    "calculon": ["--calculon", "a", "b", "c"],
    "schedule": ["--schedule", "all"],
    "allow": ["--allow", "zero_stage=3"],
    "forbid": ["--forbid", "tp=8"],
    "warm_start": ["--warm-start", "plan.json"],
    "check_ends": ["--check-ends"],
    "price": ["--price-per-gpu-hour", "2"],
    "target": ["--target", "megatron"],
    "target_version": ["--target-version", "1"],
    "space": ["--space", "any"],
    "tokens": ["--tokens", "1e9"],
    "workers": ["--workers", "2"],
    "witness": ["--no-witness"],
    "robust": ["--robust"],
    "scenarios": ["--scenarios", "s.toml"],
    "fastest": ["--fastest"],
    "method": ["--method", "program"],
    "inference": ["--inference"],
    "deadline_hours": ["--deadline-hours", "3"],
    "deadline_days": ["--deadline-days", "3"],
    "objective": ["--objective", "num_gpus"],
    "lora_rank": ["--lora-rank", "16"],
    "lora_modules": ["--lora-modules", "q_proj"],
    "freeze": ["--freeze", "embedding"],
    "mtp_layers": ["--mtp-layers", "1"],
    "expert_imbalance": ["--expert-imbalance", "2"],
    "optimizer": ["--optimizer", "muon"],
    "muon_tp_mode": ["--muon-tp-mode", "blockwise"],
    "vision_tokens": ["--vision-tokens", "256"],
    "image_tokens": ["--image-tokens", "64"],
    "images": ["--images", "0:1,2:1"],
    "alignment": ["--alignment", "dpo"],
    "reference": ["--reference", "none"],
    "rollout_seconds": ["--rollout-seconds", "5"],
    "rollout_tokens_per_s": ["--rollout-tokens-per-s", "5"],
    "rollout_memory": ["--rollout-memory", "5"],
    "rollout_apart": ["--rollout-apart"],
}
"""Options of ``solve`` that say nothing about lengths."""
TAKEN = {
    *(
        "model",
        "hardware",
        "job",
        "gpus",
        "global_batch",
        "seq_len",
        "precision",
        "attention",
        "grad_dtype",
        "fix",
    ),
    *("backend", "time_limit", "gap", "seed", "lengths", "max_strategies", "tokens_per_step", "align"),
    *(
        "padding",
        "mask",
        "buckets",
        "bucket_count",
        "baselines",
        "side_by_side",
        "unlike_replicas",
        "hetu",
        "megatron",
        "out",
    ),
    # Only --target has a price.
    *("as_json", "price_limit", "ignore", "verbose", "progress", "memory_margin", "stack"),
}
"""Options that lengths know."""


def test_no_option_is_passed_over(lines: Path) -> None:
    """An option of ``solve`` is known with lengths, or refused by name before anything is sought."""
    assert {parameter.name for parameter in load_command("solve").params} == TAKEN | set(REFUSED)
    for words in REFUSED.values():
        code, _, errors = run("--lengths", str(lines), *words)
        assert code == 2, words
        word = words[0].strip("-").split("-")[0]
        assert {"freeze": "frozen", "mtp": "multi-token prediction", "alignment": "dpo"}.get(
            word, word
        ) in errors.lower(), errors


@pytest.mark.parametrize(
    ("content", "words", "code", "said"),
    [
        ("", [], 2, "is empty"),
        ("12\nabc\n", [], 2, "Line 2"),
        ("12\n3.5\n", [], 2, "Line 2"),
        ("16000000\n", [], 3, "fits under no strategy"),
        ('{"bin_edges": [0, 100], "counts": [5]}', [], 2, "not said how many"),
        ("1000000000\n", [], 2, "at most 16,777,216"),
        ("12\n", ["--align", "0"], 2, "--align"),
        ("12\n", ["--fix", "micro_batch_size=2"], 2, "Leave --fix micro_batch_size out"),
        ("12\n", ["--tokens-per-step", "1000"], 2, "At most 12, which the input holds"),
        ("12\n", ["--max-strategies", "0"], 2, "--max-strategies"),
        ("12\n", ["--fix", "vpp=2"], 2, "vpp"),
        ("12\n", ["--inference"], 2, "inference"),
        ("12\n", ["--mask", "none"], 2, "--mask"),
        ("12\n", ["--buckets", "128", "--bucket-count", "2"], 2, "--bucket-count"),
        ("12\n", ["--buckets", "128,x"], 2, "--buckets"),
        ("1200\n", ["--buckets", "128,1024"], 2, "1280 tokens"),
        ("12\n", ["--bucket-count", "0"], 2, "--bucket-count"),
        ("12\n", ["--padding", "--baselines"], 2, "pack"),
        ("12\n", ["--padding", "--side-by-side"], 2, "pack"),
        ("12\n", ["--gap", "-1"], 2, "--gap"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, content: str, words: list[str], code: int, said: str) -> None:
    """What was seen, and the exit code for it."""
    path = tmp_path / "lengths.txt"
    path.write_text(content, encoding="utf-8")
    found, _, errors = run("--lengths", str(path), *words)
    assert (found, said in errors) == (code, True), errors


def test_options_of_lengths_need_the_file() -> None:
    """--max-strategies alone is a mistake."""
    code, _, errors = run("--global-batch", "8", "--max-strategies", "2")
    assert code == 2
    assert "--lengths" in errors
    code, _, errors = run("--global-batch", "8", "--turns-only")
    assert (code, "--turns-only is given without --lengths" in errors) == (2, True)


@pytest.mark.long
def test_a_million_lines_are_refused_or_cut_in_bounded_time(tmp_path: Path) -> None:
    """A step of a million sequences is too large; its first sixteen are a step."""
    path = tmp_path / "lengths.txt"
    path.write_text("1000\n" * 1_000_000, encoding="utf-8")
    start = time.process_time()
    code, _, errors = run("--lengths", str(path))
    assert (code, "1,000,000 sequences" in errors) == (2, True)
    code, text, _ = run("--lengths", str(path), "--global-batch", "16", "--max-strategies", "1", "--json")
    assert (code, json.loads(text)["num_sequences"]) == (0, 16)
    assert time.process_time() - start < 30
