"""The commands of a shell script with their words, as bash would make them; nothing of it is started.

Assignments, arrays, expansions, arithmetic, tests, conditions, loops, functions, ``eval``, ``bash -c`` and sourced
files are followed. What the script does not decide (variables from outside, its arguments, output of commands)
becomes a mark in every word that it enters. A condition that is not decided is read both ways, and a variable that
the two ways leave different becomes a mark, too; so what is not known never vanishes. ``${NAME:-default}`` takes
its default: that is what the file says of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from milpplan.errors import InvalidInputError
from milpplan.launchers import shell_syntax as syntax
from milpplan.launchers import shell_tree as tree
from milpplan.launchers.shell_arithmetic import arithmetic
from milpplan.launchers.shell_conditions import (
    BINARY,
    Truth,
    compared,
    condition,
    found_in,
    joined,
    matches,
    negated,
    nonempty,
    unary,
)
from milpplan.launchers.shell_marks import MARK, deciders_in, how_to_decide, is_mark, marked, readable
from milpplan.specs.reading import read_text

MAX_CHARACTERS = syntax.MAX_CHARACTERS
MAX_EFFORT = 4_000_000
"""Most characters of words that are made; every command counts as 20, so that loops end."""
MAX_ROUNDS = 8

_NAME = re.compile(r"[A-Za-z_]\w*")
_BRACED = re.compile(r"(!?)([A-Za-z_]\w*|[0-9]+|[@*#?$!_-])(?:\[([^\]]*)\])?(.*)", re.DOTALL)
_BRACES = re.compile(r"\{([^{}]*)\}")
_SUCCEED = frozenset(
    """
    cd mkdir export echo printf pushd popd module ml conda set ulimit trap pip pip3 rm cp mv touch chmod ln sleep
    wait hostname date nvidia-smi tee umask shopt hash alias
    """.split()  # noqa: SIM905
)
"""Programs that a script takes to succeed: one whose folders cannot be made trains nothing."""
_ENVIRONMENT_FILES = re.compile(
    r"(?:.*/)?(?:activate|\.?bashrc|\.?bash_profile|\.?profile|\.?zshrc|conda\.sh|modules\.sh|lmod\.sh|"
    r"setvars\.sh|init/\w+)|/etc/.*"
)
_ENVIRONMENT_TOOLS = re.compile(r"\b(?:conda|mamba|micromamba|pyenv|spack|direnv|ssh-agent|modulecmd)\b")
"""Files that set paths and packages up and no arguments of training."""
_SHELLS = ("bash", "sh", "zsh", "dash")
_PASSING = frozenset({"exec", "command", "builtin", "nohup", "time"})

Value = str | list[str] | None
"""Of a variable: text, or an array; None: it is not set, which the script itself has seen to."""


@dataclass(frozen=True, slots=True)
class Command:
    """Words of one command; ``nested`` where it may run and may not."""

    words: tuple[str, ...]
    nested: bool


def script_commands(text: str, source: str = "") -> tuple[Command, ...]:
    """The commands of a script, in order.

    Args:
        text: the script.
        source: its path; files that it sources are looked for beside it.

    Raises:
        InvalidInputError: no script of the grammar here, or one that takes too long or whose flow is not decided.
    """
    name = source or "The script"
    reader = _Reader(name, Path(source).parent if source and Path(source).is_file() else None)
    try:
        reader.sequence(syntax.parsed(text.replace("\r\n", "\n").replace(MARK, ""), name))
    except _ExitError:
        pass
    except RecursionError as error:
        raise _too_much(name, "nests its commands too deeply") from error
    return tuple(reader.commands)


def _too_much(source: str, what: str) -> InvalidInputError:
    return InvalidInputError(
        f"{source} {what}.",
        f"Expected a script that makes words of at most {MAX_EFFORT:,} characters in all.",
        "Write the command out, and import that.",
    )


class _ExitError(Exception):
    """The shell exits."""


class _ReturnError(Exception):
    """A function returns."""


class _LoopError(Exception):
    """``break`` or ``continue``, out of ``levels`` loops."""

    def __init__(self, breaks: bool, levels: int) -> None:
        self.breaks, self.levels = breaks, levels


@dataclass(slots=True)
class _Fields:
    """Fields that a word becomes; the last one is open while ``begun``."""

    fields: list[str] = field(default_factory=list)
    begun: bool = False

    def add(self, text: str) -> None:
        """Characters of the field at hand."""
        if not self.begun:
            self.fields.append("")
            self.begun = True
        self.fields[-1] += text

    def add_split(self, text: str) -> None:
        """The value of a variable outside quotes: blanks end fields."""
        if not text:
            return
        if text[0] in " \t\n":
            self.begun = False
        for index, part in enumerate(re.split(r"[ \t\n]+", text.strip(" \t\n"))):
            self.begun = self.begun and index == 0
            if part:
                self.add(part)
        if text[-1] in " \t\n":
            self.begun = False

    def add_each(self, values: list[str], split: bool) -> None:
        """All elements of an array, each a field of its own."""
        for index, value in enumerate(values):
            self.begun = self.begun and index == 0
            if split:
                self.add_split(value)
            else:
                self.add(value)


@dataclass(slots=True)
class _Frame:
    """What belongs to a call: old values of local variables; what the state was where the call perhaps returned,
    against its start; and how many journals there were at its start."""

    journals: int
    old: dict[str, object] = field(default_factory=dict)
    returned: list[dict[str, object]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Fork:
    """A condition around that is not decided: loops and calls around it, and names that would decide it."""

    loops: int
    calls: int
    names: tuple[str, ...]


_ABSENT = object()
PERHAPS = "perhaps"
"""Of what holds in one of several ways."""


class _Reader:
    """Follows the commands of one shell. Its state is one mapping, whose changes can be taken back."""

    def __init__(self, source: str, directory: Path | None) -> None:
        self.source, self.directory = source, directory
        self.state: dict[str, object] = {}
        self.journals: list[dict[str, object]] = []
        self.commands: list[Command] = []
        self.frames: list[_Frame] = []
        self.maybe = 0
        self.loops: list[bool] = []
        """Loops around, and whether each is decided."""
        self.forks: list[_Fork] = []
        self.level = 0
        self.effort = 0
        self.seen: list[str] = []
        """Names that would decide what the test at hand has looked at."""

    # State: variables by name; "@" the arguments; "fn NAME", "exported NAME", "pinned NAME", "missing".

    def put(self, key: str, value: object) -> None:
        """Set a part of the state."""
        if self.journals:
            self.journals[-1].setdefault(key, self.state.get(key, _ABSENT))
        if value is _ABSENT:
            self.state.pop(key, None)
        else:
            self.state[key] = value

    @contextmanager
    def apart(self) -> Iterator[dict[str, object]]:
        """Take all changes back at the end; they are then in the mapping that is given."""
        changes: dict[str, object] = {}
        self.journals.append({})
        try:
            yield changes
        finally:
            before = self.journals.pop()
            for key, old in before.items():
                changes[key] = self.state.get(key, _ABSENT)
                if old is _ABSENT:
                    self.state.pop(key, None)
                else:
                    self.state[key] = old

    def spend(self, characters: int) -> None:
        """Count effort."""
        self.effort += characters
        if self.effort > MAX_EFFORT:
            raise _too_much(self.source, "runs too many commands, or makes a value that is too long")

    def assign(self, name: str, value: Value) -> None:
        """Set a variable, unless ``readonly`` keeps it."""
        if f"pinned {name}" not in self.state:
            self.put(name, value)
            if "allexport" in self.state:
                self.put(f"exported {name}", self.state["allexport"])

    def variable(self, name: str) -> Value | object:
        """Its value; ``_ABSENT`` where the script never set it."""
        return self.state.get(name, _ABSENT)

    # Conditions that are not decided.

    def alternatives(self, ways: list[Callable[[], object]], why: str, names: Iterable[str]) -> None:
        """Go several ways, of which one is gone, and keep what they agree on."""
        ends: list[dict[str, object]] = []
        names = tuple(dict.fromkeys(names))
        out: Exception = _ExitError()
        for way in ways:
            self.maybe += 1
            self.forks.append(_Fork(len(self.loops), len(self.frames), names))
            try:
                with self.apart() as changes:
                    way()
            except (_ExitError, _ReturnError) as error:
                # After an exit nothing is trained; where a call returned is kept for its end.
                out = error if isinstance(error, _ReturnError) else out
                continue
            except _LoopError:
                # Only out of loops that are read as a whole: their changes become unknown there.
                pass
            finally:
                self.maybe -= 1
                self.forks.pop()
            ends.append(changes)
        if not ends:
            raise out
        self.merge(ends, why, names)

    def merge(self, ends: list[dict[str, object]], why: str, names: tuple[str, ...]) -> None:
        """Keep what several ends of the state agree on; each is given by its changes."""
        for key in dict.fromkeys(key for changes in ends for key in changes):
            values = [changes.get(key, self.state.get(key, _ABSENT)) for changes in ends]
            if all(type(value) is type(values[0]) and value == values[0] for value in values):
                self.put(key, values[0])
            else:
                self.blur(key, values, why, names)

    def blur(self, key: str, values: list[object], why: str, names: tuple[str, ...]) -> None:
        """Make a part of the state unknown."""
        self.spend(200)
        if key == "@":
            self.put(key, [marked(f"$@ ({why})", names or ("@",))])
        elif key.startswith("fn "):
            self.put(key, None)
        elif " " in key or key in ("missing", "allexport"):
            # Perhaps exported, missing or moved away.
            self.put(key, next((value for value in values if isinstance(value, str)), PERHAPS))
        else:
            mark = marked(f"${key} ({why})", names or (key,))
            self.put(key, [mark] if any(isinstance(value, list) for value in values) else mark)

    def leave_loops(self, breaks: bool, levels: int, line: int) -> None:
        """Leave loops; out of a loop that surely runs only where it is decided.

        Raises:
            InvalidInputError: it is not.
        """
        left = len(self.loops) - levels
        forks = [fork for fork in self.forks if fork.calls == len(self.frames) and fork.loops > left]
        if forks and any(self.loops[left:]):
            self.seen = [name for fork in forks for name in fork.names]
            raise self.undecided(line, "whether the loop ends here is not decided")
        raise _LoopError(breaks, levels)

    def leave_call(self, status: Truth) -> None:
        """Return from the call at hand; where that is not decided, its end is merged with what is kept here."""
        frame = self.frames[-1]
        forks = [fork for fork in self.forks if fork.calls == len(self.frames)]
        if forks:
            keys = dict.fromkeys(key for journal in self.journals[frame.journals :] for key in journal)
            frame.returned.append({key: self.state.get(key, _ABSENT) for key in keys})
            frame.names += [name for fork in forks for name in fork.names]
        raise _ReturnError(None if forks else status)

    def undecided(self, line: int, what: str) -> InvalidInputError:
        """The error for a flow that is not known."""
        names = [f"--set {name}=VALUE" for name in dict.fromkeys(self.seen) if _NAME.fullmatch(name)]
        if any(not _NAME.fullmatch(name) for name in self.seen):
            names.append('--args "..." (the arguments of the script)')
        return InvalidInputError(
            f"{self.source}, line {line}: {what}.",
            "Expected conditions that the file decides.",
            f"Say it with {' and '.join(names[:4])}." if names else "Write the command out, and import that.",
        )

    # Commands.

    def sequence(self, node: tree.Sequence) -> Truth:
        """Commands one after another; the status of the last."""
        status: Truth = True
        for place, part in enumerate(node.parts):
            if place in node.background:
                self.own_shell(part)
                status = True
            else:
                status = self.node(part)
        return status

    def own_shell(self, node: tree.Node) -> Truth:
        """A command whose assignments are lost."""
        with self.apart():
            try:
                return self.node(node)
            except (_ExitError, _ReturnError, _LoopError):
                return None

    def node(self, node: tree.Node) -> Truth:
        """Follow a command."""
        self.spend(20)
        self.level += 1
        if self.level > 2 * syntax.MAX_LEVEL:
            raise _too_much(self.source, "nests its commands too deeply")
        try:
            return self._node(node)
        finally:
            self.level -= 1

    def _node(self, node: tree.Node) -> Truth:
        match node:
            case tree.Simple():
                return self.simple(node)
            case tree.Sequence():
                return self.sequence(node)
            case tree.AndOr():
                return self.and_or(node)
            case tree.Pipeline():
                for part in node.parts[:-1]:
                    self.own_shell(part)
                last = node.parts[-1]
                status = self.node(last) if len(node.parts) == 1 else self.own_shell(last)
                return negated(status) if node.negated else status
            case tree.Group():
                return self.own_shell(node.body) if node.own_shell else self.sequence(node.body)
            case tree.If():
                return self.conditional(node, 0)
            case tree.Case():
                return self.choice(node)
            case tree.Loop():
                return self.loop(node)
            case tree.For():
                return self.over_words(node)
            case tree.Counted():
                return self.counted(node)
            case tree.Function():
                self.put(f"fn {node.name}", node.body)
                return True
            case tree.Test():
                return self.test(list(node.tokens))
            case tree.Arithmetic():
                found = self.number(node.text, assign=True)
                return None if found is None else found != 0

    def and_or(self, node: tree.AndOr) -> Truth:
        """``a && b || c``."""
        self.seen = []
        status = self.node(node.parts[0])
        for operator, part in zip(node.operators, node.parts[1:], strict=True):
            if status is None:
                names, results = list(self.seen), list[Truth]()

                def way(part: tree.Node = part, results: list[Truth] = results) -> None:
                    results.append(self.node(part))

                self.alternatives([way, lambda: None], f"set after {operator}, which may be reached", names)
                # A command on the right that leaves says what the left was.
                status = joined(operator, None, results[0]) if results else operator == "||"
                self.seen = names + self.seen
            elif status == (operator == "&&"):
                status = self.node(part)
            else:
                self.passed_over(part)
        return status

    def conditional(self, node: tree.If, at: int) -> Truth:
        """``if``, from one of its branches on."""
        if at == len(node.branches):
            return True if node.otherwise is None else self.sequence(node.otherwise)
        test, body = node.branches[at]
        self.seen = []
        truth = self.sequence(test)
        if truth is None:
            names = tuple(self.seen)
            self.alternatives(
                [lambda: self.sequence(body), lambda: self.conditional(node, at + 1)],
                f"set in line {node.line}: {node.said}",
                names,
            )
            self.seen = list(names)
            return None
        if truth:
            for other_test, other in node.branches[at + 1 :]:
                self.passed_over(other_test)
                self.passed_over(other)
            if node.otherwise is not None:
                self.passed_over(node.otherwise)
            return self.sequence(body)
        self.passed_over(body)
        return self.conditional(node, at + 1)

    def choice(self, node: tree.Case) -> Truth:
        """``case``: the clauses that may match, up to one that surely does."""
        word = "".join(self.expanded(node.word, split=False))
        ways: list[Callable[[], object]] = []
        for patterns, body, ending in node.clauses:
            truths = [matches(word, self.pattern(one)) for one in patterns]
            if ending in (";&", ";;&") and any(truth is not False for truth in truths):
                self.seen = list(deciders_in(word))
                raise self.undecided(node.line, f"{ending} of case is not understood")
            if any(truths):
                ways.append(lambda body=body: self.sequence(body))  # type: ignore[misc]
                break
            if None in truths:
                ways.append(lambda body=body: self.sequence(body))  # type: ignore[misc]
            else:
                self.passed_over(body)
        else:
            ways.append(lambda: None)
        if len(ways) == 1:
            ways[0]()
            return None
        self.alternatives(ways, f"set in line {node.line}: {node.said}", deciders_in(word))
        return None

    def loop(self, node: tree.Loop) -> Truth:
        """``while`` and ``until``."""
        while True:
            self.seen = []
            truth = self.node(node.test)
            truth = negated(truth) if node.until else truth
            if truth is None:
                names = tuple(self.seen)

                def round_of(names: tuple[str, ...] = names) -> None:
                    self.node(node.test)
                    self.sequence(node.body)

                self.any_rounds(round_of, f"set in the loop of line {node.line}", names)
                return None
            if not truth or not self.round(node.body):
                return True

    def round(self, body: tree.Sequence) -> bool:
        """A round of a loop that surely runs; False: the loop ends."""
        self.loops.append(True)
        try:
            self.sequence(body)
        except _LoopError as out:
            if out.levels > 1:
                raise _LoopError(out.breaks, out.levels - 1) from None
            return not out.breaks
        finally:
            self.loops.pop()
        return True

    def any_rounds(self, way: Callable[[], object], why: str, names: tuple[str, ...]) -> None:
        """A loop of any number of rounds: what any of them changes is unknown, at its start and after it."""
        changed: set[str] = set()
        for _ in range(MAX_ROUNDS):
            told = len(self.commands)
            for key in changed:
                self.blur(key, [self.state.get(key, _ABSENT)], why, names)
            self.loops.append(False)
            self.maybe += 1
            self.forks.append(_Fork(len(self.loops), len(self.frames), names))
            try:
                with self.apart() as changes:
                    way()
            except (_ExitError, _LoopError, _ReturnError):
                pass
            finally:
                self.loops.pop()
                self.maybe -= 1
                self.forks.pop()
            if changes.keys() <= changed:
                return
            changed |= changes.keys()
            del self.commands[told:]
        raise _too_much(self.source, "has a loop whose rounds are not told apart")

    def over_words(self, node: tree.For) -> Truth:
        """``for name in words``."""
        if node.words is None:
            words = self.arguments()
        else:
            words = [one for word in node.words for one in self.expanded(word)]
        if any(is_mark(word) for word in words):
            names = tuple(name for word in words for name in deciders_in(word))

            def way() -> None:
                self.assign(node.name, marked(f"${node.name} (any of the words of line {node.line})", names))
                self.sequence(node.body)

            self.any_rounds(way, f"set in the loop of line {node.line}", names)
            return None
        for word in words:
            self.spend(20)
            self.assign(node.name, word)
            if not self.round(node.body):
                break
        return True

    def counted(self, node: tree.Counted) -> Truth:
        """``for ((start; test; step))``."""
        self.number(node.start, assign=True)
        while True:
            self.seen = []
            truth = 1 if not node.test.strip() else self.number(node.test, assign=True)
            if truth is None:
                names = tuple(self.seen)

                def way() -> None:
                    self.sequence(node.body)
                    self.number(node.step, assign=True)

                self.any_rounds(way, f"set in the loop of line {node.line}", names)
                return None
            self.spend(20)
            if not truth or not self.round(node.body):
                return True
            self.number(node.step, assign=True)

    def passed_over(self, node: tree.Node) -> None:
        """A command that is surely not reached: variables that only it sets are the script's own, and not set."""
        for assign in _assigns(node):
            own = not any(re.search(rf"\b{assign.name}\b", part.text) for part in _parts(assign))
            if own and self.variable(assign.name) is _ABSENT and "missing" not in self.state:
                self.assign(assign.name, None)

    # Simple commands.

    def simple(self, node: tree.Simple) -> Truth:
        """Assignments, then a builtin, a function, or a program."""
        words = [one for word in node.words for one in self.expanded(word)]
        declares = bool(words) and words[0] in syntax.DECLARERS
        if words and not declares:
            return self.with_environment(node, words)
        options = "".join(word for word in words[1:] if word.startswith("-"))
        if declares:
            self.declared(words, options, node)
        status: Truth = True
        for one in node.assigns:
            if declares and words[0] in ("local", "declare", "typeset") and "g" not in options:
                self.make_local(one.name)
            self.assignment(one, options)
            if any(part.kind == "command" for part in _parts(one)):
                status = None
            if (declares and words[0] == "readonly") or "r" in options:
                self.put(f"pinned {one.name}", True)
            if declares and (words[0] == "export" or "x" in options):
                self.put(f"exported {one.name}", True)
        return status

    def declared(self, words: list[str], options: str, node: tree.Simple) -> None:
        """Names without values after ``export``, ``local`` and the like."""
        for name in words[1:]:
            name, equals, value = name.partition("=")
            if name.startswith("-") or not _NAME.fullmatch(name):
                continue
            if words[0] in ("local", "declare", "typeset") and "g" not in options:
                self.make_local(name)
                if self.frames and not equals:
                    self.assign(name, None)
            if equals:
                self.assign(name, value)
            if words[0] == "export" or "x" in options:
                self.put(f"exported {name}", True)
            if words[0] == "readonly" or "r" in options:
                self.put(f"pinned {name}", True)
            if "A" in options or "n" in options:
                self.assign(name, marked(f"${name} (declare {options})", (name,)))

    def make_local(self, name: str) -> None:
        """Let the call at hand give a variable back."""
        if self.frames:
            self.frames[-1].old.setdefault(name, self.state.get(name, _ABSENT))

    def assignment(self, one: tree.Assign, options: str) -> None:
        """``name=value``."""
        old = self.variable(one.name)
        if "A" in options or "n" in options or "i" in options:
            texts = [marked(f"${one.name} (declare {options})", (one.name,))]
            self.assign(one.name, texts if one.is_array else texts[0])
            return
        if one.is_array:
            elements = [text for word in one.value for text in self.expanded(word)]  # type: ignore[arg-type]
            if any(word and word[0].text.startswith("[") for word in one.value):  # type: ignore[index]
                elements = [marked(f"${one.name} (elements by their places)", (one.name,))]
            self.assign(one.name, (self.as_list(one.name, old) if one.append else []) + elements)
            return
        value = "".join(self.expanded(one.value, split=False))  # type: ignore[arg-type]
        if one.index is not None:
            self.element(one, old, value)
        elif one.append and isinstance(old, list):
            self.assign(one.name, [old[0] + value if old else value, *old[1:]])
        else:
            self.assign(one.name, (self.as_text(one.name, old) if one.append else "") + value)

    def element(self, one: tree.Assign, old: Value | object, value: str) -> None:
        """``name[index]=value``."""
        assert one.index is not None
        values = self.as_list(one.name, old)
        at = self.number(one.index)
        if at is None or not 0 <= at <= len(values) or any(map(is_mark, values)):
            self.assign(one.name, [marked(f"${one.name} (elements by their places)", (one.name,))])
        elif at == len(values):
            self.assign(one.name, [*values, value])
        else:
            new = values[at] + value if one.append else value
            self.assign(one.name, [*values[:at], new, *values[at + 1 :]])

    def as_list(self, name: str, value: Value | object) -> list[str]:
        """A variable as an array."""
        if value is _ABSENT:
            return [] if "missing" not in self.state else [self.unset(name)]
        return list(value) if isinstance(value, list) else [] if value is None else [str(value)]

    def as_text(self, name: str, value: Value | object) -> str:
        """A variable as text."""
        if isinstance(value, list):
            return value[0] if value else ""
        return self.unset(name) if value is _ABSENT else "" if value is None else str(value)

    def unset(self, name: str) -> str:
        """The mark for a variable that the script never set."""
        missing = self.state.get("missing")
        return marked(f"${name}" + (f" (perhaps set by {missing})" if missing else ""), (name,))

    def with_environment(self, node: tree.Simple, words: list[str]) -> Truth:
        """A command; assignments before it are for it alone."""
        if not node.assigns:
            return self.command(words, node.line)
        with self.apart() as changes:
            kept = {key: self.state.get(key, _ABSENT) for key in (one.name for one in node.assigns)}
            for one in node.assigns:
                self.assignment(one, "")
                self.put(f"exported {one.name}", True)
            status = self.command(words, node.line)
        for key, value in changes.items():
            if key not in kept and not key.startswith("exported "):
                self.put(key, value)
        return status

    def command(self, words: list[str], line: int) -> Truth:
        """A builtin, a function, or a program, by its words."""
        self.spend(sum(map(len, words)))
        while words and words[0] in _PASSING:
            if words[0] == "exec" and len(words) > 1:
                self.command(words[1:], line)
                raise _ExitError
            words = words[1:]
        if not words:
            return True
        name = words[0]
        body = self.state.get(f"fn {name}", _ABSENT)
        if body is None:
            raise self.undecided(line, f"which function {name} is depends on what the script does not say")
        if body is not _ABSENT:
            return self.call(body, words[1:])  # type: ignore[arg-type]
        builtin = _BUILTINS.get(name)
        if builtin is not None:
            return builtin(self, words, line)
        self.commands.append(Command(tuple(words), self.maybe > 0))
        self.inner_shell(words, line)
        if name in ("cd", "pushd", "popd") and words[-1] not in (".", str(self.directory)):
            self.put("moved away", True)
        if name in _SUCCEED:
            return True
        self.seen += [one for word in words for one in deciders_in(word)]
        return None

    def call(self, body: tree.Node, arguments: list[str] | None) -> Truth:
        """A function, or a sourced file; without arguments it has those of its caller."""
        before = self.state.get("@", _ABSENT)
        frame = _Frame(len(self.journals))
        self.frames.append(frame)
        loops, self.loops = self.loops, []
        status: Truth = None
        try:
            with self.apart() as changes:
                if arguments is not None:
                    self.put("@", arguments)
                try:
                    status = self.node(body)
                except _ReturnError as out:
                    status = out.args[0]
                except _ExitError:
                    if not frame.returned:
                        raise
                    changes = {}
        finally:
            self.loops = loops
            self.frames.pop()
        ends = [changes, *frame.returned] if changes or not frame.returned else frame.returned
        self.merge(ends, "set where a call perhaps returns before", tuple(dict.fromkeys(frame.names)))
        for name, old in frame.old.items():
            self.put(name, old)
        if arguments is not None:
            self.put("@", before)
        return None if frame.returned else status

    def inner_shell(self, words: list[str], line: int) -> None:
        """``bash -c text`` anywhere in a command: the text is a script for a shell with what is exported."""
        shell = next((at for at, word in enumerate(words) if word.rsplit("/", 1)[-1] in _SHELLS), len(words))
        at = shell + 1
        while at < len(words) and words[at].startswith(("-", "+")) and not re.fullmatch(r"-[a-z]*c", words[at]):
            at += 2 if words[at] in ("-o", "+o", "-O", "+O") else 1
        if at + 1 >= len(words) or not words[at].startswith("-"):
            return
        text, rest = words[at + 1], words[at + 2 :]
        with self.apart():
            for key, value in list(self.state.items()):
                if key.startswith("fn "):
                    self.put(key, _ABSENT)
                elif (
                    _NAME.fullmatch(key)
                    and key not in ("missing", "allexport")
                    and f"pinned {key}" not in self.state
                ):
                    exported = self.state.get(f"exported {key}")
                    if exported == PERHAPS:
                        self.put(key, self.unset(key))
                    elif exported is None or isinstance(value, list):
                        # It may still come from outside.
                        self.put(key, _ABSENT)
            self.put("@", rest[1:])
            self.evaluated(text, line, own_shell=True)

    def evaluated(self, text: str, line: int, own_shell: bool = False) -> Truth:
        """A text as a script."""
        if is_mark(text.strip()):
            # It may be any command, a program to be started or assignments.
            self.commands.append(Command((text.strip(),), self.maybe > 0))
            if not (own_shell or _ENVIRONMENT_TOOLS.search(readable(text))):
                self.anything_set(readable(text.strip()))
            return None
        self.spend(len(text))
        node = syntax.parsed(text, f"{self.source}, line {line}, in a text that is run", level=self.level // 2)
        return self.own_shell(node) if own_shell else self.node(node)

    def anything_set(self, by: str) -> None:
        """What is not there to be read may have set any variable."""
        for key, value in list(self.state.items()):
            if _NAME.fullmatch(key) and key not in ("missing", "allexport") and f"pinned {key}" not in self.state:
                self.spend(200)
                mark = marked(f"${key} (perhaps set by {by})", (key,))
                self.put(key, [mark] if isinstance(value, list) else mark)
        self.put("missing", by)

    # Tests and numbers.

    def test(self, tokens: list[tree.Word | str]) -> Truth:
        """``[[ ... ]]``, by the ranks of its operators."""
        found, at = self._or(tokens, 0)
        return found if at == len(tokens) else None

    def _or(self, tokens: list[tree.Word | str], at: int) -> tuple[Truth, int]:
        found, at = self._and(tokens, at)
        while at < len(tokens) and tokens[at] == "||":
            right, at = self._and(tokens, at + 1)
            found = joined("||", found, right)
        return found, at

    def _and(self, tokens: list[tree.Word | str], at: int) -> tuple[Truth, int]:
        found, at = self._not(tokens, at)
        while at < len(tokens) and tokens[at] == "&&":
            right, at = self._not(tokens, at + 1)
            found = joined("&&", found, right)
        return found, at

    def _not(self, tokens: list[tree.Word | str], at: int) -> tuple[Truth, int]:
        count = 0
        while at < len(tokens) and tokens[at] == "!":
            count, at = count + 1, at + 1
        if at < len(tokens) and tokens[at] == "(":
            self.level += 1
            if self.level > 2 * syntax.MAX_LEVEL:
                raise _too_much(self.source, "nests its tests too deeply")
            found, at = self._or(tokens, at + 1)
            self.level -= 1
            if at >= len(tokens) or tokens[at] != ")":
                return None, len(tokens)
            at += 1
        else:
            found, at = self._primary(tokens, at)
        return (negated(found) if count % 2 else found), at

    def _primary(self, tokens: list[tree.Word | str], at: int) -> tuple[Truth, int]:
        end = at
        while end < len(tokens) and tokens[end] not in ("&&", "||", ")"):
            end += 1
        group = tokens[at:end]
        texts = [one if isinstance(one, str) else "".join(self.expanded(one, split=False)) for one in group]
        self.seen += [name for text in texts for name in deciders_in(text)]
        operator = texts[1] if len(group) == 3 else ""
        if len(group) == 1:
            return nonempty(texts[0]), end
        if len(group) == 2:
            return (self.is_set(texts[1]) if texts[0] == "-v" else unary(texts[0], texts[1])), end
        if operator in ("=", "==", "!=") and not isinstance(group[2], str):
            found = matches(texts[0], self.pattern(group[2]))
            return (negated(found) if operator == "!=" else found), end
        if operator == "=~" and not isinstance(group[2], str):
            quoted = any(part.quoted and part.text for part in group[2])
            return (None if quoted else found_in(texts[0], texts[2])), end
        if operator in BINARY and operator.startswith("-"):
            left, right = self.number(texts[0]), self.number(texts[2])
            return (None if None in (left, right) else compared(str(left), operator, str(right))), end
        return None, end

    def is_set(self, name: str) -> Truth:
        """Whether a variable is set; one that the script never set may come from outside."""
        value = self.variable(name)
        if value is _ABSENT or deciders_in(str(value)):
            self.seen.append(name)
            return None
        return value is not None

    def pattern(self, word: tree.Word) -> list[tuple[str, bool]]:
        """A word as a pattern: expansions outside quotes may hold stars of their own."""
        return [("".join(self.expanded((part,), split=False)), part.quoted) for part in word]

    def number(self, text: str, assign: bool = False) -> int | None:
        """The value of an arithmetic expression; None: not known. ``assign``: variables may be set by it."""
        whole = "".join(self.expanded(syntax.parsed_word(text, self.source, quoted=True), split=False))
        set_here: list[tuple[str, str]] = []

        def value(name: str) -> str | None:
            found = self.as_text(name, self.variable(name))
            self.seen += deciders_in(found)
            return None if MARK in found else found

        self.seen += deciders_in(whole)
        found = None if MARK in whole else arithmetic(whole, value, lambda *pair: set_here.append(pair))
        if found is None:
            for name in re.findall(r"([A-Za-z_]\w*)\s*(?:[-+*/%&|^]|<<|>>)?=(?!=)|", whole) if assign else ():
                if name:
                    self.assign(name, marked(f"${name} (set in an expression)", (name, *deciders_in(whole))))
            for pair in re.findall(r"([A-Za-z_]\w*)\s*(?:\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)", whole):
                name = pair[0] or pair[1]
                self.assign(name, marked(f"${name} (set in an expression)", (name,)))
        for name, new in set_here:
            self.assign(name, new)
        return found

    # Words.

    def expanded(self, word: tree.Word, split: bool = True) -> list[str]:
        """The fields of a word; one where it is not split."""
        plain = "".join("x" if part.quoted else part.text for part in word if part.kind == "text")
        if split and any("," in inner or ".." in inner for inner in _BRACES.findall(plain)):
            return [marked("".join(part.text for part in word) + " (braces)")]
        found = _Fields()
        for part in word:
            if part.kind == "text":
                found.add(part.text) if part.text or part.quoted else None
            elif part.kind == "parameter":
                self.parameter(found, part, split)
            else:
                if part.kind == "arithmetic":
                    number = self.number(part.text, assign=True)
                    names = _NAME.findall(part.text)
                    text = marked(f"$(({part.text}))", self.deciding(names)) if number is None else str(number)
                elif part.kind == "command":
                    text = self.output(part.text)
                else:
                    text = marked(part.text)
                found.add_split(text) if split and not part.quoted else found.add(text)
        fields = found.fields
        if split and any(part.kind == "text" and not part.quoted for part in word):
            fields = [
                re.sub(r"^~(?=/|$)", lambda _: marked("~"), one) if one[:1] == "~" else one for one in fields
            ]
        if not split and not fields:
            fields = [""]
        self.spend(sum(map(len, fields)) + 4)
        return fields

    def deciding(self, names: Iterable[str]) -> list[str]:
        """Names that would decide variables."""
        return [
            one for name in dict.fromkeys(names) for one in deciders_in(self.as_text(name, self.variable(name)))
        ]

    def arguments(self) -> list[str]:
        """The script's own arguments, or those of the function at hand."""
        found = self.state.get("@")
        return [marked("$@ (the arguments of the script)", ("@",))] if found is None else list(found)  # type: ignore[call-overload]

    def parameter(self, found: _Fields, part: tree.Part, split: bool) -> None:
        """``$NAME`` and ``${...}``."""
        match = _BRACED.fullmatch(part.text)
        if match is None:
            found.add(marked(f"${{{part.text}}}", _NAME.findall(part.text)))
            return None
        indirect, name, index, rest = match.groups()
        if name == "#" and (rest or index):
            # ${#NAME}: a length.
            inner = _BRACED.fullmatch(rest)
            found.add(
                self.length(inner[2], inner[3], part.text)
                if inner and not inner[4]
                else marked(f"${{{part.text}}}")
            )
            return None
        if indirect:
            target = self.as_text(name, self.variable(name))
            if index is not None or rest or not _NAME.fullmatch(target):
                found.add(marked(f"${{{part.text}}}", (name,)))
                return None
            name = target
        many = name == "@" or index == "@"
        star = name == "*" or index == "*"
        values = self.values(name, index)
        if rest:
            values = self.operated(name, values, rest, part)
            if values is None:
                return self.default(found, rest, part, split)
        values = values or []
        if "IFS" in self.state and (star or (split and not part.quoted)):
            values = [marked(f"${part.text} (split by IFS)", (name,))] if values else []
        if (many or (star and not part.quoted)) and split:
            found.add_each(values, split=not part.quoted)
        elif split and not part.quoted:
            found.add_split(" ".join(values))
        else:
            found.add(" ".join(values))
        return None

    def values(self, name: str, index: str | None) -> list[str] | None:
        """The values of a parameter; None: it is not set, and the script has seen to it; a mark: not known."""
        if name in ("@", "*"):
            return self.arguments()
        if name == "#":
            words = self.arguments()
            return [marked("$#", deciders_in("".join(words)))] if any(map(is_mark, words)) else [str(len(words))]
        if name.isdigit():
            if name == "0":
                return [self.source if self.directory else marked("$0")]
            words = self.arguments()
            at = int(name) - 1
            if any(map(is_mark, words[: at + 1])):
                return [marked(f"${name} (an argument of the script)", deciders_in("".join(words)) or ("@",))]
            return [words[at]] if at < len(words) else None
        if not _NAME.fullmatch(name):
            return [marked(f"${name}")]
        value = self.variable(name)
        if name == "BASH_SOURCE" and value is _ABSENT:
            return self.values("0", None)
        if index is None:
            if isinstance(value, list):
                return value[:1] or None
            return None if value is None else [self.as_text(name, value)]
        if index in ("@", "*"):
            if f"pinned {name}" in self.state and isinstance(value, str):
                # A group that --set gives is a text of words.
                return value.split()
            if value is _ABSENT:
                return [self.unset(name)]
            return self.as_list(name, value)
        return self.indexed(name, value, index)

    def indexed(self, name: str, value: Value | object, index: str) -> list[str] | None:
        """``${name[index]}``."""
        at = self.number(index)
        values = [self.unset(name)] if value is _ABSENT else self.as_list(name, value)
        if at is None or any(map(is_mark, values)):
            names = [one for text in values for one in deciders_in(text)] or [name]
            return [marked(f"${name}[{index}]", names)]
        return [values[at]] if -len(values) <= at < len(values) else None

    def length(self, name: str, index: str | None, text: str) -> str:
        """``${#name}`` and ``${#name[@]}``."""
        values = self.values(name, index)
        names = [one for value in values or () for one in deciders_in(value)]
        if any(MARK in value for value in values or ()):
            return marked(f"${{{text}}}", names or (name,))
        many = index in ("@", "*") or name in ("@", "*")
        return str(len(values or ()) if many else len("".join(values or ())))

    def operated(self, name: str, values: list[str] | None, rest: str, part: tree.Part) -> list[str] | None:
        """What follows the name in ``${...}``; None: the word after it is taken."""
        operator = re.match(r":?[-=+?]", rest)
        plain = "" if values is None else "".join(values)
        value = self.variable(name) if _NAME.fullmatch(name) else values
        absent = value is _ABSENT or values is None
        if name.isdigit() and "@" not in self.state and values is not None:
            # The script's argument, which nobody gave: its default is what the file says.
            absent = True
        if operator:
            kind = operator[0][-1]
            unknown = MARK in plain and not absent and nonempty(plain) is None
            if "missing" in self.state and value is _ABSENT:
                return [self.unset(name)]
            if kind == "?":
                return values
            if kind == "+":
                if value is _ABSENT or unknown:
                    return [marked(f"${{{part.text}}}", deciders_in(plain) or (name,))]
                there = not absent and (operator[0][0] != ":" or plain != "")
                return None if there else []
            if unknown and operator[0][0] == ":":
                return [marked(f"${{{part.text}}}", deciders_in(plain) or (name,))]
            if absent or (operator[0][0] == ":" and plain == ""):
                return None
            return values
        if values is None:
            return []
        return [self.edited(one, rest, part) for one in self.sliced(name, values, rest, part)]

    def sliced(self, name: str, values: list[str], rest: str, part: tree.Part) -> list[str]:
        """``${@:2}``: some of the arguments, or elements."""
        if not rest.startswith(":") or not (name in ("@", "*") or re.match(r"\w+\[[@*]\]", part.text)):
            return values
        first, _, count = rest[1:].partition(":")
        at, many = self.number(first), self.number(count) if count else None
        shift = 1 if name in ("@", "*") else 0
        if any(map(is_mark, values)) or at is None or at < shift or (count and (many is None or many < 0)):
            return [marked(f"${{{part.text}}}", deciders_in("".join(values)) or (name,))]
        return values[at - shift :] if many is None else values[at - shift : at - shift + many]

    def edited(self, value: str, rest: str, part: tree.Part) -> str:
        """``${name%suffix}``, ``${name/old/new}``, ``${name:first:count}``, ``${name^^}``."""
        if MARK in value:
            return marked(f"${{{part.text}}}", deciders_in(value))
        cases = {"^^": str.upper, ",,": str.lower}
        if rest in cases:
            return cases[rest](value)
        found = None
        if rest[0] == ":":
            if re.match(r"\w+\[[@*]\]|[@*]", part.text):
                return value
            first, _, count = rest[1:].partition(":")
            at, many = self.number(first), self.number(count) if count else None
            if at is not None and at >= -len(value) and not (count and (many is None or many < 0)):
                at = at if at >= 0 else len(value) + at
                found = value[at:] if many is None else value[at : at + many]
        elif mark := re.match(r"##?|%%?", rest):
            word = syntax.parsed_word(rest[mark.end() :], self.source, quoted=False)
            found = _trimmed(value, mark[0], self.pattern(word))
        elif rest[0] == "/":
            found = self.replaced(value, rest)
        return marked(f"${{{part.text}}}") if found is None else found

    def replaced(self, value: str, rest: str) -> str | None:
        """``${name/old/new}``, where the old is plain text."""
        everywhere = rest.startswith("//")
        old, _, new = rest[2 if everywhere else 1 :].partition("/")
        if not old or old[0] in "#%" or re.search(r"[*?\[\]\\'\"$`]", old) or re.search(r"[\\'\"&]", new):
            return None
        text = "".join(self.expanded(syntax.parsed_word(new, self.source, quoted=True), split=False))
        return value.replace(old, text) if everywhere else value.replace(old, text, 1)

    def default(self, found: _Fields, rest: str, part: tree.Part, split: bool) -> None:
        """The word after ``:-`` and the like."""
        self.level += 1
        if self.level > 2 * syntax.MAX_LEVEL:
            raise _too_much(self.source, "nests its expansions too deeply")
        operator = re.match(r":?[-=+?]", rest)
        assert operator is not None
        word = syntax.parsed_word(rest[operator.end() :], self.source, part.quoted)
        if split and not part.quoted:
            fields = self.unquoted(word)
            for place, one in enumerate(fields):
                found.begun = found.begun and place == 0
                found.add(one)
        else:
            fields = ["".join(self.expanded(word, split=False))]
            found.add(fields[0])
        if operator[0][-1] == "=":
            match = _BRACED.fullmatch(part.text)
            if match and _NAME.fullmatch(match[2]) and match[3] is None:
                self.assign(match[2], " ".join(fields))
        self.level -= 1

    def unquoted(self, word: tree.Word) -> list[str]:
        """The fields of a word whose own blanks split it."""
        pieces = _Fields()
        for part in word:
            if part.kind == "text" and not part.quoted:
                pieces.add_split(part.text)
            else:
                inner = self.expanded((part,), split=True)
                pieces.add_each(inner, split=False)
        return pieces.fields

    def output(self, text: str) -> str:
        """The output of a command, where it is one that can only say one thing."""
        unknown = marked(f"$({text})", self.deciding(re.findall(r"\$\{?(\w+)", text)))
        try:
            node = syntax.parsed(text.replace(MARK, ""), self.source, level=self.level // 2)
        except InvalidInputError:
            return unknown
        only = node.parts[0] if len(node.parts) == 1 and not node.background else None
        if isinstance(only, tree.AndOr) and only.operators == ("&&",):
            first, second = only.parts
            if _says(first, "cd") and _says(second, "pwd") and isinstance(first, tree.Simple):
                return self.printed(first) or unknown
        if isinstance(only, tree.Simple) and not only.assigns and only.words and not re.search(r"[<>]", text):
            return self.printed(only) or unknown
        return unknown

    def printed(self, node: tree.Simple) -> str | None:
        """What ``echo``, ``dirname``, ``basename``, ``seq`` and ``cd X && pwd`` print."""
        with self.apart():
            words = [one for word in node.words for one in self.expanded(word)]
        if not words or any(MARK in word for word in words) or f"fn {words[0]}" in self.state:
            return None
        rest = [word for word in words[1:] if word != "--"]
        match words[0]:
            case "echo" if not any(
                word.startswith("-") or "\\" in word for word in rest[:1]
            ) and "\\" not in "".join(rest):
                return " ".join(rest).rstrip("\n")
            case "dirname" if len(rest) == 1 and rest[0].strip("/"):
                return str(Path(rest[0]).parent)
            case "basename" if len(rest) == 1 and rest[0].strip("/"):
                return Path(rest[0]).name
            case "cd" | "readlink" | "realpath" if rest and self.directory is not None:
                return rest[-1]
            case "seq" if 1 <= len(rest) <= 2 and all(re.fullmatch(r"\d{1,6}", word) for word in rest):
                first, last = (1, int(rest[0])) if len(rest) == 1 else (int(rest[0]), int(rest[1]))
                self.spend(8 * max(last - first, 0))
                return "\n".join(map(str, range(first, last + 1)))
        return None


def _says(node: tree.Node, word: str) -> bool:
    """Whether a command begins with a plain word."""
    return isinstance(node, tree.Simple) and bool(node.words) and [part.text for part in node.words[0]] == [word]


def _trimmed(value: str, mark: str, pattern: list[tuple[str, bool]]) -> str | None:
    """The value without the shortest or longest end that a pattern matches."""
    if len(value) > 2_000:
        return None
    ends = range(len(value) + 1)
    cut_front = mark[0] == "#"
    longest = len(mark) == 2
    for size in reversed(ends) if longest else ends:
        piece = value[:size] if cut_front else value[len(value) - size :]
        truth = matches(piece, pattern)
        if truth is None:
            return None
        if truth:
            return value[size:] if cut_front else value[: len(value) - size]
    return value


def _assigns(node: tree.Node) -> Iterator[tree.Assign]:
    """Assignments anywhere in a command."""
    match node:
        case tree.Simple():
            yield from node.assigns
        case tree.Sequence() | tree.AndOr() | tree.Pipeline():
            for part in node.parts:
                yield from _assigns(part)
        case tree.If():
            for test, body in node.branches:
                yield from _assigns(test)
                yield from _assigns(body)
            if node.otherwise is not None:
                yield from _assigns(node.otherwise)
        case tree.Loop() | tree.For() | tree.Counted() | tree.Group():
            yield from _assigns(node.body)
        case tree.Case():
            for _, body, _ in node.clauses:
                yield from _assigns(body)
        case _:
            return


def _parts(one: tree.Assign) -> Iterator[tree.Part]:
    """The pieces of what is assigned."""
    if one.is_array:
        for word in one.value:
            yield from word  # type: ignore[misc]
    else:
        yield from one.value  # type: ignore[misc]


# Builtins: each takes the reader, the words and the line.


def _exit(reader: _Reader, words: list[str], line: int) -> Truth:
    raise _ExitError


def _return(reader: _Reader, words: list[str], line: int) -> Truth:
    if not reader.frames:
        raise _ExitError
    reader.leave_call({"0": True}.get(words[1], False) if len(words) > 1 and words[1].isdigit() else None)
    return None


def _break(reader: _Reader, words: list[str], line: int) -> Truth:
    levels = int(words[1]) if len(words) > 1 and words[1].isdigit() else 1
    levels = min(max(levels, 1), max(len(reader.loops), 1))
    if reader.loops:
        reader.leave_loops(words[0] == "break", levels, line)
    return None


def _shift(reader: _Reader, words: list[str], line: int) -> Truth:
    count = reader.number(words[1]) if len(words) > 1 else 1
    found = reader.arguments()
    if count is None or any(map(is_mark, found[:count])):
        reader.put("@", [marked("$@ (after shift)", deciders_in("".join(found)) or ("@",))])
        return None
    if count > len(found):
        return False
    reader.put("@", found[count:])
    return True


def _set(reader: _Reader, words: list[str], line: int) -> Truth:
    if "--" in words:
        reader.put("@", words[words.index("--") + 1 :])
    elif len(words) > 1 and not words[1].startswith(("-", "+")):
        reader.put("@", words[1:])
    elif "-a" in words or "allexport" in words:
        reader.put("allexport", True)
    elif "+a" in words:
        reader.put("allexport", _ABSENT)
    return True


def _unset(reader: _Reader, words: list[str], line: int) -> Truth:
    for name in words[1:]:
        if _NAME.fullmatch(name):
            reader.assign(name, None)
        elif not name.startswith("-"):
            base = name.partition("[")[0]
            reader.assign(base, [marked(f"${base} (unset {name})", (base,))])
    return True


def _read(reader: _Reader, words: list[str], line: int) -> Truth:
    """``read``, ``mapfile``, ``getopts``: variables that somebody else fills."""
    names = [word for word in words[1:] if _NAME.fullmatch(word)]
    if words[0] == "getopts":
        names = [*words[2:3], "OPTARG", "OPTIND"]
    for name in names or ["REPLY" if words[0] == "read" else "MAPFILE"]:
        mark = marked(f"${name} ({words[0]})", (name,))
        reader.assign(name, [mark] if words[0] in ("mapfile", "readarray") or "-a" in words else mark)
    reader.seen += names
    return None


def _printf(reader: _Reader, words: list[str], line: int) -> Truth:
    if len(words) > 2 and words[1] == "-v":
        reader.assign(words[2], marked(f"${words[2]} (printf)", (words[2],)))
    return True


def _let(reader: _Reader, words: list[str], line: int) -> Truth:
    found: int | None = None
    for word in words[1:]:
        found = reader.number(word, assign=True)
    return None if found is None else found != 0


def _test(reader: _Reader, words: list[str], line: int) -> Truth:
    inner = words[1:-1] if words[0] == "[" and words[-1] == "]" else words[1:]
    reader.seen += [name for word in inner for name in deciders_in(word)]
    if len(inner) == 2 and inner[0] == "-v":
        return reader.is_set(inner[1])
    return condition(inner)


def _eval(reader: _Reader, words: list[str], line: int) -> Truth:
    return reader.evaluated(" ".join(words[1:]), line)


def _source(reader: _Reader, words: list[str], line: int) -> Truth:
    """A file whose commands are read where it is there."""
    if len(words) < 2:
        return None
    name = words[1]
    text = reader_file(reader, name)
    if text is None:
        if not _ENVIRONMENT_FILES.fullmatch(readable(name)):
            reader.anything_set(f"{readable(name)}, which is not beside the script")
        return True
    reader.spend(len(text))
    node = syntax.parsed(text.replace("\r\n", "\n").replace(MARK, ""), name, level=reader.level // 2)
    return reader.call(node, words[2:] or None)


def reader_file(reader: _Reader, name: str) -> str | None:
    """The text of a sourced file that is beside the script; None: there is none."""
    if reader.directory is None or MARK in name:
        return None
    path = Path(name)
    if not path.is_absolute() and "moved away" in reader.state:
        return None
    if path.is_absolute() and not path.is_relative_to(reader.directory.absolute()):
        return None
    places = [path, reader.directory / path] if path.is_absolute() else [reader.directory / path, path]
    inside = (place for place in places if place.is_file() and _is_beside(place, reader.directory))
    found = next(inside, None)
    return None if found is None else read_text(found)


def _is_beside(place: Path, directory: Path) -> bool:
    """Whether a file is in the script's folder, one above it, or below these."""
    return directory.resolve().parent in place.resolve().parents


_BUILTINS: dict[str, Callable[[_Reader, list[str], int], Truth]] = {
    "exit": _exit,
    "return": _return,
    "break": _break,
    "continue": _break,
    "shift": _shift,
    "set": _set,
    "unset": _unset,
    "read": _read,
    "mapfile": _read,
    "readarray": _read,
    "getopts": _read,
    "printf": _printf,
    "let": _let,
    "[": _test,
    "test": _test,
    "eval": _eval,
    "source": _source,
    ".": _source,
    ":": lambda reader, words, line: True,
    "true": lambda reader, words, line: True,
    "false": lambda reader, words, line: False,
}

__all__ = ["MAX_CHARACTERS", "Command", "how_to_decide", "script_commands"]
