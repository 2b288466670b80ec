"""Marks in words for the unknown parts of a script, with the names that would decide them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

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
