"""Files that somebody broke, and commands that read them: each case in a process of its own, under limits.

A case is a command line with a broken file. It ends with an exit code that is promised, without a traceback and
without a control character in what it prints or writes, in ten seconds of processor time and 1 GiB of memory.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import string
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from typer.testing import CliRunner

from milpplan.cli.app import app
from milpplan.studies import outcomes
from milpplan.studies.outcomes import solved
from milpplan.units import cleaned

Language = Literal["json", "toml", "yaml", "text"]
FILE: Final = "FILE"
"""Stands for the broken file in a command line."""
MOST_CPU_S: Final = 10
MOST_BYTES: Final = 2**30
FRESH_BYTES: Final = 256 * 2**20
"""About what a new process holds that has imported the command line."""
PATIENCE_S: Final = 500
"""Of wall time: who waits for something that never comes uses no processor time."""
PROMISED: Final = (0, 2, 3, 4, 5)

CONTROLS: Final = [
    "\x1b[31m",
    "\x07",
    "\x00",
    "\r",
    "\x9b2J",
    *(
        chr(code)
        for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200B, 0x200F, 0x2028, 0x85, 0xFEFF)
    ),
]
"""What a terminal obeys, marks of direction, and what takes no room."""
JUNK: Final[list[Any]] = [
    *(None, True, False, 0, 1, -1, 2, 7, 10**9, 10**15, 2**53 + 1, 10**18, 2**63, 10**30, -(10**30)),
    *(0.5, -0.5, 1e-30, 1e30, 1e308, math.nan, math.inf, -math.inf),
    *("", "x", "1", "-1", "nan", "true", "null", "$X", "\n", "é", "\ud800", "a b", "x" * 5_000),
    *("/dev/zero", "..", "-", "--", "dgx-h100", "llama3-8b", "1f1b", *CONTROLS[:4]),
    *([], {}, [[]], [[0, 1]], [None], [0], ["x"], {"x": {}}, {"": None}, [{}], list(range(300))),
]
"""Values of all types: each takes the place of every value."""
WORDS: Final = [
    *(
        "",
        "0",
        "-1",
        "7",
        "1e9",
        "9" * 30,
        "9" * 5_000,
        "1e400",
        "null",
        "true",
        "nan",
        "x",
        '"',
        "'",
        "{",
        "]",
        "[[",
    ),
    *(": :", "\n", "$X", "${X:-7}", "$(", "`", "$((2**9**9))", "é", "\\", "&", "|", "<<EOF", "(", ")", "#", "--x"),
    *("=", ",", "*", "**", "&a [*a]", "!!python/object", "---", *CONTROLS),
]
TOKEN: Final = re.compile(r"[A-Za-z0-9_.\-]+|[^\sA-Za-z0-9_.\-]")
SETTING: Final = re.compile(r"(?<![\w-])(?:--|\+\+?)?[A-Za-z_][\w.-]*(?:\s?=\s?|: | )(?P<value>[^\s,()\\#]+)")
"""A flag, a key or an argument with its value."""


@dataclass(frozen=True)
class Seed:
    """A command that reads a whole file. ``beside`` are the other files that it needs, by name."""

    label: str
    words: tuple[str, ...]
    text: str
    language: Language = "json"
    name: str = "file.json"
    beside: Mapping[str, str] = field(default_factory=dict)

    def case(self, content: str | bytes) -> Case:
        """The command with other content of the file."""
        data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
        return Case(self, data)


@dataclass(frozen=True)
class Case:
    """A command with a broken file."""

    seed: Seed
    content: bytes


def parsed(seed: Seed) -> Any:
    """The file's tree."""
    if seed.language == "toml":
        import tomllib

        return tomllib.loads(seed.text)
    return json.loads(seed.text) if seed.language == "json" else yaml.safe_load(seed.text)


def written(tree: Any, language: Language) -> str:
    """The text of a tree."""
    if language == "toml" and isinstance(tree, dict):
        return "".join(f"{json.dumps(str(key))} = {_toml(value)}\n" for key, value in tree.items())
    if language == "yaml":
        return str(yaml.safe_dump(tree, sort_keys=False))
    return json.dumps(tree)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return json.dumps(value)


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a tree; of long lists the first three elements."""
    yield path
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from places(value, (*path, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree[:3]):
            yield from places(value, (*path, index))


def replaced(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The tree with another value at a path."""
    if not path:
        return value
    tree = copy.copy(tree)
    tree[path[0]] = replaced(tree[path[0]], path[1:], value)
    return tree


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    """The value at a path."""
    for key in path:
        tree = tree[key]
    return tree


