"""Truth of the tests ``[ ... ]`` and ``[[ ... ]]``: true, false, or unknown (None)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from milpplan.launchers.shell.tree import MARK, is_mark, unknown_in

Truth = bool | None
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
}
BINARY = (*_NUMBERS, "=", "==", "!=", "<", ">", "-nt", "-ot", "-ef", "=~")
_MAX_WORDS = 200
_INTEGER = re.compile(r"\s*[-+]?\d{1,18}\s*")
_CLASSES = {
    "alpha": "A-Za-z",
    "digit": "0-9",
    "alnum": "A-Za-z0-9",
    "space": r"\s",
    "upper": "A-Z",
    "lower": "a-z",
}


def negated(truth: Truth) -> Truth:
    """Negate a truth value."""
    return None if truth is None else not truth


def joined(operator: str, left: Truth, right: Truth) -> Truth:
    """Apply ``&&`` or ``||`` to two truth values."""
    decisive = operator == "||"
    if decisive in (left, right):
        return decisive
    return None if None in (left, right) else not decisive


def condition(words: Sequence[str]) -> Truth:
    """Evaluate the words between ``[`` and ``]`` by their number, as POSIX does."""
    if len(words) > _MAX_WORDS:
        return None
    if "-a" in words[1:-1] or "-o" in words[1:-1]:
        for operator, name in (("-o", "||"), ("-a", "&&")):
            if operator in words[1:-1] and not {"(", ")"} & set(words):
                at = list(words).index(operator, 1)
                return joined(name, condition(words[:at]), condition(words[at + 1 :]))
        return None
    if any(is_mark(word) for word in words) and len(words) != 2:
        # An unknown word may expand to any number of words. Only -z, -n and comparisons accept that, with an
        # unknown result.
        return None
    if not words:
        return False
    if len(words) == 1:
        return nonempty(words[0])
    if words[0] == "!":
        return negated(condition(words[1:]))
    if len(words) == 3 and words[1] in BINARY:
        return compared(words[0], words[1], words[2])
    if len(words) == 2:
        return unary(words[0], words[1])
    return None


def nonempty(word: str) -> Truth:
    """Test whether a word is not empty."""
    if MARK not in word:
        return word != ""
    # A word with characters beside its unknown part is not empty.
    return True if re.sub(f"{MARK}[^{MARK}]*{MARK}", "", word) else None


def unary(operator: str, word: str) -> Truth:
    """Evaluate ``-z word`` and ``-n word``. Tests of files and other operators are unknown."""
    if operator in ("-z", "-n"):
        there = nonempty(word)
        return negated(there) if operator == "-z" else there
    return None


def compared(left: str, operator: str, right: str) -> Truth:
    """Compare two words, as text or as numbers."""
    if unknown_in(left) or unknown_in(right):
        return None
    if operator in _NUMBERS:
        if not (_INTEGER.fullmatch(left) and _INTEGER.fullmatch(right)):
            return None
        return _NUMBERS[operator](int(left), int(right))
    if operator in ("=", "==", "!="):
        return (left == right) == (operator != "!=")
    return None


def matches(text: str, pattern: Sequence[tuple[str, bool]]) -> Truth:
    """Test whether a text matches a pattern.

    Args:
        text: the text.
        pattern: pieces, and whether each was quoted, so that its wildcards are literal.
    """
    if unknown_in(text) or any(MARK in piece for piece, _ in pattern):
        if not any(quoted for _, quoted in pattern) and "".join(piece for piece, _ in pattern) == "*":
            return True
        return None
    matcher = pattern_matcher(pattern)
    return None if matcher is None else matcher.fullmatch(text) is not None


def pattern_matcher(pattern: Sequence[tuple[str, bool]]) -> re.Pattern[str] | None:
    """Compile a shell pattern; None: the pattern is not supported."""
    expression = pattern_expression(pattern)
    try:
        return None if expression is None else re.compile(expression, re.DOTALL)
    except re.error:
        return None


def pattern_expression(pattern: Sequence[tuple[str, bool]]) -> str | None:
    """Convert a shell pattern to a regular expression; None: the pattern is not supported."""
    found, pieces = "", []
    plain = "".join(piece for piece, quoted in pattern if not quoted)
    if re.search(r"[@!?*+]\(", plain):
        return None
    for piece, quoted in pattern:
        if quoted:
            found += re.escape(piece)
            continue
        at = 0
        while at < len(piece):
            char = piece[at]
            if char == "[" and (end := piece.find("]", at + 2)) > 0:
                inner = piece[at + 1 : end]
                if "[" in inner or "\\" in inner:
                    return None
                negation = "^" if inner[0] in "!^" else ""
                found += f"[{negation}{inner[len(negation) :]}]"
                at = end
            elif char == "*":
                pieces.append(found)
                found = ""
            else:
                found += "." if char == "?" else re.escape(char)
            at += 1
    if "[" in plain and not re.search(r"\[[^]]+\]", plain):
        return None
    if not pieces:
        return found
    # Every star but the last matches as little as possible, atomically: the search never backtracks.
    return pieces[0] + "".join(f"(?>.*?{piece})" for piece in pieces[1:]) + ".*" + found


def search_effort(text: str, expression: str) -> int:
    """Estimate the microseconds of a search, where every repeated part may backtrack to every position."""
    return int(min(len(text), 200) ** (1 + min(len(re.findall(r"[*+{]", expression)), 3)) // 1000)


def found_in(text: str, expression: str) -> Truth:
    """Evaluate ``text =~ expression``; None for expressions beyond the simple ones."""
    if unknown_in(text) or unknown_in(expression) or len(expression) > 200 or len(text) > 200:
        return None
    plain = re.sub(r"\[:(\w+):\]", lambda match: _CLASSES.get(match[1], "\\"), expression)
    if (
        "\\" in plain.replace("\\s", "")
        or len(re.findall(r"[*+]|\{", plain)) > 3
        or re.search(r"\(\?|\)[*+{]", plain)
    ):
        return None
    try:
        return re.search(plain.replace("$", r"\Z"), text) is not None
    except re.error:
        return None
