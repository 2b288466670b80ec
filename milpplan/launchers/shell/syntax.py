"""Parser of shell scripts for the part of bash that launch scripts use; other syntax is refused with its line."""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import NoReturn

from milpplan.errors import InvalidInputError
from milpplan.launchers.shell import tree as tree

MAX_CHARACTERS = 1_000_000
MAX_LEVEL = 40
"""Maximum nesting of commands."""

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]\n]*\])?(\+?)=")
_PLAIN = re.compile(r"[^ \t\n\r\\'\"$`;|&()<>]+")
_REST = {True: re.compile(r'[^"\\$`]+'), False: re.compile(r"[^'\"\\$`]+")}
"""Patterns for runs of ordinary characters in a text that is one word, by whether it is double-quoted."""
_REDIRECTION = re.compile(r"(?:\{\w+\}|[0-9]+)?(?:<<<|<<-?|<>|>\||>>|[<>]&|&>>?|<(?!\()|>(?!\())")
_PARAMETER = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!_-]")
_FUNCTION = re.compile(r"([A-Za-z_][\w.:-]*)[ \t]*\([ \t]*\)")
DECLARERS = frozenset({"export", "local", "readonly", "declare", "typeset"})
_AHEAD = re.compile(r"[^\s;|&()<>\"'$`\\]+(?=[\s;|&()<>]|$)")
_CLOSING = frozenset({"then", "else", "elif", "fi", "do", "done", "esac", "}"})


def parsed(text: str, source: str, level: int = 0) -> tree.Sequence:
    """Parse a script.

    Args:
        text: the script.
        source: its name in messages.
        level: nesting of the enclosing commands.

    Raises:
        InvalidInputError: the text is not a script of this grammar.
    """
    if len(text) > MAX_CHARACTERS:
        raise InvalidInputError(
            f"{source} has {len(text):,} characters.",
            f"Expected a script of at most {MAX_CHARACTERS:,}.",
            "Write the command out, and import that.",
        )
    reader = _Parser(text, source, level=level)
    commands = reader.sequence(())
    if not reader.at_end():
        reader.refuse(f"{reader.word_ahead() or reader.text[reader.at]} stands where a command begins")
    return commands


def parsed_word(text: str, source: str, quoted: bool) -> tree.Word:
    """Parse a whole text as one word, such as the text in ``${NAME:-text}``."""
    reader = _Parser(text, source)
    return reader.rest_as_word(quoted)


