"""Integer arithmetic of the shell, such as ``$((NODES * GPUS))`` and ``(( i < 4 ))``, with its assignments."""

from __future__ import annotations

import re
from collections.abc import Callable

_TOKEN = re.compile(
    r"\s*(?:(\d+)|([A-Za-z_]\w*)|(\*\*|<<=|>>=|<<|>>|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|[-+*/%<>=!~&|^?:(),]))"
)
_BINARY = (
    ("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", ">", "<=", ">="), ("<<", ">>"), ("+", "-"),
    ("*", "/", "%"),
)  # fmt: skip
"""Binary operators, loosest first."""
_ASSIGNING = ("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=")
_MAX_TOKENS, _MAX_DEPTH, _MAX_DIGITS = 2_000, 12, 22
_WORD = 2**64


class NotKnownError(Exception):
    """Signal that a part of an expression is unknown or outside the grammar."""


def arithmetic(text: str, value: Callable[[str], str | None], assign: Callable[[str, str], None]) -> int | None:
    """Evaluate an expression.

    Args:
        text: the expression, after its ``$NAME`` are expanded.
        value: returns the text of a variable; None: unknown.
        assign: sets a variable, after the whole expression is known.

    Returns:
        The value of the expression; None where a part of it is unknown.
    """
    reader = _Reader(_tokens(text.strip()), value)
    try:
        result = reader.whole()
    except (NotKnownError, ZeroDivisionError, RecursionError):
        return None
    for name, number in reader.assigned.items():
        assign(name, str(number))
    return result


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or match.end() == at or len(tokens) > _MAX_TOKENS:
            return ["?"] if text[at:].strip() else tokens
        if match[1] and len(match[1]) > _MAX_DIGITS:
            tokens.append("?")
        elif match[1] and match[1].startswith("0") and len(match[1]) > 1:
            # Octal numbers. In 16#ff and 0xff a token remains that no rule consumes.
            tokens.append(str(int(match[1], 8)) if set(match[1]) <= set("01234567") else "?")
        else:
            tokens.append(match[0].strip())
        at = match.end()
    return tokens


def _wrapped(number: int) -> int:
    """Wrap a number to a signed 64-bit integer."""
    number %= _WORD
    return number - _WORD if number >= _WORD // 2 else number


class _Reader:
    """Operator-precedence evaluator. Operands that ``?`` or ``&&`` skip are parsed but not evaluated."""

    def __init__(self, tokens: list[str], value: Callable[[str], str | None], depth: int = 0) -> None:
        self.tokens, self.value, self.at, self.depth = tokens, value, 0, depth
        self.assigned: dict[str, int] = {}
        self.idle = 0

    def whole(self) -> int:
        if not self.tokens:
            return 0
        result = self.comma()
        if self.at < len(self.tokens):
            raise NotKnownError
        return result

    def take(self, *wanted: str) -> str:
        if self.at < len(self.tokens) and self.tokens[self.at] in wanted:
            self.at += 1
            return self.tokens[self.at - 1]
        return ""

    def comma(self) -> int:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise NotKnownError
        result = self.assignment()
        while self.take(","):
            result = self.assignment()
        self.depth -= 1
        return result

    def assignment(self) -> int:
        name = self.tokens[self.at] if self.at < len(self.tokens) else ""
        if self.at + 1 < len(self.tokens) and name.isidentifier() and self.tokens[self.at + 1] in _ASSIGNING:
            operator = self.tokens[self.at + 1]
            self.at += 2
            right = self.assignment()
            left = self.named(name) if len(operator) > 1 else 0
            result = right if operator == "=" else self.both(operator[:-1], left, right)
            if not self.idle:
                self.assigned[name] = result
            return result
        return self.choice()

    def choice(self) -> int:
        test = self.binary(0)
        if not self.take("?"):
            return test
        self.idle += test == 0
        yes = self.comma()
        self.idle -= test == 0
        if not self.take(":"):
            raise NotKnownError
        self.idle += test != 0
        no = self.choice()
        self.idle -= test != 0
        return yes if test else no

    def binary(self, rank: int) -> int:
        if rank == len(_BINARY):
            return self.power()
        left = self.binary(rank + 1)
        while operator := self.take(*_BINARY[rank]):
            skips = (operator == "&&" and left == 0) or (operator == "||" and left != 0)
            self.idle += skips
            right = self.binary(rank + 1)
            self.idle -= skips
            left = self.both(operator, left, right)
        return left

    def both(self, operator: str, left: int, right: int) -> int:
        if self.idle:
            return 0
        if operator in ("/", "%"):
            quotient = abs(left) // abs(right)
            quotient = quotient if (left < 0) == (right < 0) else -quotient
            return quotient if operator == "/" else left - right * quotient
        if operator in ("<<", ">>") and not 0 <= right < 64:
            raise NotKnownError
        results: dict[str, Callable[[], int]] = {
            "||": lambda: int(left != 0 or right != 0),
            "&&": lambda: int(left != 0 and right != 0),
            "|": lambda: left | right,
            "^": lambda: left ^ right,
            "&": lambda: left & right,
            "==": lambda: int(left == right),
            "!=": lambda: int(left != right),
            "<": lambda: int(left < right),
            ">": lambda: int(left > right),
            "<=": lambda: int(left <= right),
            ">=": lambda: int(left >= right),
            "<<": lambda: left << right,
            ">>": lambda: left >> right,
            "+": lambda: left + right,
            "-": lambda: left - right,
            "*": lambda: left * right,
        }
        return _wrapped(results[operator]())

    def power(self) -> int:
        base = self.unary()
        if not self.take("**"):
            return base
        exponent = self.power()
        if self.idle:
            return 0
        if not 0 <= exponent < 64:
            raise NotKnownError
        return _wrapped(base**exponent)

    def unary(self) -> int:
        signs = []
        while operator := self.take("-", "+", "!", "~"):
            signs.append(operator)
        steps = self.take("++", "--")
        result = self.stepped(steps, before=True) if steps else self.primary()
        for sign in reversed(signs):
            result = {"-": -result, "+": result, "!": int(result == 0), "~": ~result}[sign]
        return result

    def stepped(self, steps: str, before: bool, name: str = "") -> int:
        if before:
            name = self.tokens[self.at] if self.at < len(self.tokens) else ""
            self.at += 1
        if not name.isidentifier():
            raise NotKnownError
        old = self.named(name)
        new = _wrapped(old + (1 if steps == "++" else -1))
        if not self.idle:
            self.assigned[name] = new
        return new if before else old

    def primary(self) -> int:
        if self.take("("):
            result = self.comma()
            if not self.take(")"):
                raise NotKnownError
            return result
        token = self.tokens[self.at] if self.at < len(self.tokens) else ""
        self.at += 1
        if token.isdigit():
            if int(token) >= _WORD // 2:
                raise NotKnownError
            return int(token)
        if token.isidentifier():
            if steps := self.take("++", "--"):
                return self.stepped(steps, before=False, name=token)
            return self.named(token)
        raise NotKnownError

    def named(self, name: str) -> int:
        """Return a variable's value, which is itself an expression."""
        if self.idle:
            return 0
        if name in self.assigned:
            return self.assigned[name]
        text = self.value(name)
        if text is None or self.depth >= _MAX_DEPTH:
            raise NotKnownError
        inner = _Reader(_tokens(text.strip()), self.value, self.depth + 1)
        result = inner.whole()
        if inner.assigned:
            raise NotKnownError
        return result
