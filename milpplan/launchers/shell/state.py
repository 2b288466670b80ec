"""The state of a shell that a script is read with: variables, ways that it may take, and the effort so far."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from milpplan.errors import InvalidInputError
from milpplan.launchers.shell.conditions import Truth
from milpplan.launchers.shell.marks import deciders_in, marked
from milpplan.launchers.shell.syntax import MAX_LEVEL

MAX_EFFORT = 4_000_000
"""Most characters of words that are made; every command counts as 20, so that loops end."""
NAME = re.compile(r"[A-Za-z_]\w*")

Value = str | list[str] | None
"""Of a variable: text, or an array; None: it is not set, which the script itself has seen to."""

ABSENT = object()
PERHAPS = "perhaps"
"""Of what holds in one of several ways."""


@dataclass(frozen=True, slots=True)
class Command:
    """Holds the words of one command; ``nested`` where it may run and may not."""

    words: tuple[str, ...]
    nested: bool


def too_much(source: str, what: str) -> InvalidInputError:
    """Make the error for a script that is too large or too deep."""
    return InvalidInputError(
        f"{source} {what}.",
        f"Expected a script that makes words of at most {MAX_EFFORT:,} characters in all.",
        "Write the command out, and import that.",
    )


class ExitError(Exception):
    """Leaves the shell."""


class ReturnError(Exception):
    """Leaves a function."""


class LoopError(Exception):
    """Leaves ``levels`` loops, or goes on with the next round of the last of them."""

    def __init__(self, breaks: bool, levels: int) -> None:
        self.breaks, self.levels = breaks, levels


@dataclass(slots=True)
class Frame:
    """Holds what belongs to a call: old values of local variables; what the state was where the call perhaps
    returned, against its start; and how many journals there were at its start."""

    journals: int
    old: dict[str, object] = field(default_factory=dict)
    returned: list[dict[str, object]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fork:
    """Holds a condition around that is not decided: loops and calls around it, and names that would decide it."""

    loops: int
    calls: int
    names: tuple[str, ...]


class Shell:
    """Holds the state of one shell as one mapping, whose changes can be taken back."""

    def __init__(self, source: str, directory: Path | None) -> None:
        self.source, self.directory = source, directory
        self.state: dict[str, object] = {}
        self.journals: list[dict[str, object]] = []
        self.commands: list[Command] = []
        self.frames: list[Frame] = []
        self.maybe = 0
        self.loops: list[bool] = []
        """Loops around, and whether each is decided."""
        self.forks: list[Fork] = []
        self.level = 0
        self.effort = 0
        self.seen: list[str] = []
        """Names that would decide what the test at hand has looked at."""

    # State: variables by name; "@" the arguments; "fn NAME", "exported NAME", "pinned NAME", "missing".

    def put(self, key: str, value: object) -> None:
        """Set a part of the state."""
        if self.journals:
            self.journals[-1].setdefault(key, self.state.get(key, ABSENT))
        if value is ABSENT:
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
                changes[key] = self.state.get(key, ABSENT)
                if old is ABSENT:
                    self.state.pop(key, None)
                else:
                    self.state[key] = old

    @contextmanager
    def deeper(self, what: str) -> Iterator[None]:
        """Count a level of nesting.

        Raises:
            InvalidInputError: there are too many.
        """
        self.level += 1
        if self.level > 2 * MAX_LEVEL:
            raise too_much(self.source, f"nests its {what} too deeply")
        try:
            yield
        finally:
            self.level -= 1

    def spend(self, characters: int) -> None:
        """Count effort."""
        self.effort += characters
        if self.effort > MAX_EFFORT:
            raise too_much(self.source, "runs too many commands, or makes a value that is too long")

    def assign(self, name: str, value: Value) -> None:
        """Set a variable, unless ``readonly`` keeps it."""
        if f"pinned {name}" not in self.state:
            self.put(name, value)
            if "allexport" in self.state:
                self.put(f"exported {name}", self.state["allexport"])

    def variable(self, name: str) -> Value | object:
        """Its value; ``ABSENT`` where the script never set it."""
        return self.state.get(name, ABSENT)

    # Conditions that are not decided.

    def alternatives(self, ways: list[Callable[[], object]], why: str, names: Iterable[str]) -> None:
        """Go several ways, of which one is gone, and keep what they agree on."""
        ends: list[dict[str, object]] = []
        names = tuple(dict.fromkeys(names))
        out: Exception = ExitError()
        for way in ways:
            self.maybe += 1
            self.forks.append(Fork(len(self.loops), len(self.frames), names))
            try:
                with self.apart() as changes:
                    way()
            except (ExitError, ReturnError) as error:
                # After an exit nothing is trained; where a call returned is kept for its end.
                out = error if isinstance(error, ReturnError) else out
                continue
            except LoopError:
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
            values = [changes.get(key, self.state.get(key, ABSENT)) for changes in ends]
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
        raise LoopError(breaks, levels)

    def leave_call(self, status: Truth) -> None:
        """Return from the call at hand; where that is not decided, its end is merged with what is kept here."""
        frame = self.frames[-1]
        forks = [fork for fork in self.forks if fork.calls == len(self.frames)]
        if forks:
            keys = dict.fromkeys(key for journal in self.journals[frame.journals :] for key in journal)
            frame.returned.append({key: self.state.get(key, ABSENT) for key in keys})
            frame.names += [name for fork in forks for name in fork.names]
        raise ReturnError(None if forks else status)

    def undecided(self, line: int, what: str) -> InvalidInputError:
        """The error for a flow that is not known."""
        names = [f"--set {name}=VALUE" for name in dict.fromkeys(self.seen) if NAME.fullmatch(name)]
        if any(not NAME.fullmatch(name) for name in self.seen):
            names.append('--args "..." (the arguments of the script)')
        return InvalidInputError(
            f"{self.source}, line {line}: {what}.",
            "Expected conditions that the file decides.",
            f"Say it with {' and '.join(names[:4])}." if names else "Write the command out, and import that.",
        )

    def make_local(self, name: str) -> None:
        """Let the call at hand give a variable back."""
        if self.frames:
            self.frames[-1].old.setdefault(name, self.state.get(name, ABSENT))

    def as_list(self, name: str, value: Value | object) -> list[str]:
        """A variable as an array."""
        if value is ABSENT:
            return [] if "missing" not in self.state else [self.unset(name)]
        if isinstance(value, list):
            self.spend(len(value) // 4)
            return list(value)
        return [] if value is None else [str(value)]

    def as_text(self, name: str, value: Value | object) -> str:
        """A variable as text."""
        if isinstance(value, list):
            return value[0] if value else ""
        return self.unset(name) if value is ABSENT else "" if value is None else str(value)

    def unset(self, name: str) -> str:
        """The mark for a variable that the script never set."""
        missing = self.state.get("missing")
        return marked(f"${name}" + (f" (perhaps set by {missing})" if missing else ""), (name,))

    def anything_set(self, by: str) -> None:
        """Mark every variable: a file that is not there to be read may have set it."""
        for key, value in list(self.state.items()):
            if NAME.fullmatch(key) and key not in ("missing", "allexport") and f"pinned {key}" not in self.state:
                self.spend(200)
                mark = marked(f"${key} (perhaps set by {by})", (key,))
                self.put(key, [mark] if isinstance(value, list) else mark)
        self.put("missing", by)

    def is_set(self, name: str) -> Truth:
        """Tell whether a variable is set; one that the script never set may come from outside."""
        value = self.variable(name)
        if value is ABSENT or deciders_in(str(value)):
            self.seen.append(name)
            return None
        return value is not None

    def deciding(self, names: Iterable[str]) -> list[str]:
        """Names that would decide variables."""
        return [
            one for name in dict.fromkeys(names) for one in deciders_in(self.as_text(name, self.variable(name)))
        ]

    def arguments(self) -> list[str]:
        """The script's own arguments, or those of the function at hand."""
        found = self.state.get("@")
        if not isinstance(found, list):
            return [marked("$@ (the arguments of the script)", ("@",))]
        self.spend(len(found) // 8)
        return list(found)
