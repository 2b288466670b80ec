"""The pages of the documentation say what happens: every command of a ```sh block is run, in a folder of its page,
and every line of the ```text block after it must be in what it prints."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```(\w*)", re.MULTILINE)


@dataclass(frozen=True)
class Example:
    """Commands, and lines that their output must hold."""

    commands: tuple[str, ...]
    lines: tuple[str, ...]


def examples(page: Path) -> list[Example]:
    """The examples of a page whose commands are all milpplan's, in order."""
    found: list[Example] = []
    text, last, end = page.read_text(encoding="utf-8"), None, 0
    for match in BLOCK.finditer(text):
        kind, lines = match[1], tuple(line for line in match[2].splitlines() if line.strip())
        if kind == "sh":
            runs = all(line.startswith("milpplan ") for line in lines)
            last = Example(lines, ()) if runs else None
            found += [last] if last else []
        elif last is not None and "\n```" not in text[end : match.start()].rstrip():
            found[-1] = last = Example(last.commands, lines)
        end = match.end()
    return found


PAGES = sorted(page for page in DOCS.rglob("*.md") if examples(page))


def squeezed(text: str) -> str:
    """With single spaces: tables are as wide as their terminal."""
    return " ".join(text.split())


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_commands_print_what_the_page_says(page: Path, tmp_path: Path) -> None:
    """In one folder a page, from a first to a last command, with the repository's own files at hand."""
    for name in ("examples", "hardware", "models"):
        (tmp_path / name).symlink_to(ROOT / name)
    tool = shlex.join(
        [sys.executable, "-c", "import sys, milpplan.cli; sys.argv[0] = 'milpplan'; milpplan.cli.main()"]
    )
    for example in examples(page):
        printed = ""
        for command in example.commands:
            line = f"{tool} {command.removeprefix('milpplan ')}"
            done = subprocess.run(
                ["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False
            )
            # Where a page gives a limit, a busy machine may end at it with the best plan so far (4).
            ends = (0, 4) if "--time-limit" in command else (0,)
            assert done.returncode in ends, f"{command}\n{done.stdout}\n{done.stderr}"
            printed += done.stdout + done.stderr
        for line in example.lines:
            assert squeezed(line) in squeezed(printed), f"{line!r} is not in:\n{printed}"


CODE = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


@pytest.mark.long
def test_the_backend_tutorial_prints_what_it_says() -> None:
    """Its code runs from the first block to the last, in one namespace, and prints the text after each block."""
    blocks = CODE.findall((DOCS / "backend.md").read_text(encoding="utf-8"))
    assert len(blocks) >= 6
    assert sum(bool(said) for _, said in blocks) >= 5
    names: dict[str, object] = {}
    for code, said in blocks:
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(code, "backend.md", "exec"), names)
        assert printed.getvalue() == said


def test_there_are_pages_to_check() -> None:
    """The start, the questions and the tutorials have examples, so that the long test checks something."""
    names = {str(page.relative_to(DOCS)) for page in PAGES}
    assert {"index.md", "questions.md", "tutorials.md", "commands.md"} <= names
    assert sum(len(example.commands) for page in PAGES for example in examples(page)) >= 30


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_fences_are_closed_and_known(page: Path) -> None:
    """Every fence opens with a language and closes."""
    fences = FENCE.findall(page.read_text(encoding="utf-8"))
    assert len(fences) % 2 == 0
    known = {"", "sh", "text", "python", "toml", "json", "yaml", "bash", "pycon", "html", "mermaid"}
    assert set(fences[::2]) <= known


PUBLIC = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
WRITTEN = [*PUBLIC, *sorted(DOCS.glob("*.md")), *sorted((ROOT / "benchmarks" / "results").glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE_IN_TEXT = re.compile(r"^```.*?^```|`[^`\n]+`|^    .*?$", re.MULTILINE | re.DOTALL)


def words(*pages: Path) -> int:
    """Number of words of all pages together."""
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them, and those written by hand."""
    text = page.read_text(encoding="utf-8")
    heads = (
        re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^#+ (.*)$", text, re.M)
    )
    return {*heads, *re.findall(r'id="([^"]+)"', text)}


def test_the_documentation_is_read_in_a_day() -> None:
    """The README has at most 1,000 words, the pages 32,100 on at most 16 pages, the change log 600."""
    pages = list(DOCS.rglob("*.md"))
    assert words(ROOT / "README.md") <= 1_000
    assert len(pages) <= 16
    assert words(*pages) <= 32_100
    assert words(ROOT / "CHANGELOG.md") <= 600


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link names a file of the repository, and every anchor a heading of it."""
    for link in LINK.findall(CODE_IN_TEXT.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not link.startswith("http"):
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_the_architecture_page_has_every_folder() -> None:
    """Every folder of the package has its line, and every module that the page names exists."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    package = ROOT / "milpplan"
    named = set(re.findall(r"`([a-z_/]+)`", text))
    for folder in sorted(path for path in package.rglob("*") if path.is_dir() and path.name != "__pycache__"):
        name = str(folder.relative_to(package))
        assert name in named or folder.name in named, name
    modules = set(re.findall(r"`([a-z_/]+\.py)`", text))
    assert len(modules) >= 30
    assert [name for name in modules if not list(package.rglob(name)) and not (ROOT / name).exists()] == []


def test_the_architecture_page_leads_from_a_task_to_its_place() -> None:
    """In the table of tasks every file has its whole path, and every name is written in a file of its row."""
    table = (DOCS / "architecture.md").read_text(encoding="utf-8").split("## Where is ...?")[1]
    rows = [re.findall(r"`([\w./]+)`", line.split("|")[2]) for line in table.splitlines() if line.startswith("| ")]
    assert sum(map(bool, rows)) >= 15
    for row in rows:
        paths = [
            next((top / name for top in (ROOT / "milpplan", ROOT) if (top / name).exists()), None) for name in row
        ]
        text = "".join(path.read_text(encoding="utf-8") for path in paths if path is not None and path.is_file())
        names = [name for name, path in zip(row, paths, strict=True) if path is None]
        assert [name for name in names if not re.search(rf"\b{name.split('.')[-1]}\b", text)] == []
