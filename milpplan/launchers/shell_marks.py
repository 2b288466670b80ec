"""Marks in words for what only a running shell knows."""

from __future__ import annotations

import re

MARK = "\x00"
_BLANK = "\x02"


def marked(text: str) -> str:
    """A mark for what is not known; blanks in it split no words."""
    return MARK + re.sub(r"\s", _BLANK, text.replace(MARK, "")) + MARK


def unknown_in(word: str) -> tuple[str, ...]:
    """What in a word only the running shell knows."""
    return tuple(part.replace(_BLANK, " ") for part in word.split(MARK)[1::2])
