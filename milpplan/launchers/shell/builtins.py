"""Builtin commands that change the shell's state, and the tests ``[ ... ]`` and ``[[ ... ]]``."""

from __future__ import annotations

import re
from collections.abc import Callable

from milpplan.launchers.shell import tree as tree
from milpplan.launchers.shell.conditions import (
    BINARY,
    Truth,
    compared,
    condition,
    found_in,
    joined,
    negated,
    nonempty,
    search_effort,
    unary,
)
from milpplan.launchers.shell.state import ABSENT, NAME, ExitError
from milpplan.launchers.shell.tree import deciders_in, is_mark, marked
from milpplan.launchers.shell.words import Words


class DoubleBrackets:
    """Evaluator of the tokens between ``[[`` and ``]]`` by operator precedence."""

    def __init__(self, words: Words) -> None:
        self.words, self.shell = words, words.shell

    def test(self, tokens: list[tree.Word | str]) -> Truth:
        """Evaluate ``[[ ... ]]``."""
        truth, at = self._or(tokens, 0)
        return truth if at == len(tokens) else None

    def _or(self, tokens: list[tree.Word | str], at: int) -> tuple[Truth, int]:
        return self._joined("||", self._and, tokens, at)

    def _and(self, tokens: list[tree.Word | str], at: int) -> tuple[Truth, int]:
        return self._joined("&&", self._not, tokens, at)

    def _joined(
        self,
        operator: str,
        operand: Callable[[list[tree.Word | str], int], tuple[Truth, int]],
        tokens: list[tree.Word | str],
        at: int,
    ) -> tuple[Truth, int]:
        """Evaluate operands with an operator between them, from a token on."""
        truth, at = operand(tokens, at)
        while at < len(tokens) and tokens[at] == operator:
            right, at = operand(tokens, at + 1)
            truth = joined(operator, truth, right)
        return truth, at

    def _not(self, tokens: list[tree.Word | str], at: int) -> tuple[Truth, int]:
        count = 0
        while at < len(tokens) and tokens[at] == "!":
            count, at = count + 1, at + 1
        if at < len(tokens) and tokens[at] == "(":
            with self.shell.deeper("tests"):
                truth, at = self._or(tokens, at + 1)
            if at >= len(tokens) or tokens[at] != ")":
                return None, len(tokens)
            at += 1
        else:
            truth, at = self._primary(tokens, at)
        return (negated(truth) if count % 2 else truth), at

    def _primary(self, tokens: list[tree.Word | str], at: int) -> tuple[Truth, int]:
        end = at
        while end < len(tokens) and tokens[end] not in ("&&", "||", ")"):
            end += 1
        group = tokens[at:end]
        texts = [
            token if isinstance(token, str) else "".join(self.words.expanded(token, split=False))
            for token in group
        ]
        self.shell.seen += [name for text in texts for name in deciders_in(text)]
        operator = texts[1] if len(group) == 3 else ""
        if len(group) == 1:
            return nonempty(texts[0]), end
        if len(group) == 2:
            return (self.shell.is_set(texts[1]) if texts[0] == "-v" else unary(texts[0], texts[1])), end
        if operator in ("=", "==", "!=") and not isinstance(group[2], str):
            found = self.words.matched(texts[0], group[2])
            return (negated(found) if operator == "!=" else found), end
        if operator == "=~" and not isinstance(group[2], str):
            quoted = any(part.quoted and part.text for part in group[2])
            self.shell.spend(search_effort(texts[0], texts[2]))
            return (None if quoted else found_in(texts[0], texts[2])), end
        if operator in BINARY and operator.startswith("-"):
            left, right = self.words.number(texts[0]), self.words.number(texts[2])
            return (None if None in (left, right) else compared(str(left), operator, str(right))), end
        return None, end


# Builtins: each takes the word expander, the words of the command, and its line.


def _exit(words: Words, given: list[str], line: int) -> Truth:
    raise ExitError


def _return(words: Words, given: list[str], line: int) -> Truth:
    if not words.shell.frames:
        raise ExitError
    words.shell.leave_call({"0": True}.get(given[1], False) if len(given) > 1 and given[1].isdigit() else None)
    return None


def _break(words: Words, given: list[str], line: int) -> Truth:
    levels = int(given[1]) if len(given) > 1 and re.fullmatch("[0-9]{1,9}", given[1]) else 1
    levels = min(max(levels, 1), max(len(words.shell.loops), 1))
    if words.shell.loops:
        words.shell.leave_loops(given[0] == "break", levels, line)
    return None


def _shift(words: Words, given: list[str], line: int) -> Truth:
    count = words.number(given[1]) if len(given) > 1 else 1
    arguments = words.shell.arguments()
    if count is None or any(map(is_mark, arguments[:count])):
        words.shell.put("@", [marked("$@ (after shift)", deciders_in("".join(arguments)) or ("@",))])
        return None
    if count > len(arguments):
        return False
    words.shell.put("@", arguments[count:])
    return True


def _set(words: Words, given: list[str], line: int) -> Truth:
    if "--" in given:
        words.shell.put("@", given[given.index("--") + 1 :])
    elif len(given) > 1 and not given[1].startswith(("-", "+")):
        words.shell.put("@", given[1:])
    elif "-a" in given or "allexport" in given:
        words.shell.put("allexport", True)
    elif "+a" in given:
        words.shell.put("allexport", ABSENT)
    return True


def _unset(words: Words, given: list[str], line: int) -> Truth:
    for name in given[1:]:
        if NAME.fullmatch(name):
            words.shell.assign(name, None)
        elif not name.startswith("-"):
            base = name.partition("[")[0]
            words.shell.assign(base, [marked(f"${base} (unset {name})", (base,))])
    return True


def _read(words: Words, given: list[str], line: int) -> Truth:
    """Set variables from ``read``, ``mapfile`` or ``getopts`` to unknown values."""
    names = [word for word in given[1:] if NAME.fullmatch(word)]
    if given[0] == "getopts":
        names = [*given[2:3], "OPTARG", "OPTIND"]
    for name in names or ["REPLY" if given[0] == "read" else "MAPFILE"]:
        mark = marked(f"${name} ({given[0]})", (name,))
        words.shell.assign(name, [mark] if given[0] in ("mapfile", "readarray") or "-a" in given else mark)
    words.shell.seen += names
    return None


def _printf(words: Words, given: list[str], line: int) -> Truth:
    if len(given) > 2 and given[1] == "-v":
        words.shell.assign(given[2], marked(f"${given[2]} (printf)", (given[2],)))
    return True


def _let(words: Words, given: list[str], line: int) -> Truth:
    number: int | None = None
    for word in given[1:]:
        number = words.number(word, assign=True)
    return None if number is None else number != 0


def _test(words: Words, given: list[str], line: int) -> Truth:
    inner = given[1:-1] if given[0] == "[" and given[-1] == "]" else given[1:]
    words.shell.seen += [name for word in inner for name in deciders_in(word)]
    if len(inner) == 2 and inner[0] == "-v":
        return words.shell.is_set(inner[1])
    return condition(inner)


BUILTINS: dict[str, Callable[[Words, list[str], int], Truth]] = {
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
    ":": lambda words, given, line: True,
    "true": lambda words, given, line: True,
    "false": lambda words, given, line: False,
}
"""Builtins by name; the reader of commands handles ``eval`` and ``source``."""
