"""Syntax tree of a shell script: words, and commands made of words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Part:
    """Piece of a word: characters, or the text of an expansion without its marks."""

    kind: Literal["text", "parameter", "command", "arithmetic", "process"]
    text: str
    quoted: bool


Word = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Assign:
    """Assignment ``name[index]+=value`` or ``name=(elements)``."""

    name: str
    index: str | None
    append: bool
    value: Word | tuple[Word, ...]
    is_array: bool


@dataclass(frozen=True, slots=True)
class Simple:
    """Simple command. ``assigns`` stand before its words, or among the words of ``export`` and similar
    commands."""

    assigns: tuple[Assign, ...]
    words: tuple[Word, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Test:
    """Test ``[[ ... ]]``, with its words and operators in order."""

    tokens: tuple[Word | str, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Arithmetic command ``(( ... ))``."""

    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Commands joined by ``|``."""

    parts: tuple[Node, ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class AndOr:
    """Commands joined by ``&&`` and ``||``. ``operators`` precede all commands but the first."""

    parts: tuple[Node, ...]
    operators: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sequence:
    """Sequence of commands. ``background`` holds the indices of background commands."""

    parts: tuple[Node, ...]
    background: frozenset[int]


@dataclass(frozen=True, slots=True)
class If:
    """Tests with their branches, and the ``else`` branch."""

    branches: tuple[tuple[Sequence, Sequence], ...]
    otherwise: Sequence | None
    line: int
    said: str


@dataclass(frozen=True, slots=True)
class Loop:
    """Loop ``while`` or ``until``."""

    until: bool
    test: Node
    body: Sequence
    line: int


@dataclass(frozen=True, slots=True)
class For:
    """Loop ``for name in words``; without words it iterates over the script's arguments."""

    name: str
    words: tuple[Word, ...] | None
    body: Sequence
    line: int


@dataclass(frozen=True, slots=True)
class Counted:
    """Loop ``for ((start; test; step))``."""

    start: str
    test: str
    step: str
    body: Sequence
    line: int


@dataclass(frozen=True, slots=True)
class Case:
    """Command ``case``: a word, and patterns with their commands."""

    word: Word
    clauses: tuple[tuple[tuple[Word, ...], Sequence, str], ...]
    line: int
    said: str


@dataclass(frozen=True, slots=True)
class Group:
    """Group ``{ ... }`` or ``( ... )``."""

    body: Sequence
    own_shell: bool
    """True for a subshell, ``( ... )``."""


@dataclass(frozen=True, slots=True)
class Function:
    """Definition of a function."""

    name: str
    body: Node


Node = (
    Simple | Test | Arithmetic | Pipeline | AndOr | Sequence | If | Loop | For | Counted | Case | Group | Function
)