def swaps(seed: Seed, keys: Mapping[str, Any], draw: random.Random, each: int) -> Iterator[Case]:
    """Every value of the file replaced by ``each`` of all types; dotted ``keys`` are added where they miss."""
    if seed.language == "text":
        for found in SETTING.finditer(seed.text):
            first, last = found.span("value")
            yield from (
                seed.case(seed.text[:first] + junk + seed.text[last:]) for junk in draw.sample(WORDS, each)
            )
        return
    tree = parsed(seed)
    for path in places(tree):
        for junk in draw.sample(JUNK, each):
            yield seed.case(written(replaced(tree, path, junk), seed.language))
    for key in keys:
        for junk in draw.sample(JUNK, each):
            yield seed.case(written(_with_key(tree, key.split("."), junk), seed.language))


def _with_key(tree: Any, parts: list[str], value: Any) -> Any:
    """The tree with a value at a dotted key, whose ``[]`` stand for lists of one element."""
    name, many = parts[0].removesuffix("[]"), parts[0].endswith("[]")
    tree = dict(tree) if isinstance(tree, dict) else {}
    inner = tree.get(name)
    if many:
        inner = inner[0] if isinstance(inner, list) and inner else {}
    new = value if len(parts) == 1 else _with_key(inner, parts[1:], value)
    tree[name] = [new] if many else new
    return tree


def broken(seed: Seed, draw: random.Random) -> Case:
    """One to three random changes, of the tree or of the text."""
    text = seed.text
    if seed.language != "text" and draw.random() < 0.6:
        tree = parsed(seed)
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            tree = _changed_tree(tree, draw)
        text = written(tree, seed.language)
        if draw.random() < 0.9:
            return seed.case(text)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        text = _changed_text(text, draw)
    if draw.random() < 0.03:
        data, place = text.encode("utf-8", "surrogatepass"), draw.randint(0, len(text))
        return seed.case(data[:place] + draw.choice([b"\xff", b"\xc3", b"\x80\x00", b"\x1f\x8b"]) + data[place:])
    return seed.case(text)


def _changed_tree(tree: Any, draw: random.Random) -> Any:
    path = draw.choice(list(places(tree)))
    value = at(tree, path)
    what = draw.choice(["junk", "junk", "number", "delete", "add", "rename", "move", "many", "number", "controls"])
    if what == "delete" and path and isinstance(at(tree, path[:-1]), dict):
        above = at(tree, path[:-1])
        return replaced(tree, path[:-1], {key: one for key, one in above.items() if key != path[-1]})
    if what == "add" and isinstance(value, dict):
        return replaced(tree, path, {**value, draw.choice(["x", "", "name", *CONTROLS]): draw.choice(JUNK)})
    if what == "rename" and isinstance(value, dict) and value:
        old = draw.choice(list(value))
        new = draw.choice([f"{old}s", str(old).upper(), draw.choice(list(value)), *CONTROLS])
        return replaced(tree, path, {new if key == old else key: one for key, one in value.items()})
    if what == "move":
        return replaced(tree, path, copy.deepcopy(at(tree, draw.choice(list(places(tree))))))
    if what == "many" and isinstance(value, list):
        return replaced(tree, path, value * draw.choice([2, 50, 1000]))
    if what == "number" and isinstance(value, int | float) and not isinstance(value, bool):
        return replaced(
            tree, path, draw.choice([value + 1, value - 1, value * 2, value * 1000, -value, value / 3])
        )
    if what == "controls" and isinstance(value, str):
        return replaced(tree, path, value + draw.choice(CONTROLS) + draw.choice(["", value]))
    return replaced(tree, path, draw.choice(JUNK))


def _changed_text(text: str, draw: random.Random) -> str:
    what = draw.choice(
        ["word", "word", "word", "setting", "line", "twice", "often", "cut", "insert", "deep", "swap"]
    )
    lines = text.split("\n")
    line = draw.randrange(len(lines))
    if what in ("word", "setting"):
        spans = [
            found.span("value") if what == "setting" else found.span()
            for found in (SETTING if what == "setting" else TOKEN).finditer(text)
        ]
        first, last = draw.choice(spans or [(0, 0)])
        return text[:first] + draw.choice(WORDS) + text[last:]
    if what == "line":
        return "\n".join(lines[:line] + lines[line + 1 :])
    if what in ("twice", "often"):
        return "\n".join(lines[:line] + [lines[line]] * (2 if what == "twice" else 500) + lines[line + 1 :])
    if what == "swap":
        other = draw.randrange(len(lines))
        lines[line], lines[other] = lines[other], lines[line]
        return "\n".join(lines)
    place = draw.randint(0, len(text))
    if what == "cut":
        return text[:place]
    if what == "deep":
        opening = draw.choice(["[", "{", '{"a":', "(", "a.", "- ", "$(", "${X:-", "if true; then\n", "!", "&a "])
        return text[:place] + opening * draw.choice([10, 200, 3000]) + text[place:]
    return text[:place] + draw.choice([*WORDS, "".join(draw.choices(string.printable, k=6))]) + text[place:]