@dataclass(slots=True)
class _Parser:
    """Recursive-descent parser of one text."""

    text: str
    source: str
    at: int = 0
    level: int = 0
    lines: list[int] = field(default_factory=list)
    """Positions of line ends, computed at the first request for a line number."""
    documents: list[tree.Redirection] = field(default_factory=list)
    """Here documents that begin after this line."""

    def refuse(self, what: str) -> NoReturn:
        """Raise an error with the current line."""
        raise InvalidInputError(
            f"{self.source}, line {self.line()}: {what}.",
            "Expected a shell script that bash would read.",
            "Write the command out into a file of its own, and import that.",
        )

    def line(self, at: int | None = None) -> int:
        """Return the line number of a position."""
        if not self.lines:
            self.lines = [match.start() for match in re.finditer("\n|$", self.text)]
        return bisect_left(self.lines, self.at if at is None else at) + 1

    def at_end(self) -> bool:
        """Test whether the whole text is parsed."""
        self.skip_lines()
        return self.at >= len(self.text)

    # Blanks, comments and line ends.

    def blanks(self) -> None:
        """Skip blanks, continued lines and a comment."""
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t\r":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif char == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def newline(self) -> None:
        """Skip a line end and the here documents that follow it."""
        self.at += 1
        for opened in self.documents:
            ending = "".join(part.text for part in opened.target)
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end].removesuffix("\r")
                line = line.lstrip("\t") if opened.operator == "<<-" else line
                self.at = min(end + 1, len(self.text))
                if line == ending:
                    break
                opened.document.append(line)
        self.documents.clear()

    def skip_lines(self) -> None:
        """Skip blanks and line ends."""
        self.blanks()
        while self.at < len(self.text) and self.text[self.at] == "\n":
            self.newline()
            self.blanks()

    def word_ahead(self) -> str:
        """Return the plain word at the current position, without consuming it."""
        match = _AHEAD.match(self.text, self.at)
        return match[0] if match else ""

    def expect(self, word: str) -> None:
        """Consume an expected reserved word."""
        self.skip_lines()
        if self.word_ahead() != word:
            self.refuse(f"{word} is missing")
        self.at += len(word)

    # Commands.

    def sequence(self, until: tuple[str, ...]) -> tree.Sequence:
        """Parse commands up to a reserved word, a closing parenthesis or the end."""
        self.level += 1
        if self.level > MAX_LEVEL:
            self.refuse(f"more than {MAX_LEVEL} commands stand inside one another")
        parts: list[tree.Node] = []
        background = set()
        while True:
            self.skip_lines()
            if self.at >= len(self.text) or self.text[self.at] == ")" or self.text.startswith(";;", self.at):
                break
            if self.text.startswith((";&", ";;&"), self.at):
                break
            if self.text[self.at] == ";":
                if not parts:
                    self.refuse("a semicolon follows no command")
                self.at += 1
                continue
            ahead = self.word_ahead()
            if ahead in until or ahead in _CLOSING:
                break
            parts.append(self.and_or())
            self.blanks()
            if self.text.startswith("&", self.at) and not self.text.startswith("&&", self.at):
                background.add(len(parts) - 1)
                self.at += 1
            elif self.at < len(self.text) and self.text[self.at] not in ";\n)":
                self.refuse(f"{self.text[self.at : self.at + 8]!r} follows a command")
        self.level -= 1
        return tree.Sequence(tuple(parts), frozenset(background))

    def and_or(self) -> tree.Node:
        """Parse commands joined by ``&&`` and ``||``."""
        parts = [self.pipeline()]
        operators = []
        self.blanks()
        while (operator := self.text[self.at : self.at + 2]) in ("&&", "||"):
            self.at += 2
            self.skip_lines()
            operators.append(operator)
            parts.append(self.pipeline())
            self.blanks()
        return tree.AndOr(tuple(parts), tuple(operators)) if operators else parts[0]

    def pipeline(self) -> tree.Node:
        """Parse commands joined by ``|``."""
        negated = False
        self.blanks()
        while self.word_ahead() in ("!", "time"):
            negated ^= self.text[self.at] == "!"
            self.at += len(self.word_ahead())
            self.blanks()
            while self.word_ahead() == "-p":
                self.at += 2
                self.blanks()
        parts = [self.command()]
        self.blanks()
        while self.text.startswith("|", self.at) and not self.text.startswith("||", self.at):
            self.at += 2 if self.text.startswith("|&", self.at) else 1
            self.skip_lines()
            parts.append(self.command())
            self.blanks()
        return tree.Pipeline(tuple(parts), negated) if negated or len(parts) > 1 else parts[0]

    def command(self) -> tree.Node:
        """Parse a compound command with its redirections, a function definition, or a simple command."""
        start = self.at
        end = self.closed(self.at + 1, "(", ")") if self.text.startswith("((", self.at) else None
        if end is not None and self.text.startswith("))", end):
            self.at = end + 2
            return self.redirected(tree.Arithmetic(self.text[start + 2 : end], self.line(start)))
        if self.text.startswith("(", self.at):
            self.at += 1
            body = self.sequence(())
            self.close(")")
            return self.redirected(tree.Group(body, True))
        ahead = self.word_ahead()
        if ahead in ("if", "while", "until", "for", "select", "case", "{", "[[", "function"):
            self.at += len(ahead)
            return self.redirected(self.compound(ahead, start))
        if match := _FUNCTION.match(self.text, self.at):
            self.at = match.end()
            return self.definition(match[1])
        if ahead in _CLOSING or ahead in ("in", "coproc"):
            self.refuse(f"{ahead} stands where a command begins")
        return self.simple()

    def redirected(self, node: tree.Node) -> tree.Node:
        """Skip the redirections after a command and return the command."""
        self.blanks()
        while match := _REDIRECTION.match(self.text, self.at):
            self.redirect(match)
            self.blanks()
        return node

    def close(self, mark: str) -> None:
        """Consume an expected mark."""
        self.skip_lines()
        if not self.text.startswith(mark, self.at):
            self.refuse(f"{mark} is missing")
        self.at += len(mark)

    def definition(self, name: str) -> tree.Function:
        """Parse the body of a function."""
        self.skip_lines()
        self.level += 1
        if self.level > MAX_LEVEL:
            self.refuse(f"more than {MAX_LEVEL} commands stand inside one another")
        body = self.command()
        self.level -= 1
        return tree.Function(name, body)

    def compound(self, word: str, start: int) -> tree.Node:
        """Parse a compound command after its opening word."""
        line = self.line(start)
        if word == "[[":
            return self.test(line)
        if word == "{":
            body = self.sequence(("}",))
            self.expect("}")
            return tree.Group(body, False)
        if word == "function":
            self.blanks()
            name = self.word_ahead()
            self.at += len(name)
            self.blanks()
            if self.text.startswith("(", self.at):
                self.at += 1
                self.close(")")
            return self.definition(name)
        if word == "if":
            return self.conditional(start, line)
        if word == "case":
            return self.choice(start, line)
        if word in ("while", "until"):
            test = self.sequence(("do",))
            return tree.Loop(word == "until", test, self.body(), line)
        self.blanks()
        if word == "for" and self.text.startswith("((", self.at):
            return self.counted(line)
        name = self.word_ahead()
        if not _NAME.fullmatch(name):
            self.refuse(f"{word} is followed by no name")
        self.at += len(name)
        self.skip_lines()
        words = None
        if self.word_ahead() == "in":
            self.at += 2
            words = self.words()
        self.blanks()
        if self.text.startswith(";", self.at):
            self.at += 1
        over = () if words is None else words
        if word == "select":
            # The user chooses the element at the keyboard.
            over = ((tree.Part("command", "select", True),),)
        return tree.For(name, None if words is None and word == "for" else over, self.body(), line)

    def counted(self, line: int) -> tree.Counted:
        """Parse ``for ((start; test; step))``."""
        end = self.closed(self.at + 1, "(", ")")
        if end is None or not self.text.startswith("))", end):
            self.refuse("(( is not closed")
        three = self.text[self.at + 2 : end].split(";")
        if len(three) != 3:
            self.refuse("for (( has no three parts")
        self.at = end + 2
        self.blanks()
        if self.text.startswith(";", self.at):
            self.at += 1
        return tree.Counted(three[0], three[1], three[2], self.body(), line)

    def body(self) -> tree.Sequence:
        """Parse ``do ... done``, or a group."""
        self.skip_lines()
        opening, closing = ("{", "}") if self.word_ahead() == "{" else ("do", "done")
        self.expect(opening)
        commands = self.sequence((closing,))
        self.expect(closing)
        return commands

    def conditional(self, start: int, line: int) -> tree.If:
        """Parse ``if ... fi``."""
        branches: list[tuple[tree.Sequence, tree.Sequence]] = []
        said = ""
        while True:
            test = self.sequence(("then",))
            self.expect("then")
            said = said or self.text[start : self.at].split("\n")[0]
            branches.append((test, self.sequence(("elif", "else", "fi"))))
            self.skip_lines()
            word = self.word_ahead()
            if word != "elif":
                break
            self.at += len(word)
        otherwise = None
        if word == "else":
            self.at += len(word)
            otherwise = self.sequence(("fi",))
        self.expect("fi")
        return tree.If(tuple(branches), otherwise, line, said)

    def choice(self, start: int, line: int) -> tree.Case:
        """Parse ``case ... esac``."""
        self.blanks()
        word = self.word()
        said = self.text[start : self.at]
        self.expect("in")
        clauses = []
        while True:
            self.skip_lines()
            if self.word_ahead() == "esac":
                break
            if self.text.startswith("(", self.at):
                self.at += 1
            patterns = []
            while True:
                self.blanks()
                pattern = self.word()
                if not pattern:
                    self.refuse("a pattern of case is missing")
                patterns.append(pattern)
                self.blanks()
                if not self.text.startswith("|", self.at):
                    break
                self.at += 1
            self.close(")")
            body = self.sequence(("esac",))
            self.skip_lines()
            ending = next((mark for mark in (";;&", ";;", ";&") if self.text.startswith(mark, self.at)), "")
            self.at += len(ending)
            clauses.append((tuple(patterns), body, ending))
            self.skip_lines()
            if not ending and self.word_ahead() != "esac":
                self.refuse("esac is missing")
        self.expect("esac")
        return tree.Case(word, tuple(clauses), line, said)

    def test(self, line: int) -> tree.Test:
        """Parse ``[[ ... ]]``."""
        tokens: list[tree.Word | str] = []
        while True:
            self.skip_lines()
            if self.at >= len(self.text):
                self.refuse("]] is missing")
            two = self.text[self.at : self.at + 2]
            if self.word_ahead() == "]]":
                self.at += 2
                return tree.Test(tuple(tokens), line)
            if two in ("&&", "||"):
                tokens.append(two)
                self.at += 2
            elif self.text[self.at] in "()<>" or (self.text[self.at] == "!" and self.word_ahead() == "!"):
                tokens.append(self.text[self.at])
                self.at += 1
            elif self.word_ahead() == "=~":
                self.at += 2
                self.blanks()
                tokens += ["=~", self.regular_expression()]
            else:
                word = self.word()
                if not word:
                    self.refuse(f"{self.text[self.at]} stands in [[ ]]")
                tokens.append(word)

    def regular_expression(self) -> tree.Word:
        """Parse a word in which parentheses and bars belong to a regular expression."""
        parts: list[tree.Part] = []
        level = 0
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in "(|)" or (char in " \t" and level):
                level += {"(": 1, ")": -1}.get(char, 0)
                if level < 0:
                    break
                parts.append(tree.Part("text", char, False))
                self.at += 1
            elif char in " \t\n":
                break
            else:
                before = self.at
                parts += self.word()
                if self.at == before:
                    break
        return tuple(parts)

    def simple(self) -> tree.Simple:
        """Parse assignments, words and redirections up to the end of the command."""
        start = self.at
        assigns: list[tree.Assign] = []
        words: list[tree.Word] = []
        redirections: list[tree.Redirection] = []
        while True:
            self.blanks()
            if self.at >= len(self.text) or self.text[self.at] in "\n;|)":
                break
            if match := _REDIRECTION.match(self.text, self.at):
                redirections.append(self.redirect(match))
                continue
            if self.text[self.at] == "&":
                break
            match = _ASSIGNMENT.match(self.text, self.at)
            if match and (not words or self.declares(words[0])):
                assigns.append(self.assignment(match))
                continue
            before = self.at
            word = self.word()
            if self.at == before:
                self.refuse(f"{self.text[self.at]} stands in a command")
            words.append(word)
        if not words and not assigns and self.at == start:
            self.refuse("a command is missing")
        return tree.Simple(tuple(assigns), tuple(words), self.line(start), tuple(redirections))

    @staticmethod
    def declares(word: tree.Word) -> bool:
        """Test whether a command's first word, such as ``export``, is followed by assignments."""
        return len(word) == 1 and word[0].kind == "text" and word[0].text in DECLARERS

    def assignment(self, match: re.Match[str]) -> tree.Assign:
        """Parse ``name=value`` after its name has been matched."""
        self.at = match.end()
        index = None if match[2] is None else match[2][1:-1]
        if self.text.startswith("(", self.at):
            self.at += 1
            return tree.Assign(match[1], index, bool(match[3]), self.elements(), True)
        return tree.Assign(match[1], index, bool(match[3]), self.word(), False)

    def elements(self) -> tuple[tree.Word, ...]:
        """Parse words up to a closing parenthesis."""
        words: list[tree.Word] = []
        while True:
            self.skip_lines()
            words += self.words()
            if self.at >= len(self.text):
                self.refuse(") is missing")
            if self.text[self.at] == ")":
                self.at += 1
                return tuple(words)
            if self.text[self.at] != "\n":
                self.refuse(f"{self.text[self.at]} stands in an array")

    def words(self) -> tuple[tree.Word, ...]:
        """Parse words up to the end of a line or command."""
        words: list[tree.Word] = []
        self.blanks()
        while word := self.word():
            words.append(word)
            self.blanks()
        return tuple(words)

    def redirect(self, match: re.Match[str]) -> tree.Redirection:
        """Parse a redirection; a here document begins after the line."""
        self.at = match.end()
        operator = match[0].lstrip("0123456789")
        self.blanks()
        target = self.word()
        if not target:
            self.refuse(f"{match[0]} is followed by nothing")
        redirection = tree.Redirection(operator, target, [])
        if operator in ("<<", "<<-"):
            self.documents.append(redirection)
        return redirection

    # Words.

    def word(self) -> tree.Word:
        """Parse a word; it is empty if none begins here."""
        parts: list[tree.Part] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in "<>" and self.text.startswith("(", self.at + 1):
                end = self.closed(self.at + 1, "(", ")")
                if end is None:
                    self.refuse(f"{char}( is not closed")
                parts.append(tree.Part("process", self.text[self.at : end + 1], True))
                self.at = end + 1
            elif char in " \t\n\r;|&()<>":
                if char == "\r" and not self.text.startswith("\n", self.at + 1):
                    parts.append(tree.Part("text", char, False))
                    self.at += 1
                    continue
                if char == "(" and parts and parts[-1].text[-1:] in tuple("@!?*+") and not parts[-1].quoted:
                    self.refuse("a pattern of the form @(...) is not understood")
                break
            elif char == "'":
                parts.append(self.single())
            elif char == '"':
                parts += self.double()
            elif char == "\\":
                if not self.text.startswith("\\\n", self.at):
                    parts.append(tree.Part("text", self.text[self.at + 1 : self.at + 2], True))
                self.at += 2
            elif char in "$`":
                parts += self.expansion(quoted=False)
            else:
                parts.append(self.plain(_PLAIN, False))
        return tuple(parts)

    def rest_as_word(self, quoted: bool) -> tree.Word:
        """Parse the rest of the text as one word. ``quoted``: the text is double-quoted."""
        parts: list[tree.Part] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "'" and not quoted:
                parts.append(self.single())
            elif char == '"':
                parts += self.double()
            elif char == "\\":
                following = self.text[self.at + 1 : self.at + 2]
                kept = char if quoted and following not in '"\\$`}\n' else ""
                parts.append(tree.Part("text", kept + following.replace("\n", ""), True))
                self.at += 2
            elif char in "$`":
                parts += self.expansion(quoted)
            else:
                parts.append(self.plain(_REST[quoted], quoted))
        return tuple(parts)

    def plain(self, pattern: re.Pattern[str], quoted: bool) -> tree.Part:
        """Parse at least one ordinary character."""
        match = pattern.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        return tree.Part("text", match[0], quoted)

    def single(self) -> tree.Part:
        """Parse a single-quoted text."""
        end = self.text.find("'", self.at + 1)
        if end < 0:
            self.refuse("a single quote is not closed")
        part = tree.Part("text", self.text[self.at + 1 : end], True)
        self.at = end + 1
        return part

    def double(self) -> list[tree.Part]:
        """Parse a double-quoted text."""
        start = self.at
        self.at += 1
        parts: list[tree.Part] = []
        while True:
            if self.at >= len(self.text):
                self.at = start
                self.refuse("a double quote is not closed")
            char = self.text[self.at]
            if char == '"':
                self.at += 1
                return parts or [tree.Part("text", "", True)]
            if char == "\\":
                following = self.text[self.at + 1 : self.at + 2]
                plain = "" if following == "\n" else following if following in '"\\$`' else char + following
                parts.append(tree.Part("text", plain, True))
                self.at += 2
            elif char in "$`":
                parts += self.expansion(quoted=True)
            else:
                parts.append(self.plain(_REST[True], True))

    def expansion(self, quoted: bool) -> list[tree.Part]:
        """Parse an expansion that begins with ``$`` or a backquote."""
        text, at = self.text, self.at
        if text[at] == "`":
            end = re.compile(r"(?:[^`\\]|\\.)*`", re.DOTALL).match(text, at + 1)
            if end is None:
                self.refuse("a backquote is not closed")
            self.at = end.end()
            return [tree.Part("command", re.sub(r"\\([`$\\])", r"\1", text[at + 1 : self.at - 1]), quoted)]
        end_at = self.closed(at + 2, "(", ")") if text.startswith("$((", at) else None
        if end_at is not None and text.startswith("))", end_at):
            self.at = end_at + 2
            return [tree.Part("arithmetic", text[at + 3 : end_at], quoted)]
        if text.startswith("$(", at):
            end_at = self.closed(at + 1, "(", ")")
            if end_at is None:
                self.refuse("$( is not closed")
            self.at = end_at + 1
            return [tree.Part("command", text[at + 2 : end_at], quoted)]
        if text.startswith("${", at):
            end_at = self.closed(at + 1, "{", "}", quoted)
            if end_at is None:
                self.refuse("${ is not closed")
            self.at = end_at + 1
            return [tree.Part("parameter", text[at + 2 : end_at], quoted)]
        if text.startswith("$'", at) and not quoted:
            self.at += 1
            return [self.ansi_single()]
        if text.startswith('$"', at) and not quoted:
            self.at += 1
            return self.double()
        match = _PARAMETER.match(text, at + 1)
        self.at = match.end() if match else at + 1
        return [tree.Part("parameter", match[0], quoted) if match else tree.Part("text", "$", True)]

    def ansi_single(self) -> tree.Part:
        """Parse ``$'...'``, single quotes with escapes."""
        match = re.compile(r"'((?:[^'\\]|\\.)*)'", re.DOTALL).match(self.text, self.at)
        if match is None:
            self.refuse("a single quote is not closed")
        simple = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
        if any(escape not in simple for escape in re.findall(r"\\(.)", match[1], re.DOTALL)):
            self.refuse("an escape between $' and ' is not understood")
        self.at = match.end()
        return tree.Part("text", re.sub(r"\\(.)", lambda pair: simple[pair[1]], match[1], flags=re.DOTALL), True)

    def closed(self, at: int, opening: str, closing: str, quoted: bool = False) -> int | None:
        """Find the position of the closing mark, past quotes and expansions; None if it is missing.
        ``quoted``: the text is double-quoted, so that a single quote is an ordinary character."""
        level, text = 0, self.text
        while at < len(text):
            char = text[at]
            if char == "\\":
                at += 1
            elif char == "'" and not quoted:
                end = text.find("'", at + 1)
                if end < 0:
                    return None
                at = end
            elif char == '"':
                end_of = self.double_end(at)
                if end_of is None:
                    return None
                at = end_of
            elif char == "#" and opening == "(" and text[at - 1] in " \t\n;(" and text[at - 1] != "(":
                end = text.find("\n", at)
                at = len(text) if end < 0 else end
                continue
            elif char == opening:
                level += 1
            elif char == closing:
                level -= 1
                if level == 0:
                    return at
            at += 1
        return None

    def double_end(self, at: int) -> int | None:
        """Find the quote that closes the double quote at a position."""
        text = self.text
        at += 1
        while at < len(text):
            char = text[at]
            if char == "\\":
                at += 1
            elif char == '"':
                return at
            elif char == "$" and text[at + 1 : at + 2] in ("(", "{"):
                self.level += 1
                if self.level > MAX_LEVEL:
                    self.refuse(f"more than {MAX_LEVEL} expansions stand inside one another")
                end = self.closed(at + 1, text[at + 1], {"(": ")", "{": "}"}[text[at + 1]], text[at + 1] == "{")
                self.level -= 1
                if end is None:
                    return None
                at = end
            at += 1
        return None
