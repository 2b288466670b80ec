"""State of the shell that reads a script: variables, undecided branches, and the effort spent."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from milpplan.errors import InvalidInputError
from milpplan.launchers.shell.conditions import Truth
from milpplan.launchers.shell.syntax import MAX_LEVEL
from milpplan.launchers.shell.tree import deciders_in, marked

MAX_EFFORT = 4_000_000
"""Maximum effort, in characters of expanded words. Every command counts as 20 characters, so that loops end."""
NAME = re.compile(r"[A-Za-z_]\w*")

Value = str | list[str] | None
"""Value of a variable: a text or an array. None: the script itself has unset it."""

ABSENT = object()
PERHAPS = "perhaps"
"""Value of an entry that only some branches set."""


IFS = " \t\n"
"""Characters that split words, where a script sets no others."""


@dataclass(frozen=True, slots=True)
class Command:
    """Command that the script runs, or may run behind an undecided condition.

    ``written``: name and text of a file that ``cat`` writes from a here document.
    """

    words: tuple[str, ...]
    written: tuple[str, str] | None = None


def too_much(source: str, what: str) -> InvalidInputError:
    """Create the error for a script that is too large or too deep."""
    return InvalidInputError(
        f"{source} {what}.",
        f"Expected a script that makes words of at most {MAX_EFFORT:,} characters in all.",
        "Write the command out, and import that.",
    )


class ExitError(Exception):
    """Signal that the shell exits."""


class ReturnError(Exception):
    """Signal that a function returns."""


class LoopError(Exception):
    """Signal that ``levels`` loops end, or that the outermost of them continues with its next iteration."""

    def __init__(self, breaks: bool, levels: int) -> None:
        self.breaks, self.levels = breaks, levels


@dataclass(slots=True)
class Frame:
    """State of a function call.

    It holds the old values of local variables, the states in which the call may have returned (as changes against
    its start), and the number of journals at its start.
    """

    journals: int
    old: dict[str, object] = field(default_factory=dict)
    returned: list[dict[str, object]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fork:
    """Undecided condition round the current command: its depth of loops and calls, and names that would decide
    it."""

    loops: int
    calls: int
    names: tuple[str, ...]


class Shell:
    """State of one shell as one mapping whose changes can be undone."""

    def __init__(self, source: str, directory: Path | None) -> None:
        self.source, self.directory = source, directory
        self.state: dict[str, object] = {}
        self.journals: list[dict[str, object]] = []
        self.commands: list[Command] = []
        self.frames: list[Frame] = []
        self.loops: list[bool] = []
        """Enclosing loops, outermost first: True where the loop is followed round by round."""
        self.forks: list[Fork] = []
        self.level = 0
        self.effort = 0
        self.seen: list[str] = []
        """Names that would decide the conditions evaluated in the current test."""

    # Keys of the state: variables by name; "@" the arguments; "fn NAME", "exported NAME", "pinned NAME",
    # "missing".

    def put(self, key: str, value: object) -> None:
        """Set an entry of the state."""
        if self.journals:
            self.journals[-1].setdefault(key, self.state.get(key, ABSENT))
        if value is ABSENT:
            self.state.pop(key, None)
        else:
            self.state[key] = value

    @contextmanager
    def apart(self) -> Iterator[dict[str, object]]:
        """Undo all changes at the end of the block; the yielded mapping then holds them."""
        changes: dict[str, object] = {}
        self.journals.append({})
        try:
            yield changes
        finally:
            before = self.journals.pop()
            for key, old in before.items():
                changes[key] = self.state.get(key, ABSENT)
                if old is ABSENT:
                    self.state.pop(key, None)
                else:
                    self.state[key] = old

    @contextmanager
    def deeper(self, what: str) -> Iterator[None]:
        """Count a level of nesting.

        Raises:
            InvalidInputError: the script nests too deeply.
        """
        self.level += 1
        if self.level > 2 * MAX_LEVEL:
            raise too_much(self.source, f"nests its {what} too deeply")
        try:
            yield
        finally:
            self.level -= 1

    def spend(self, characters: int) -> None:
        """Add to the effort and refuse a script that needs too much."""
        self.effort += characters
        if self.effort > MAX_EFFORT:
            raise too_much(self.source, "runs too many commands, or makes a value that is too long")

    def assign(self, name: str, value: Value) -> None:
        """Set a variable, unless it is ``readonly``."""
        if f"pinned {name}" not in self.state:
            self.put(name, value)
            if "allexport" in self.state:
                self.put(f"exported {name}", self.state["allexport"])

    def variable(self, name: str) -> Value | object:
        """Return the value of a variable; ``ABSENT`` where the script never set it.

        A shell does not take IFS from its environment.
        """
        return self.state.get(name, IFS if name == "IFS" else ABSENT)

    # Undecided conditions.

    def alternatives(self, branches: list[Callable[[], object]], why: str, names: Iterable[str]) -> None:
        """Follow each alternative from the current state and keep what all of them agree on."""
        ends: list[dict[str, object]] = []
        names = tuple(dict.fromkeys(names))
        out: Exception = ExitError()
        for way in branches:
            self.forks.append(Fork(len(self.loops), len(self.frames), names))
            try:
                with self.apart() as changes:
                    way()
            except (ExitError, ReturnError) as error:
                # After an exit nothing is trained. The state at a return is kept for the end of the call.
                out = error if isinstance(error, ReturnError) else out
                continue
            except LoopError:
                # Only out of loops that are read as a whole: the changes in such loops become unknown.
                pass
            finally:
                self.forks.pop()
            ends.append(changes)
        if not ends:
            raise out
        self.merge(ends, why, names)

    def merge(self, ends: list[dict[str, object]], why: str, names: tuple[str, ...]) -> None:
        """Merge alternative end states, each given by its changes; entries that differ become unknown."""
        for key in dict.fromkeys(key for changes in ends for key in changes):
            values = [changes.get(key, self.state.get(key, ABSENT)) for changes in ends]
            if all(type(value) is type(values[0]) and value == values[0] for value in values):
                self.put(key, values[0])
            else:
                self.blur(key, values, why, names)

    def blur(self, key: str, values: list[object], why: str, names: tuple[str, ...]) -> None:
        """Make an entry of the state unknown."""
        self.spend(200)
        if key == "@":
            self.put(key, [marked(f"$@ ({why})", names or ("@",))])
        elif key.startswith("fn "):
            self.put(key, None)
        elif " " in key or key in ("missing", "allexport"):
            # The name may be exported, missing or moved away.
            self.put(key, next((value for value in values if isinstance(value, str)), PERHAPS))
        else:
            mark = marked(f"${key} ({why})", names or (key,))
            self.put(key, [mark] if any(isinstance(value, list) for value in values) else mark)

    def leave_loops(self, breaks: bool, levels: int, line: int) -> None:
        """Leave loops, as ``break`` and ``continue`` do.

        Raises:
            InvalidInputError: the loops are followed round by round, and a condition round the command is
                undecided.
        """
        left = len(self.loops) - levels
        forks = [fork for fork in self.forks if fork.calls == len(self.frames) and fork.loops > left]
        if forks and any(self.loops[left:]):
            self.seen = [name for fork in forks for name in fork.names]
            raise self.undecided(line, "whether the loop ends here is not decided")
        raise LoopError(breaks, levels)

    def leave_call(self, status: Truth) -> None:
        """Return from the current call. An undecided return is merged with the states kept for the end of the
        call.
        """
        frame = self.frames[-1]
        forks = [fork for fork in self.forks if fork.calls == len(self.frames)]
        if forks:
            keys = dict.fromkeys(key for journal in self.journals[frame.journals :] for key in journal)
            frame.returned.append({key: self.state.get(key, ABSENT) for key in keys})
            frame.names += [name for fork in forks for name in fork.names]
        raise ReturnError(None if forks else status)

    def undecided(self, line: int, what: str) -> InvalidInputError:
        """Create the error for undecided control flow."""
        names = [f"--set {name}=VALUE" for name in dict.fromkeys(self.seen) if NAME.fullmatch(name)]
        if any(not NAME.fullmatch(name) for name in self.seen):
            names.append('--args "..." (the arguments of the script)')
        return InvalidInputError(
            f"{self.source}, line {line}: {what}.",
            "Expected conditions that the file decides.",
            f"Say it with {' and '.join(names[:4])}." if names else "Write the command out, and import that.",
        )

    def make_local(self, name: str) -> None:
        """Restore a variable at the end of the current call."""
        if self.frames:
            self.frames[-1].old.setdefault(name, self.state.get(name, ABSENT))

    def as_list(self, name: str, value: Value | object) -> list[str]:
        """Convert the value of a variable to an array."""
        if value is ABSENT:
            return [] if "missing" not in self.state else [self.unset(name)]
        if isinstance(value, list):
            self.spend(len(value) // 4)
            return list(value)
        return [] if value is None else [str(value)]

    def as_text(self, name: str, value: Value | object) -> str:
        """Convert the value of a variable to a text."""
        if isinstance(value, list):
            return value[0] if value else ""
        return self.unset(name) if value is ABSENT else "" if value is None else str(value)

    def unset(self, name: str) -> str:
        """Return the mark for a variable that the script never set."""
        missing = self.state.get("missing")
        return marked(f"${name}" + (f" (perhaps set by {missing})" if missing else ""), (name,))

    def anything_set(self, by: str) -> None:
        """Mark every variable as unknown: a missing sourced file may have set it."""
        for key, value in list(self.state.items()):
            if NAME.fullmatch(key) and key not in ("missing", "allexport") and f"pinned {key}" not in self.state:
                self.spend(200)
                mark = marked(f"${key} (perhaps set by {by})", (key,))
                self.put(key, [mark] if isinstance(value, list) else mark)
        self.put("missing", by)

    def is_set(self, name: str) -> Truth:
        """Test whether a variable is set; a variable that the script never set may come from the environment."""
        value = self.variable(name)
        if value is ABSENT or deciders_in(str(value)):
            self.seen.append(name)
            return None
        return value is not None

    def deciding(self, names: Iterable[str]) -> list[str]:
        """List the names that would decide some variables."""
        return [
            decider
            for name in dict.fromkeys(names)
            for decider in deciders_in(self.as_text(name, self.variable(name)))
        ]

    def arguments(self) -> list[str]:
        """Return the arguments of the script or of the current function."""
        arguments = self.state.get("@")
        if not isinstance(arguments, list):
            return [marked("$@ (the arguments of the script)", ("@",))]
        self.spend(len(arguments) // 8)
        return list(arguments)
