"""The tree of a shell script: words, and commands made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a word: characters, or an expansion by its text without its marks."""

    kind: Literal["text", "parameter", "command", "arithmetic", "process"]
    text: str
    quoted: bool


Word = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Assign:
    """``name[index]+=value`` or ``name=(elements)``."""

    name: str
    index: str | None
    append: bool
    value: Word | tuple[Word, ...]
    is_array: bool


@dataclass(frozen=True, slots=True)
class Simple:
    """A command of words; ``assigns`` stand before them, or among the words of ``export`` and the like."""

    assigns: tuple[Assign, ...]
    words: tuple[Word, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Test:
    """``[[ ... ]]``: words and operators in turn."""

    tokens: tuple[Word | str, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """``(( ... ))``."""

    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Commands joined by ``|``."""

    parts: tuple[Node, ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class AndOr:
    """Commands joined by ``&&`` and ``||``; ``operators`` stand before all but the first."""

    parts: tuple[Node, ...]
    operators: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sequence:
    """Commands one after another; those in ``background`` by their places."""

    parts: tuple[Node, ...]
    background: frozenset[int]


@dataclass(frozen=True, slots=True)
class If:
    """Tests with what follows each, and what is done otherwise."""

    branches: tuple[tuple[Sequence, Sequence], ...]
    otherwise: Sequence | None
    line: int
    said: str


@dataclass(frozen=True, slots=True)
class Loop:
    """``while``, or ``until``."""

    until: bool
    test: Node
    body: Sequence
    line: int


@dataclass(frozen=True, slots=True)
class For:
    """``for name in words``; without words over the script's own arguments."""

    name: str
    words: tuple[Word, ...] | None
    body: Sequence
    line: int


@dataclass(frozen=True, slots=True)
class Counted:
    """``for ((start; test; step))``."""

    start: str
    test: str
    step: str
    body: Sequence
    line: int


@dataclass(frozen=True, slots=True)
class Case:
    """A word, and patterns with what is done at a match."""

    word: Word
    clauses: tuple[tuple[tuple[Word, ...], Sequence, str], ...]
    line: int
    said: str


@dataclass(frozen=True, slots=True)
class Group:
    """``{ ... }``, or ``( ... )`` in a shell of its own."""

    body: Sequence
    own_shell: bool


@dataclass(frozen=True, slots=True)
class Function:
    """A definition."""

    name: str
    body: Node


Node = (
    Simple | Test | Arithmetic | Pipeline | AndOr | Sequence | If | Loop | For | Counted | Case | Group | Function
)
