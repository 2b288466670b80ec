"""Names that are commands to a terminal: every text of every input with control characters, every command."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from milpplan.cli.app import app
from milpplan.launchers import TARGETS
from tests.amounts import first, long_but
from tests.fuzz_seeds import LABELS, seeds
from tests.fuzzing import CONTROLS, FILE, at, parsed, places, replaced, run, written, wrong_characters

HOSTILE = "a" + "".join(CONTROLS) + "\U000e0041\ud800\nz"


@pytest.mark.parametrize("number", long_but((1,), (1, 2, 6)))
@pytest.mark.parametrize("label", long_but(LABELS[:-1:4], LABELS))
def test_no_control_leaves(label: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some names and other texts in turn with all of them, or with one: neither what is printed nor a file that is
    written holds one, whether the input is taken or refused."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(label)
    seed = next((one for one in seeds()[label] if one.language != "text"), seeds()[label][0])
    tree: Any = None if seed.language == "text" else parsed(seed)
    fields = [] if tree is None else [path for path in places(tree) if isinstance(at(tree, path), str)]
    texts = [seed.text.replace("\n", f" {sign}\n", 3) for sign in ("\x1b[31m", "\u202e")] if tree is None else []
    names = [path for path in fields if path[-1] in ("name", "run", "project", "id", "source", "type")]
    for path in [*draw.sample(names, min(number, len(names))), *draw.sample(fields, min(number, len(fields)))]:
        hostile = replaced(tree, path, draw.choice([HOSTILE, f"x{draw.choice(CONTROLS)}"]))
        texts += [written(hostile, seed.language)]
    for text in texts:
        ended = run(seed.case(text), tmp_path / "run")
        assert not ended.wrong, ended.told()


@pytest.mark.parametrize("control", first(2, CONTROLS))
@pytest.mark.parametrize("name", TARGETS)
def test_files_for_launchers_are_read_by_their_parsers(
    name: str, control: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model, a cluster and a layer with such a name are exported, to files without them that YAML reads."""
    monkeypatch.chdir(tmp_path)
    seed = next(one for one in seeds()["export"] if name in one.words)
    tree = parsed(seed)
    for path in (("problem", "model", "name"), ("problem", "hardware", "name")):
        tree = replaced(tree, path, f"x{control}y")
    Path(seed.name).write_text(written(tree, "json"))
    words = [seed.name if word == FILE else word for word in seed.words]
    for more in (words, words[:-2]):
        result = CliRunner().invoke(app, more)
        assert result.exit_code == 0, result.stderr
        assert not wrong_characters("stdout", result.stdout) + wrong_characters("stderr", result.stderr)
    for path in Path("launch").iterdir():
        text = path.read_bytes().decode()
        assert not wrong_characters(path.name, text)
        if path.suffix == ".yaml":
            assert isinstance(yaml.safe_load(text), dict)


@pytest.mark.parametrize("control", CONTROLS[:3])
@pytest.mark.parametrize(
    "words",
    [
        ["show", "{}"],
        ["list", "{}"],
        ["{}"],
        ["--{}"],
        ["solve", "--{}"],
        ["simulate", "{}"],
        ["solve", "llama3-8b", "dgx-h100", "--gpus", "{}"],
        ["schema", "{}"],
    ],
)
def test_words_of_the_command_line(words: list[str], control: str) -> None:
    """What was typed is repeated in errors without them."""
    result = CliRunner().invoke(app, [word.format(f"x{control}y") for word in words])
    assert result.exit_code == 2
    assert not wrong_characters("stdout", result.stdout) + wrong_characters("stderr", result.stderr)


def test_paths_are_repeated_without_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "Written to" names a file as it can be shown."""
    monkeypatch.chdir(tmp_path)
    plan = seeds()["simulate"][0].text
    Path("plan.json").write_text(plan)
    for words in (["report", "plan.json", "-o"], ["export", "plan.json", "--to", "megatron", "-o"]):
        result = CliRunner().invoke(app, [*words, "x\x1b[31m\u202ey.txt"])
        assert result.exit_code == 0
        assert "Written to x\\u001b[31m\\u202ey.txt" in result.stderr
        assert Path("x\x1b[31m\u202ey.txt").is_file()