@dataclass(frozen=True)
class Ended:
    """How a case ended: what is wrong with that (empty: nothing), its exit code, processor time and memory."""

    case: Case
    wrong: str
    code: int | None
    cpu_s: float
    num_bytes: int

    def told(self) -> str:
        """The command and its file for a message, in ASCII."""
        content = self.case.content
        shown = content if len(content) < 6_000 else content[:3_000] + b" ... " + content[-3_000:]
        return f"{self.wrong}\n  {' '.join(self.case.seed.words)}\n  {self.case.seed.name}: {shown!r}"


def run(case: Case, directory: Path) -> Ended:
    """Run a case in a forked process, in an empty directory."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / case.seed.name).write_bytes(case.content)
    for name, text in case.seed.beside.items():
        (directory / name).write_text(text)
    reading, writing = os.pipe()
    inherited = resident_bytes()
    with warnings.catch_warnings():
        # Newer Pythons warn of threads in the parent; the child only runs the command and leaves.
        warnings.simplefilter("ignore")
        process = os.fork()
    if process == 0:
        _child(case, directory, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    _, status, usage = os.wait4(process, 0)
    # A fork begins with what this process holds of the tests before it.
    num_bytes = usage.ru_maxrss * 1024 - max(0, inherited - FRESH_BYTES)
    cpu_s = usage.ru_utime + usage.ru_stime
    code, _, wrong = said.partition(" ")
    if os.WIFSIGNALED(status):
        wrong = f"ended by {signal.Signals(os.WTERMSIG(status)).name} (SIGALRM: it waits; SIGXCPU: it works on)"
    elif cpu_s > MOST_CPU_S:
        wrong = wrong or f"{cpu_s:.1f} s of processor time"
    elif num_bytes > MOST_BYTES:
        wrong = wrong or f"{num_bytes / 2**20:,.0f} MiB"
    return Ended(case, wrong, int(code) if code else None, cpu_s, num_bytes)


def resident_bytes() -> int:
    """Read how much memory this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _child(case: Case, directory: Path, pipe: int) -> None:
    """Run the command and say what is wrong with its end."""
    code, wrong = -1, "the test itself failed"
    try:
        os.chdir(directory)
        before = set(os.listdir())
        resource.setrlimit(resource.RLIMIT_CPU, (2 * MOST_CPU_S, 2 * MOST_CPU_S))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + 3 * MOST_BYTES, size + 3 * MOST_BYTES))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(PATIENCE_S)
        # Processes of a sweep would import everything anew for each case.
        outcomes.run = lambda tasks, num_workers: (solved(task) for task in tasks)  # type: ignore[assignment]
        words = [case.seed.name if word == FILE else word for word in case.seed.words]
        result = CliRunner().invoke(app, words)
        code = result.exit_code
        wrong = wrong_end(words[0], code, result.stdout, result.stderr) or wrong_files(before)
    except BaseException as error:
        wrong = f"{type(error).__name__}: {error}"
    finally:
        os.write(pipe, f"{code} {wrong}"[:4_000].encode("ascii", "backslashreplace"))
        os._exit(0)


def wrong_end(command: str, code: int, stdout: str, stderr: str) -> str:
    """What is wrong with an exit code and what was printed; empty where nothing is."""
    if code not in PROMISED:
        return f"exit code {code}: {stderr[-600:]}"
    if "Traceback" in stderr:
        return f"a traceback: {stderr[-600:]}"
    lines = stderr.splitlines()
    if code == 2 and not ("Usage: " in stderr or any(line.startswith("error: ") for line in lines[:-2])):
        return f"not an error in three parts: {stderr[-600:]!r}"
    # The records that are right are compared all the same.
    if code == 2 and stdout and command != "validate":
        return f"a result besides the error: {stdout[:300]!r}"
    return wrong_characters("stdout", stdout) or wrong_characters("stderr", stderr)


def wrong_characters(name: str, text: str) -> str:
    """The first place where a terminal would obey a text; empty where there is none."""
    clean = cleaned(text)
    if clean == text:
        return ""
    place = next(i for i, (one, other) in enumerate(zip(text, clean, strict=False)) if one != other)
    return f"a control character in {name}: {text[max(0, place - 60) : place + 20]!r}"


def wrong_files(before: set[str]) -> str:
    """Control characters in the text files of the working directory that were not there before."""
    for path in sorted(Path().rglob("*")):
        if path.is_file() and path.parts[0] not in before and path.suffix != ".parquet":
            found = wrong_characters(path.name, path.read_bytes().decode("utf-8", "surrogateescape"))
            if found:
                return found
    return ""
