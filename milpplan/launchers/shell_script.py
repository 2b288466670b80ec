"""The commands of a shell script, with variables put in: as much of bash as launch scripts use; nothing is run.

Words, quotes, comments, continued lines, assignments, arrays, ``${NAME:-default}``, ``$((...))`` and here
documents are read, and an ``if`` whose test the file decides. What only a running shell knows (other variables,
output of commands, variables that are set in other conditions or loops) becomes a mark in the word.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from milpplan.errors import InvalidInputError
from milpplan.launchers.shell_arithmetic import arithmetic
from milpplan.launchers.shell_conditions import Blocks, Branch
from milpplan.launchers.shell_marks import MARK, marked

MAX_CHARACTERS = 1_000_000
MAX_LEVEL = 20
"""Most expansions inside one another."""
OPENING = frozenset({"if", "for", "while", "until", "case", "select"})
CLOSING = frozenset({"fi", "done", "esac"})
TESTS = ("[", "[[", "test")
PASSING = frozenset({"then", "else", "elif", "do", "{", "}", "!", "time", "exec", "eval", "command", "nohup"})

_ASSIGNMENT = re.compile(
    r"(?:(?:export|local|readonly|declare|typeset)[ \t]+(?:-\w+[ \t]+)*)?([A-Za-z_]\w*)(\+?)="
)
_BRACED = re.compile(r"([A-Za-z_]\w*|[0-9])(\[[@*]\])?(?::?[-=](.*))?", re.DOTALL)
_ALL_OF_ARRAY = re.compile(r"\$\{\w+\[@\]\}")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!]")
_REDIRECTION = re.compile(r"&?[0-9]*[<>]{1,3}[&|]?[ \t]*(-?)")


@dataclass(frozen=True, slots=True)
class Command:
    """Words of one command; ``nested`` inside a condition or loop."""

    words: tuple[str, ...]
    nested: bool


def script_commands(text: str) -> tuple[Command, ...]:
    """The commands of a script, in order."""
    reader = _Reader(text.replace("\r\n", "\n").replace(MARK, ""))
    reader.run()
    return tuple(reader.commands)


def _too_much(what: str) -> InvalidInputError:
    return InvalidInputError(
        f"The script {what}.",
        f"Expected values of at most {MAX_CHARACTERS:,} characters.",
        "Write the command out, and import that.",
    )


@dataclass(slots=True)
class _Word:
    """Fields that a word becomes; the last one is open while ``begun``."""

    fields: list[str] = field(default_factory=list)
    begun: bool = False

    def add(self, text: str) -> None:
        """Characters of the field at hand."""
        if not self.begun:
            self.fields.append("")
            self.begun = True
        self.fields[-1] += text
        if len(self.fields[-1]) > MAX_CHARACTERS:
            raise _too_much("makes a value that is too long")

    def add_split(self, text: str) -> None:
        """The value of a variable outside quotes: blanks end fields."""
        if not text:
            return
        if text[0].isspace():
            self.begun = False
        for index, part in enumerate(text.split()):
            self.begun = self.begun and index == 0
            self.add(part)
        if text[-1].isspace():
            self.begun = False

    def add_fields(self, values: list[str]) -> None:
        """All elements of an array, each a field of its own."""
        for index, value in enumerate(values):
            self.begun = self.begun and index == 0
            self.add(value)


@dataclass(slots=True)
class _Reader:
    text: str
    at: int = 0
    level: int = 0
    values: dict[str, list[str]] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    blocks: Blocks = field(default_factory=Blocks)
    joined: str = ""
    """&& or || where it ended the last command."""
    guarded: bool = False
    """Whether that was a test."""

    @property
    def branch(self) -> Branch:
        """Whether the command at hand runs."""
        return max(self.blocks.branch, Branch.MAY_RUN if self.guarded else Branch.RUNS)

    def run(self) -> None:
        """Read to the end."""
        while self.at < len(self.text):
            operator = self.joined
            words = self._command()
            branch = self.branch
            while words and words[0] in PASSING | OPENING | CLOSING:
                self.blocks.keyword(words[0])
                branch, words = self.blocks.branch, words[1:]
            # What follows a test and && may run.
            self.guarded = bool(self.joined and words) and words[0] in TESTS
            if words:
                self.blocks.command(words, operator)
            if words and branch != Branch.DEAD:
                self.commands.append(Command(tuple(words), branch == Branch.MAY_RUN))

    def _command(self) -> list[str]:
        """Words up to the end of the command; assignments before them are made."""
        words: list[str] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif char == "#":
                self.at = self._line_end()
            elif char in "\n;|&()" and not self.text.startswith("&>", self.at):
                two = self.text[self.at : self.at + 2]
                self.joined = two if two in ("&&", "||") else ""
                self.at += len(self.joined) or 1
                return words
            elif redirection := _REDIRECTION.match(self.text, self.at):
                self._redirect(redirection)
            elif self._starts_command(words) and (match := _ASSIGNMENT.match(self.text, self.at)):
                self.at = match.end()
                self._assign(match[1], bool(match[2]))
            else:
                words += self._word().fields
                if words and words[0] in PASSING | OPENING | CLOSING and len(words) == 1:
                    return words
        return words

    def _starts_command(self, words: list[str]) -> bool:
        return not words or words[0] in ("export", "env")

    def _redirect(self, match: re.Match[str]) -> None:
        """Skip where output goes, and a document that is written in the script."""
        operator = match[0].rstrip()
        self.at = match.end()
        target = "" if operator.endswith("<<<") else " ".join(self._word().fields)
        if operator.rstrip("-").endswith("<<") and target:
            end = re.compile(rf"^[ \t]*{re.escape(target)}[ \t]*$", re.MULTILINE).search(
                self.text, self._line_end()
            )
            self.at = end.end() if end else len(self.text)

    def _line_end(self) -> int:
        end = self.text.find("\n", self.at)
        return len(self.text) if end < 0 else end

    def _assign(self, name: str, more: bool) -> None:
        value = self._array() if self.text.startswith("(", self.at) else [" ".join(self._word(split=False).fields)]
        if self.branch == Branch.DEAD:
            return
        if self.branch == Branch.MAY_RUN:
            value = [marked(f"${name} (set in a condition or loop)")]
            self.values[name] = (self.values.get(name, []) if more else []) + value
        elif more and len(self.values.get(name, [])) == 1 and len(value) == 1 and self.text[self.at - 1] != ")":
            self.values[name] = [self.values[name][0] + value[0]]
        else:
            self.values[name] = (self.values.get(name, []) if more else []) + value
        if sum(map(len, self.values[name])) + len(self.values[name]) > MAX_CHARACTERS:
            raise _too_much(f"makes ${name} too long")

    def _array(self) -> list[str]:
        """Elements up to the closing parenthesis."""
        self.at += 1
        found: list[str] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at].isspace():
                self.at += 1
            elif self.text[self.at] == "#":
                self.at = self._line_end()
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            else:
                before = self.at
                found += self._word().fields
                self.at += self.at == before
        self.at += 1
        return found

    def _word(self, split: bool = True) -> _Word:
        """One word; unsplit on the right of an assignment."""
        word = _Word()
        while self.at < len(self.text) and self.text[self.at] not in " \t\n;|&()<>":
            char = self.text[self.at]
            if char == "'":
                end = self.text.find("'", self.at + 1)
                end = len(self.text) if end < 0 else end
                word.add(self.text[self.at + 1 : end])
                self.at = end + 1
            elif char == '"':
                self._quoted(word)
            elif char == "\\":
                if not self.text.startswith("\\\n", self.at):
                    word.add(self.text[self.at + 1 : self.at + 2])
                self.at += 2
            elif char in "$`":
                values, whole = self._expansion()
                if split and not whole:
                    word.add_split(" ".join(values))
                else:
                    word.add(" ".join(values))
            else:
                word.add(char)
                self.at += 1
        return word

    def _quoted(self, word: _Word) -> None:
        """Between double quotes: expansions, but no splitting except of arrays."""
        word.add("")
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != '"':
            char = self.text[self.at]
            if char == "\\" and self.at + 1 < len(self.text):
                following = self.text[self.at + 1]
                word.add("" if following == "\n" else following if following in '"\\$`' else char + following)
                self.at += 2
            elif char in "$`":
                is_array = _ALL_OF_ARRAY.match(self.text, self.at) is not None
                values, _ = self._expansion()
                if is_array and not word.fields[-1]:
                    word.fields.pop()
                    word.begun = False
                    word.add_fields(values)
                else:
                    word.add(" ".join(values))
            else:
                word.add(char)
                self.at += 1
        self.at += 1

    def _expansion(self) -> tuple[list[str], bool]:
        """The value after ``$`` or a backquote, and whether it is a single thing that is not to be split."""
        if self.text[self.at] == "`" or self.text.startswith("$(", self.at):
            return self._substitution()
        if self.text.startswith("${", self.at):
            return self._braced(), False
        match = _NAME.match(self.text, self.at + 1)
        self.at = match.end() if match else self.at + 1
        return (self._value(match[0]) if match else ["$"]), False

    def _value(self, name: str) -> list[str]:
        return self.values.get(name, [marked(f"${name}")])

    def _braced(self) -> list[str]:
        start, level = self.at + 2, 1
        self.at = start
        while self.at < len(self.text) and level:
            level += {"{": 1, "}": -1}.get(self.text[self.at], 0)
            self.at += 1
        inner = self.text[start : self.at - 1]
        match = _BRACED.fullmatch(inner)
        if match is None:
            return [marked(f"${{{inner}}}")]
        value = self.values.get(match[1])
        if (value is None or value == [""]) and match[3] is not None:
            if self.level == MAX_LEVEL:
                raise _too_much("nests its expansions too deeply")
            nested = _Reader(match[3], values=self.values, level=self.level + 1)
            return nested._default()
        return self._value(match[1]) if value is None else value

    def _default(self) -> list[str]:
        """All of the text as one value."""
        word = _Word()
        while self.at < len(self.text):
            word.add(" ".join(self._word(split=False).fields))
            word.add(self.text[self.at : self.at + 1])
            self.at += 1
        return word.fields or [""]

    def _substitution(self) -> tuple[list[str], bool]:
        """The output of a command is not known; the value of an arithmetic expression may be."""
        start = self.at
        if self.text[self.at] == "`":
            end = self.text.find("`", self.at + 1)
            self.at = len(self.text) if end < 0 else end + 1
        else:
            self.at, level = self.at + 2, 1
            while self.at < len(self.text) and level:
                level += {"(": 1, ")": -1}.get(self.text[self.at], 0)
                self.at += 1
        inner = self.text[start : self.at]
        if inner.startswith("$((") and inner.endswith("))"):
            scalars = {name: " ".join(values) for name, values in self.values.items()}
            result = arithmetic(inner[3:-2], scalars)
            if result is not None:
                return [str(result)], True
        return [marked(inner)], True
