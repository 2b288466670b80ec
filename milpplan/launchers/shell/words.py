"""Expansion of a script's words as in bash, including arithmetic."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from milpplan.errors import InvalidInputError
from milpplan.launchers.shell import syntax as syntax
from milpplan.launchers.shell import tree as tree
from milpplan.launchers.shell.conditions import Truth, matches, nonempty, pattern_matcher
from milpplan.launchers.shell.state import ABSENT, IFS, NAME, Shell, Value
from milpplan.launchers.shell.tree import MARK, deciders_in, is_mark, marked

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


_LONG_TRIM = 2_000
_BRACED = re.compile(r"(!?)([A-Za-z_]\w*|[0-9]+|[@*#?$!_-])(?:\[([^\]]*)\])?(.*)", re.DOTALL)
_LONG_SUM = 4_000
"""Maximum number of characters of an arithmetic expression that is evaluated."""
_BRACES = re.compile(r"\{([^{}]*)\}")


class _Fields:
    """Collector of the fields that a word expands to. The last field is open while ``begun``."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.pieces: list[list[str]] = []
        self.begun = False

    def add(self, text: str) -> None:
        """Append characters to the open field."""
        self.shell.spend(len(text) + 1)
        if not self.begun:
            self.pieces.append([])
            self.begun = True
        self.pieces[-1].append(text)

    def joined(self) -> list[str]:
        """Return the fields."""
        return ["".join(piece) for piece in self.pieces]

    def add_split(self, text: str) -> None:
        """Append the value of an unquoted variable: blanks end fields."""
        if not text:
            return
        if text[0] in " \t\n":
            self.begun = False
        for index, part in enumerate(re.split(r"[ \t\n]+", text.strip(" \t\n"))):
            self.begun = self.begun and index == 0
            if part:
                self.add(part)
        if text[-1] in " \t\n":
            self.begun = False

    def add_each(self, values: list[str], split: bool) -> None:
        """Append all elements of an array as separate fields."""
        for index, value in enumerate(values):
            self.begun = self.begun and index == 0
            if split:
                self.add_split(value)
            else:
                self.add(value)


