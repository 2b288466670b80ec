"""Syntax tree of a shell script: words, and commands made of words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

MARK = "\x00"
_MARKED = re.compile(f"{MARK}([0-9a-f]*){MARK}")
_SHOWN = 120


def marked(text: str, names: Iterable[str] = ()) -> str:
    """Make a mark that survives splitting and repeated parsing of its word.

    Args:
        text: description of the unknown value, for people.
        names: variables and script arguments (``1``, ``@``) whose values would decide it.
    """
    plain = " ".join(readable(text).split())
    plain = plain if len(plain) <= _SHOWN else plain[:_SHOWN] + "..."
    return MARK + json.dumps([plain, sorted(set(names))[:8]]).encode().hex() + MARK


def unknown_in(word: str) -> tuple[str, ...]:
    """List the descriptions of a word's unknown parts."""
    return tuple(text for text, _ in _marks(word))


def deciders_in(word: str) -> tuple[str, ...]:
    """List the variables and script arguments that would decide a word."""
    return tuple(dict.fromkeys(name for _, names in _marks(word) for name in names))


def readable(word: str) -> str:
    """Replace the marks of a word by readable text."""
    return _MARKED.sub(lambda match: _decoded(match[1])[0], word).replace(MARK, "")


def is_mark(word: str) -> bool:
    """Test whether a word consists of a single mark; it may then stand for any number of words."""
    return word.count(MARK) >= 2 and not _MARKED.sub("", word)


def how_to_decide(words: Iterable[str]) -> str:
    """Describe, in a sentence, the options that would decide some words."""
    names = list(dict.fromkeys(name for word in words for name in deciders_in(word)))
    sets = [f"--set {name}=VALUE" for name in names if not (name.isdigit() or name in "@#*")]
    options = " and ".join(sets[:4])
    if len(sets) < len(names):
        options += (" and " if options else "") + '--args "..." (the arguments of the script; "" for none)'
    return f"Say it with {options}." if options else "Write its value into the file."


def _marks(word: str) -> list[tuple[str, list[str]]]:
    return [_decoded(match[1]) for match in _MARKED.finditer(word)] if MARK in word else []


def _decoded(text: str) -> tuple[str, list[str]]:
    said, names = json.loads(bytes.fromhex(text))
    return said, names


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
class Redirection:
    """Redirection of a simple command. ``document`` has the lines of a here document, once they are parsed."""

    operator: str
    target: Word
    document: list[str]


@dataclass(frozen=True, slots=True)
class Simple:
    """Simple command. ``assigns`` stand before its words, or among the words of ``export`` and similar
    commands."""

    assigns: tuple[Assign, ...]
    words: tuple[Word, ...]
    line: int
    redirections: tuple[Redirection, ...] = ()


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