class Words:
    """Expansion of words with the variables of a shell."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell

    def pattern(self, word: tree.Word) -> list[tuple[str, bool]]:
        """Convert a word to a pattern; unquoted expansions may contain wildcards."""
        return [("".join(self.expanded((part,), split=False)), part.quoted) for part in word]

    def matched(self, text: str, word: tree.Word) -> Truth:
        """Test whether a text matches a word's pattern."""
        self.shell.spend(len(text))
        return matches(text, self.pattern(word))

    def number(self, text: str, assign: bool = False) -> int | None:
        """Evaluate an arithmetic expression; None: its value is unknown. ``assign``: the expression may set
        variables.
        """
        whole = "".join(self.expanded(syntax.parsed_word(text, self.shell.source, quoted=True), split=False))
        set_here: list[tuple[str, str]] = []

        def value(name: str) -> str | None:
            found = self.shell.as_text(name, self.shell.variable(name))
            self.shell.seen += deciders_in(found)
            self.shell.spend(10 * min(len(found), _LONG_SUM))
            return None if MARK in found else found

        self.shell.spend(10 * min(len(whole), _LONG_SUM))
        self.shell.seen += deciders_in(whole)
        result = None if MARK in whole else arithmetic(whole, value, lambda *pair: set_here.append(pair))
        if result is None:
            for name in re.findall(r"([A-Za-z_]\w*)\s*(?:[-+*/%&|^]|<<|>>)?=(?!=)|", whole) if assign else ():
                if name:
                    self.shell.assign(name, marked(f"${name} (set in an expression)", (name, *deciders_in(whole))))
            for pair in re.findall(r"([A-Za-z_]\w*)\s*(?:\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)", whole):
                name = pair[0] or pair[1]
                self.shell.assign(name, marked(f"${name} (set in an expression)", (name,)))
        for name, new in set_here:
            self.shell.assign(name, new)
        return result

    def expanded(self, word: tree.Word, split: bool = True) -> list[str]:
        """Expand a word to its fields; a single field unless ``split``."""
        self.shell.spend(4)
        plain = "".join("x" if part.quoted else part.text for part in word if part.kind == "text")
        if split and any("," in inner or ".." in inner for inner in _BRACES.findall(plain)):
            return [marked("".join(part.text for part in word) + " (braces)")]
        collector = _Fields(self.shell)
        for part in word:
            if part.kind == "text":
                collector.add(part.text) if part.text or part.quoted else None
            elif part.kind == "parameter":
                self.parameter(collector, part, split)
            else:
                if part.kind == "arithmetic":
                    number = self.number(part.text, assign=True)
                    names = NAME.findall(part.text)
                    text = (
                        marked(f"$(({part.text}))", self.shell.deciding(names)) if number is None else str(number)
                    )
                elif part.kind == "command":
                    text = self.output(part.text)
                else:
                    text = marked(part.text)
                collector.add_split(text) if split and not part.quoted else collector.add(text)
        fields = collector.joined()
        if split and any(part.kind == "text" and not part.quoted for part in word):
            fields = [
                re.sub(r"^~(?=/|$)", lambda _: marked("~"), field) if field[:1] == "~" else field
                for field in fields
            ]
        if not split and not fields:
            fields = [""]
        return fields

    def parameter(self, fields: _Fields, part: tree.Part, split: bool) -> None:
        """Expand ``$NAME`` and ``${...}``."""
        match = _BRACED.fullmatch(part.text)
        if match is None:
            fields.add(marked(f"${{{part.text}}}", NAME.findall(part.text)))
            return None
        indirect, name, index, rest = match.groups()
        if name == "#" and (rest or index):
            # ${#NAME}: a length.
            inner = _BRACED.fullmatch(rest)
            fields.add(
                self.length(inner[2], inner[3], part.text)
                if inner and not inner[4]
                else marked(f"${{{part.text}}}")
            )
            return None
        if indirect:
            target = self.shell.as_text(name, self.shell.variable(name))
            if index is not None or rest or not NAME.fullmatch(target):
                fields.add(marked(f"${{{part.text}}}", (name,)))
                return None
            name = target
        many = name == "@" or index == "@"
        star = name == "*" or index == "*"
        values = self.values(name, index)
        if rest:
            values = self.operated(name, values, rest, part)
            if values is None:
                return self.default(fields, rest, part, split)
        values = values or []
        if self.shell.variable("IFS") != IFS and (star or (split and not part.quoted)):
            values = [marked(f"${part.text} (split by IFS)", (name,))] if values else []
        if (many or (star and not part.quoted)) and split:
            fields.add_each(values, split=not part.quoted)
        elif split and not part.quoted:
            fields.add_split(" ".join(values))
        else:
            fields.add(" ".join(values))
        return None

    def values(self, name: str, index: str | None) -> list[str] | None:
        """Return the values of a parameter; None: the script has unset it; a mark: the value is unknown."""
        if name in ("@", "*"):
            return self.shell.arguments()
        if name == "#":
            words = self.shell.arguments()
            return [marked("$#", deciders_in("".join(words)))] if any(map(is_mark, words)) else [str(len(words))]
        if name.isdecimal():
            if name == "0":
                return [self.shell.source if self.shell.directory else marked("$0")]
            words = self.shell.arguments()
            at = int(name[:9]) - 1
            if any(map(is_mark, words[: at + 1])):
                return [marked(f"${name} (an argument of the script)", deciders_in("".join(words)) or ("@",))]
            return [words[at]] if at < len(words) else None
        if not NAME.fullmatch(name):
            return [marked(f"${name}")]
        value = self.shell.variable(name)
        if name == "BASH_SOURCE" and value is ABSENT:
            return self.values("0", None)
        if index is None:
            if isinstance(value, list):
                return value[:1] or None
            return None if value is None else [self.shell.as_text(name, value)]
        if index in ("@", "*"):
            if f"pinned {name}" in self.shell.state and isinstance(value, str):
                # A group given with ``--set`` is a text of several words.
                return value.split()
            if value is ABSENT:
                return [self.shell.unset(name)]
            return self.shell.as_list(name, value)
        return self.indexed(name, value, index)

    def indexed(self, name: str, value: Value | object, index: str) -> list[str] | None:
        """Expand ``${name[index]}``."""
        at = self.number(index)
        values = [self.shell.unset(name)] if value is ABSENT else self.shell.as_list(name, value)
        if at is None or any(map(is_mark, values)):
            names = [decider for text in values for decider in deciders_in(text)] or [name]
            return [marked(f"${name}[{index}]", names)]
        return [values[at]] if -len(values) <= at < len(values) else None

    def length(self, name: str, index: str | None, text: str) -> str:
        """Expand ``${#name}`` and ``${#name[@]}``."""
        values = self.values(name, index)
        names = [decider for value in values or () for decider in deciders_in(value)]
        if any(MARK in value for value in values or ()):
            return marked(f"${{{text}}}", names or (name,))
        many = index in ("@", "*") or name in ("@", "*")
        return str(len(values or ()) if many else len("".join(values or ())))

    def operated(self, name: str, values: list[str] | None, rest: str, part: tree.Part) -> list[str] | None:
        """Apply the operator after the name in ``${...}``; None: the default word replaces the value."""
        operator = re.match(r":?[-=+?]", rest)
        plain = "" if values is None else "".join(values)
        value = self.shell.variable(name) if NAME.fullmatch(name) else values
        absent = value is ABSENT or values is None
        if name.isdigit() and "@" not in self.shell.state and values is not None:
            # A script argument that is not given takes the default that the file states.
            absent = True
        if operator:
            kind = operator[0][-1]
            unknown = MARK in plain and not absent and nonempty(plain) is None
            if "missing" in self.shell.state and value is ABSENT:
                return [self.shell.unset(name)]
            if kind == "?":
                return values
            if kind == "+":
                if value is ABSENT or unknown:
                    return [marked(f"${{{part.text}}}", deciders_in(plain) or (name,))]
                there = not absent and (operator[0][0] != ":" or plain != "")
                return None if there else []
            if unknown and operator[0][0] == ":":
                return [marked(f"${{{part.text}}}", deciders_in(plain) or (name,))]
            if absent or (operator[0][0] == ":" and plain == ""):
                return None
            return values
        if values is None:
            return []
        return [self.edited(element, rest, part) for element in self.sliced(name, values, rest, part)]

    def sliced(self, name: str, values: list[str], rest: str, part: tree.Part) -> list[str]:
        """Expand ``${@:2}``: a slice of the arguments or of an array."""
        if not rest.startswith(":") or not (name in ("@", "*") or re.match(r"\w+\[[@*]\]", part.text)):
            return values
        first, _, count = rest[1:].partition(":")
        at, many = self.number(first), self.number(count) if count else None
        shift = 1 if name in ("@", "*") else 0
        if any(map(is_mark, values)) or at is None or at < shift or (count and (many is None or many < 0)):
            return [marked(f"${{{part.text}}}", deciders_in("".join(values)) or (name,))]
        return values[at - shift :] if many is None else values[at - shift : at - shift + many]

    def edited(self, value: str, rest: str, part: tree.Part) -> str:
        """Expand ``${name%suffix}``, ``${name/old/new}``, ``${name:first:count}`` and ``${name^^}``."""
        if MARK in value:
            return marked(f"${{{part.text}}}", deciders_in(value))
        self.shell.spend(len(value) // 8)
        cases = {"^^": str.upper, ",,": str.lower}
        if rest in cases:
            return cases[rest](value)
        edited = None
        if rest[0] == ":":
            if re.match(r"\w+\[[@*]\]|[@*]", part.text):
                return value
            first, _, count = rest[1:].partition(":")
            at, many = self.number(first), self.number(count) if count else None
            if at is not None and at >= -len(value) and not (count and (many is None or many < 0)):
                at = at if at >= 0 else len(value) + at
                edited = value[at:] if many is None else value[at : at + many]
        elif mark := re.match(r"##?|%%?", rest):
            word = syntax.parsed_word(rest[mark.end() :], self.shell.source, quoted=False)
            self.shell.spend(10 * min(len(value), _LONG_TRIM))
            edited = _trimmed(value, mark[0], self.pattern(word))
        elif rest[0] == "/":
            edited = self.replaced(value, rest)
        return marked(f"${{{part.text}}}") if edited is None else edited

    def replaced(self, value: str, rest: str) -> str | None:
        """Expand ``${name/old/new}`` where ``old`` is plain text."""
        everywhere = rest.startswith("//")
        old, _, new = rest[2 if everywhere else 1 :].partition("/")
        if not old or old[0] in "#%" or re.search(r"[*?\[\]\\'\"$`]", old) or re.search(r"[\\'\"&]", new):
            return None
        text = "".join(self.expanded(syntax.parsed_word(new, self.shell.source, quoted=True), split=False))
        return value.replace(old, text) if everywhere else value.replace(old, text, 1)

    def default(self, found: _Fields, rest: str, part: tree.Part, split: bool) -> None:
        """Expand the word after ``:-`` and similar operators."""
        with self.shell.deeper("expansions"):
            operator = re.match(r":?[-=+?]", rest)
            assert operator is not None
            word = syntax.parsed_word(rest[operator.end() :], self.shell.source, part.quoted)
            if split and not part.quoted:
                fields = self.unquoted(word)
                for index, field in enumerate(fields):
                    found.begun = found.begun and index == 0
                    found.add(field)
            else:
                fields = ["".join(self.expanded(word, split=False))]
                found.add(fields[0])
            if operator[0][-1] == "=":
                match = _BRACED.fullmatch(part.text)
                if match and NAME.fullmatch(match[2]) and match[3] is None:
                    self.shell.assign(match[2], " ".join(fields))

    def unquoted(self, word: tree.Word) -> list[str]:
        """Expand an unquoted word and split it at its own blanks."""
        pieces = _Fields(self.shell)
        for part in word:
            if part.kind == "text" and not part.quoted:
                pieces.add_split(part.text)
            else:
                inner = self.expanded((part,), split=True)
                pieces.add_each(inner, split=False)
        return pieces.joined()

    def output(self, text: str) -> str:
        """Return the output of a command substitution, where it is known."""
        unknown = marked(f"$({text})", self.shell.deciding(re.findall(r"\$\{?(\w+)", text)))
        try:
            node = syntax.parsed(text.replace(MARK, ""), self.shell.source, level=self.shell.level // 2)
        except InvalidInputError:
            return unknown
        only = node.parts[0] if len(node.parts) == 1 and not node.background else None
        if isinstance(only, tree.AndOr) and only.operators == ("&&",):
            first, second = only.parts
            if _says(first, "cd") and _says(second, "pwd") and isinstance(first, tree.Simple):
                return self.printed(first) or unknown
        if isinstance(only, tree.Simple) and not only.assigns and only.words and not re.search(r"[<>]", text):
            return self.printed(only) or unknown
        return unknown

    def printed(self, node: tree.Simple) -> str | None:
        """Return the output of ``echo``, ``dirname``, ``basename``, ``seq`` and ``cd X && pwd``."""
        with self.shell.apart():
            words = [field for word in node.words for field in self.expanded(word)]
        if not words or any(MARK in word for word in words) or f"fn {words[0]}" in self.shell.state:
            return None
        rest = [word for word in words[1:] if word != "--"]
        match words[0]:
            case "echo" if not any(
                word.startswith("-") or "\\" in word for word in rest[:1]
            ) and "\\" not in "".join(rest):
                return " ".join(rest).rstrip("\n")
            case "dirname" if len(rest) == 1 and rest[0].strip("/"):
                return str(Path(rest[0]).parent)
            case "basename" if len(rest) == 1 and rest[0].strip("/"):
                return Path(rest[0]).name
            case "cd" | "readlink" | "realpath" if rest and self.shell.directory is not None:
                return rest[-1]
            case "seq" if 1 <= len(rest) <= 2 and all(re.fullmatch(r"\d{1,6}", word) for word in rest):
                first, last = (1, int(rest[0])) if len(rest) == 1 else (int(rest[0]), int(rest[1]))
                self.shell.spend(8 * max(last - first, 0))
                return "\n".join(map(str, range(first, last + 1)))
        return None


def _says(node: tree.Node, word: str) -> bool:
    """Test whether a command begins with a given plain word."""
    return isinstance(node, tree.Simple) and bool(node.words) and [part.text for part in node.words[0]] == [word]


def _trimmed(value: str, mark: str, pattern: list[tuple[str, bool]]) -> str | None:
    """Strip the shortest or longest match of a pattern from one end of a value."""
    decided = len(value) <= _LONG_TRIM and not any(MARK in piece for piece, _ in pattern)
    matcher = pattern_matcher(pattern) if decided else None
    if matcher is None:
        return None
    ends = range(len(value) + 1)
    cut_front = mark[0] == "#"
    longest = len(mark) == 2
    for size in reversed(ends) if longest else ends:
        piece = value[:size] if cut_front else value[len(value) - size :]
        if matcher.fullmatch(piece):
            return value[size:] if cut_front else value[: len(value) - size]
    return value
