"""Commands of a shell script with their words, expanded as in bash, without running any command.

The reader follows assignments, arrays, expansions, arithmetic, tests, conditions, loops, functions, ``eval``,
``bash -c`` and sourced files. Values that the script does not decide (variables from the environment, its
arguments, output of commands) become marks in every word that they enter. Both branches of an undecided condition
are read; a variable whose value differs between the branches becomes a mark, too. So an unknown value never
vanishes. ``${NAME:-default}`` takes its default, because the file states it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from milpplan.errors import InvalidInputError
from milpplan.launchers.shell import syntax as syntax
from milpplan.launchers.shell import tree as tree
from milpplan.launchers.shell.builtins import BUILTINS, DoubleBrackets
from milpplan.launchers.shell.conditions import Truth, joined, negated
from milpplan.launchers.shell.state import (
    ABSENT,
    NAME,
    PERHAPS,
    Command,
    ExitError,
    Fork,
    Frame,
    LoopError,
    ReturnError,
    Shell,
    Value,
    too_much,
)
from milpplan.launchers.shell.tree import MARK, deciders_in, is_mark, marked, readable
from milpplan.launchers.shell.words import Words
from milpplan.problem import read_text

MAX_ROUNDS = 8
_SUCCEED = frozenset(
    """
    cd mkdir export echo printf pushd popd module ml conda set ulimit trap pip pip3 rm cp mv touch chmod ln sleep
    wait hostname date nvidia-smi tee umask shopt hash alias
    """.split()  # noqa: SIM905
)
"""Programs that are assumed to succeed: a script whose folders cannot be created trains nothing."""
_ENVIRONMENT_FILES = re.compile(
    r"(?:.*/)?(?:activate|\.?bashrc|\.?bash_profile|\.?profile|\.?zshrc|conda\.sh|modules\.sh|lmod\.sh|"
    r"setvars\.sh|init/\w+)|/etc/.*"
)
_ENVIRONMENT_TOOLS = re.compile(r"\b(?:conda|mamba|micromamba|pyenv|spack|direnv|ssh-agent|modulecmd)\b")
"""Files that set up paths and packages but no training arguments."""
_HAS_INDEX = re.compile(r"\[.*\]\+?=", re.DOTALL)
"""Element of an array that names its index."""
_SHELLS = ("bash", "sh", "zsh", "dash")
_PASSING = frozenset({"exec", "command", "builtin", "nohup", "time"})


def script_commands(text: str, source: str = "") -> tuple[Command, ...]:
    """Return the commands of a script, in order.

    Args:
        text: the script.
        source: its path; files that it sources are searched beside it.

    Raises:
        InvalidInputError: the text is outside the grammar, takes too long, or has undecided control flow.
    """
    name = source or "The script"
    reader = _Reader(Shell(name, Path(source).parent if source and Path(source).is_file() else None))
    try:
        reader.sequence(syntax.parsed(text.replace("\r\n", "\n").replace(MARK, ""), name))
    except ExitError:
        pass
    except RecursionError as error:
        raise too_much(name, "nests its commands too deeply") from error
    return tuple(reader.shell.commands)


class _Reader:
    """Interpreter of the commands of one shell."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.words = Words(shell)

    # Commands.

    def sequence(self, node: tree.Sequence) -> Truth:
        """Follow commands one after another and return the status of the last."""
        status: Truth = True
        for index, part in enumerate(node.parts):
            if index in node.background:
                self.own_shell(part)
                status = True
            else:
                status = self.node(part)
        return status

    def own_shell(self, node: tree.Node) -> Truth:
        """Follow a command in a subshell, whose assignments are lost."""
        with self.shell.apart():
            try:
                return self.node(node)
            except (ExitError, ReturnError, LoopError):
                return None

    def node(self, node: tree.Node) -> Truth:
        """Follow a command."""
        self.shell.spend(20)
        with self.shell.deeper("commands"):
            return self._node(node)

    def _node(self, node: tree.Node) -> Truth:
        match node:
            case tree.Simple():
                return self.simple(node)
            case tree.Sequence():
                return self.sequence(node)
            case tree.AndOr():
                return self.and_or(node)
            case tree.Pipeline():
                for part in node.parts[:-1]:
                    self.own_shell(part)
                last = node.parts[-1]
                status = self.node(last) if len(node.parts) == 1 else self.own_shell(last)
                return negated(status) if node.negated else status
            case tree.Group():
                return self.own_shell(node.body) if node.own_shell else self.sequence(node.body)
            case tree.If():
                return self.conditional(node, 0)
            case tree.Case():
                return self.choice(node)
            case tree.Loop():
                return self.loop(node)
            case tree.For():
                return self.over_words(node)
            case tree.Counted():
                return self.counted(node)
            case tree.Function():
                self.shell.put(f"fn {node.name}", node.body)
                return True
            case tree.Test():
                return DoubleBrackets(self.words).test(list(node.tokens))
            case tree.Arithmetic():
                number = self.words.number(node.text, assign=True)
                return None if number is None else number != 0

    def and_or(self, node: tree.AndOr) -> Truth:
        """Follow ``a && b || c``."""
        self.shell.seen = []
        status = self.node(node.parts[0])
        for operator, part in zip(node.operators, node.parts[1:], strict=True):
            if status is None:
                names, results = list(self.shell.seen), list[Truth]()

                def way(part: tree.Node = part, results: list[Truth] = results) -> None:
                    results.append(self.node(part))

                self.shell.alternatives([way, lambda: None], f"set after {operator}, which may be reached", names)
                # If the command on the right exits, the status of the left is known afterwards.
                status = joined(operator, None, results[0]) if results else operator == "||"
                self.shell.seen = names + self.shell.seen
            elif status == (operator == "&&"):
                status = self.node(part)
            else:
                self.passed_over(part)
        return status

    def conditional(self, node: tree.If, at: int) -> Truth:
        """Follow ``if`` from a given branch on."""
        if at == len(node.branches):
            return True if node.otherwise is None else self.sequence(node.otherwise)
        test, body = node.branches[at]
        self.shell.seen = []
        truth = self.sequence(test)
        if truth is None:
            names = tuple(self.shell.seen)
            self.shell.alternatives(
                [lambda: self.sequence(body), lambda: self.conditional(node, at + 1)],
                f"set in line {node.line}: {node.said}",
                names,
            )
            self.shell.seen = list(names)
            return None
        if truth:
            for other_test, other in node.branches[at + 1 :]:
                self.passed_over(other_test)
                self.passed_over(other)
            if node.otherwise is not None:
                self.passed_over(node.otherwise)
            return self.sequence(body)
        self.passed_over(body)
        return self.conditional(node, at + 1)

    def choice(self, node: tree.Case) -> Truth:
        """Follow ``case``: the clauses that may match, up to the first that surely matches."""
        word = "".join(self.words.expanded(node.word, split=False))
        branches: list[Callable[[], object]] = []
        for patterns, body, ending in node.clauses:
            truths = [self.words.matched(word, pattern) for pattern in patterns]
            if ending in (";&", ";;&") and any(truth is not False for truth in truths):
                self.shell.seen = list(deciders_in(word))
                raise self.shell.undecided(node.line, f"{ending} of case is not understood")
            if any(truths):
                branches.append(lambda body=body: self.sequence(body))  # type: ignore[misc]
                break
            if None in truths:
                branches.append(lambda body=body: self.sequence(body))  # type: ignore[misc]
            else:
                self.passed_over(body)
        else:
            branches.append(lambda: None)
        if len(branches) == 1:
            branches[0]()
            return None
        self.shell.alternatives(branches, f"set in line {node.line}: {node.said}", deciders_in(word))
        return None

    def loop(self, node: tree.Loop) -> Truth:
        """Follow ``while`` and ``until``."""
        while True:
            self.shell.seen = []
            truth = self.node(node.test)
            truth = negated(truth) if node.until else truth
            if truth is None:
                names = tuple(self.shell.seen)

                def round_of(names: tuple[str, ...] = names) -> None:
                    self.node(node.test)
                    self.sequence(node.body)

                self.any_rounds(round_of, f"set in the loop of line {node.line}", names)
                return None
            if not truth or not self.round(node.body):
                return True

    def round(self, body: tree.Sequence) -> bool:
        """Follow an iteration that surely runs; False: the loop ends."""
        self.shell.loops.append(True)
        try:
            self.sequence(body)
        except LoopError as out:
            if out.levels > 1:
                raise LoopError(out.breaks, out.levels - 1) from None
            return not out.breaks
        finally:
            self.shell.loops.pop()
        return True

    def any_rounds(self, way: Callable[[], object], why: str, names: tuple[str, ...]) -> None:
        """Follow a loop of unknown length: its changes are unknown at its start and after it."""
        changed: set[str] = set()
        for _ in range(MAX_ROUNDS):
            num_commands = len(self.shell.commands)
            for key in changed:
                self.shell.blur(key, [self.shell.state.get(key, ABSENT)], why, names)
            self.shell.loops.append(False)
            self.shell.forks.append(Fork(len(self.shell.loops), len(self.shell.frames), names))
            try:
                with self.shell.apart() as changes:
                    way()
            except (ExitError, LoopError, ReturnError):
                pass
            finally:
                self.shell.loops.pop()
                self.shell.forks.pop()
            if changes.keys() <= changed:
                return
            changed |= changes.keys()
            del self.shell.commands[num_commands:]
        raise too_much(self.shell.source, "has a loop whose rounds are not told apart")

    def over_words(self, node: tree.For) -> Truth:
        """Follow ``for name in words``."""
        if node.words is None:
            words = self.shell.arguments()
        else:
            words = [field for word in node.words for field in self.words.expanded(word)]
        if any(is_mark(word) for word in words):
            names = tuple(name for word in words for name in deciders_in(word))

            def way() -> None:
                self.shell.assign(node.name, marked(f"${node.name} (any of the words of line {node.line})", names))
                self.sequence(node.body)

            self.any_rounds(way, f"set in the loop of line {node.line}", names)
            return None
        for word in words:
            self.shell.spend(20)
            self.shell.assign(node.name, word)
            if not self.round(node.body):
                break
        return True

    def counted(self, node: tree.Counted) -> Truth:
        """Follow ``for ((start; test; step))``."""
        self.words.number(node.start, assign=True)
        while True:
            self.shell.seen = []
            truth = 1 if not node.test.strip() else self.words.number(node.test, assign=True)
            if truth is None:
                names = tuple(self.shell.seen)

                def way() -> None:
                    self.sequence(node.body)
                    self.words.number(node.step, assign=True)

                self.any_rounds(way, f"set in the loop of line {node.line}", names)
                return None
            self.shell.spend(20)
            if not truth or not self.round(node.body):
                return True
            self.words.number(node.step, assign=True)

    def passed_over(self, node: tree.Node) -> None:
        """Skip a command that is surely not reached; variables that only it sets count as unset."""
        for assign in _assigns(node):
            self.shell.spend(4)
            own = not any(re.search(rf"\b{assign.name}\b", part.text) for part in _parts(assign))
            if own and self.shell.variable(assign.name) is ABSENT and "missing" not in self.shell.state:
                self.shell.assign(assign.name, None)

    # Simple commands.

    def simple(self, node: tree.Simple) -> Truth:
        """Follow assignments, then a builtin, a function or a program."""
        words = [field for word in node.words for field in self.words.expanded(word)]
        declares = bool(words) and words[0] in syntax.DECLARERS
        if words == ["cat"]:
            self.written(node.redirections)
        if words and not declares:
            return self.with_environment(node, words)
        options = "".join(word for word in words[1:] if word.startswith("-"))
        if declares:
            self.declared(words, options, node)
        status: Truth = True
        for assign in node.assigns:
            if declares and words[0] in ("local", "declare", "typeset") and "g" not in options:
                self.shell.make_local(assign.name)
            self.assignment(assign, options)
            if any(part.kind == "command" for part in _parts(assign)):
                status = None
            if (declares and words[0] == "readonly") or "r" in options:
                self.shell.put(f"pinned {assign.name}", True)
            if declares and (words[0] == "export" or "x" in options):
                self.shell.put(f"exported {assign.name}", True)
        return status

    def written(self, redirections: tuple[tree.Redirection, ...]) -> None:
        """Record the file that ``cat`` writes from a here document, with its variables expanded."""
        here = next((part for part in redirections if part.operator in ("<<", "<<-")), None)
        output = next((part.target for part in redirections if part.operator in (">", ">|")), None)
        if here is None or output is None:
            return
        text = "\n".join(here.document)
        if not any(part.quoted for part in here.target):
            # In a here document a double quote is plain text.
            plain = re.sub(r'\\?"', lambda match: '\\"' if match[0] == '"' else r"\\\"", text)
            try:
                word = syntax.parsed_word(plain, self.shell.source, quoted=True)
                text = "".join(self.words.expanded(word, split=False))
            except InvalidInputError:
                text = marked("a here document")
        name = "".join(self.words.expanded(output, split=False))
        self.shell.commands.append(Command(("cat",), (name, text)))

    def declared(self, words: list[str], options: str, node: tree.Simple) -> None:
        """Declare names without values after ``export``, ``local`` and similar commands."""
        for name in words[1:]:
            name, equals, value = name.partition("=")
            if name.startswith("-") or not NAME.fullmatch(name):
                continue
            if words[0] in ("local", "declare", "typeset") and "g" not in options:
                self.shell.make_local(name)
                if self.shell.frames and not equals:
                    self.shell.assign(name, None)
            if equals:
                self.shell.assign(name, value)
            if words[0] == "export" or "x" in options:
                self.shell.put(f"exported {name}", True)
            if words[0] == "readonly" or "r" in options:
                self.shell.put(f"pinned {name}", True)
            if "A" in options or "n" in options:
                self.shell.assign(name, marked(f"${name} (declare {options})", (name,)))

    def assignment(self, assign: tree.Assign, options: str) -> None:
        """Follow ``name=value``."""
        old = self.shell.variable(assign.name)
        if "A" in options or "n" in options or "i" in options:
            texts = [marked(f"${assign.name} (declare {options})", (assign.name,))]
            self.shell.assign(assign.name, texts if assign.is_array else texts[0])
            return
        if assign.is_array:
            elements = [text for word in assign.value for text in self.words.expanded(word)]  # type: ignore[arg-type]
            if any(_HAS_INDEX.match("".join(part.text for part in word)) for word in assign.value):  # type: ignore[union-attr]
                elements = [marked(f"${assign.name} (elements by their places)", (assign.name,))]
            self.shell.assign(
                assign.name, (self.shell.as_list(assign.name, old) if assign.append else []) + elements
            )
            return
        value = "".join(self.words.expanded(assign.value, split=False))  # type: ignore[arg-type]
        if assign.index is not None:
            self.element(assign, old, value)
        elif assign.append and isinstance(old, list):
            self.shell.assign(assign.name, [old[0] + value if old else value, *old[1:]])
        else:
            self.shell.assign(assign.name, (self.shell.as_text(assign.name, old) if assign.append else "") + value)

    def element(self, assign: tree.Assign, old: Value | object, value: str) -> None:
        """Follow ``name[index]=value``."""
        assert assign.index is not None
        values = self.shell.as_list(assign.name, old)
        at = self.words.number(assign.index)
        if at is None or not 0 <= at <= len(values) or any(map(is_mark, values)):
            self.shell.assign(assign.name, [marked(f"${assign.name} (elements by their places)", (assign.name,))])
        elif at == len(values):
            self.shell.assign(assign.name, [*values, value])
        else:
            new = values[at] + value if assign.append else value
            self.shell.assign(assign.name, [*values[:at], new, *values[at + 1 :]])

    def with_environment(self, node: tree.Simple, words: list[str]) -> Truth:
        """Follow a command with its own assignments, which end with it."""
        if not node.assigns:
            return self.command(words, node.line)
        with self.shell.apart() as changes:
            kept = {key: self.shell.state.get(key, ABSENT) for key in (assign.name for assign in node.assigns)}
            for assign in node.assigns:
                self.assignment(assign, "")
                self.shell.put(f"exported {assign.name}", True)
            status = self.command(words, node.line)
        for key, value in changes.items():
            if key not in kept and not key.startswith("exported "):
                self.shell.put(key, value)
        return status

    def command(self, words: list[str], line: int) -> Truth:
        """Follow a builtin, a function or a program, given by its words."""
        self.shell.spend(sum(map(len, words)))
        while words and words[0] in _PASSING:
            if words[0] == "exec" and len(words) > 1:
                self.command(words[1:], line)
                raise ExitError
            words = words[1:]
        if not words:
            return True
        name = words[0]
        body = self.shell.state.get(f"fn {name}", ABSENT)
        if body is None:
            raise self.shell.undecided(line, f"which function {name} is depends on what the script does not say")
        if body is not ABSENT:
            return self.call(body, words[1:])  # type: ignore[arg-type]
        if name == "eval":
            return self.evaluated(" ".join(words[1:]), line)
        if name in ("source", "."):
            return self.sourced(words)
        if name in BUILTINS:
            return BUILTINS[name](self.words, words, line)
        self.shell.commands.append(Command(tuple(words)))
        self.inner_shell(words, line)
        if name in ("cd", "pushd", "popd") and words[-1] not in (".", str(self.shell.directory)):
            self.shell.put("moved away", True)
        if name in _SUCCEED:
            return True
        self.shell.seen += [decider for word in words for decider in deciders_in(word)]
        return None

    def call(self, body: tree.Node, arguments: list[str] | None) -> Truth:
        """Follow a function or a sourced file; without arguments it has its caller's."""
        before = self.shell.state.get("@", ABSENT)
        frame = Frame(len(self.shell.journals))
        self.shell.frames.append(frame)
        loops, self.shell.loops = self.shell.loops, []
        status: Truth = None
        try:
            with self.shell.apart() as changes:
                if arguments is not None:
                    self.shell.put("@", arguments)
                try:
                    status = self.node(body)
                except ReturnError as out:
                    status = out.args[0]
                except ExitError:
                    if not frame.returned:
                        raise
                    changes = {}
        finally:
            self.shell.loops = loops
            self.shell.frames.pop()
        ends = [changes, *frame.returned] if changes or not frame.returned else frame.returned
        self.shell.merge(ends, "set where a call perhaps returns before", tuple(dict.fromkeys(frame.names)))
        for name, old in frame.old.items():
            self.shell.put(name, old)
        if arguments is not None:
            self.shell.put("@", before)
        return None if frame.returned else status

    def inner_shell(self, words: list[str], line: int) -> None:
        """Follow ``bash -c text`` anywhere in a command, in a shell with the exported variables."""
        shell = next((at for at, word in enumerate(words) if word.rsplit("/", 1)[-1] in _SHELLS), len(words))
        at = shell + 1
        while at < len(words) and words[at].startswith(("-", "+")) and not re.fullmatch(r"-[a-z]*c", words[at]):
            at += 2 if words[at] in ("-o", "+o", "-O", "+O") else 1
        if at + 1 >= len(words) or not words[at].startswith("-"):
            return
        text, rest = words[at + 1], words[at + 2 :]
        self.shell.spend(2 * len(self.shell.state))
        with self.shell.apart():
            for key, value in list(self.shell.state.items()):
                if key.startswith("fn "):
                    self.shell.put(key, ABSENT)
                elif (
                    NAME.fullmatch(key)
                    and key not in ("missing", "allexport")
                    and f"pinned {key}" not in self.shell.state
                ):
                    exported = self.shell.state.get(f"exported {key}")
                    if exported == PERHAPS:
                        self.shell.put(key, self.shell.unset(key))
                    elif exported is None or isinstance(value, list):
                        # The variable may still come from the environment.
                        self.shell.put(key, ABSENT)
            self.shell.put("@", rest[1:])
            self.evaluated(text, line, own_shell=True)

    def evaluated(self, text: str, line: int, own_shell: bool = False) -> Truth:
        """Follow a text as a script."""
        if is_mark(text.strip()):
            # The text may be any command: a program to start or assignments.
            self.shell.commands.append(Command((text.strip(),)))
            if not (own_shell or _ENVIRONMENT_TOOLS.search(readable(text))):
                self.shell.anything_set(readable(text.strip()))
            return None
        self.shell.spend(len(text))
        node = syntax.parsed(
            text, f"{self.shell.source}, line {line}, in a text that is run", level=self.shell.level // 2
        )
        return self.own_shell(node) if own_shell else self.node(node)

    def sourced(self, words: list[str]) -> Truth:
        """Follow the commands of a sourced file, where it exists."""
        if len(words) < 2:
            return None
        name = words[1]
        text = self.beside(name)
        if text is None:
            if not _ENVIRONMENT_FILES.fullmatch(readable(name)):
                self.shell.anything_set(f"{readable(name)}, which is not beside the script")
            return True
        self.shell.spend(len(text))
        node = syntax.parsed(text.replace("\r\n", "\n").replace(MARK, ""), name, level=self.shell.level // 2)
        return self.call(node, words[2:] or None)

    def beside(self, name: str) -> str | None:
        """Return the text of a sourced file that lies beside the script; None: it does not exist."""
        if self.shell.directory is None or MARK in name:
            return None
        path = Path(name)
        if not path.is_absolute() and "moved away" in self.shell.state:
            return None
        if path.is_absolute() and not path.is_relative_to(self.shell.directory.absolute()):
            return None
        places = [path, self.shell.directory / path] if path.is_absolute() else [self.shell.directory / path, path]
        inside = (path for path in places if path.is_file() and _is_beside(path, self.shell.directory))
        found = next(inside, None)
        return None if found is None else read_text(found)


def _assigns(node: tree.Node) -> Iterator[tree.Assign]:
    """Iterate over the assignments in a command."""
    match node:
        case tree.Simple():
            yield from node.assigns
        case tree.Sequence() | tree.AndOr() | tree.Pipeline():
            for part in node.parts:
                yield from _assigns(part)
        case tree.If():
            for test, body in node.branches:
                yield from _assigns(test)
                yield from _assigns(body)
            if node.otherwise is not None:
                yield from _assigns(node.otherwise)
        case tree.Loop() | tree.For() | tree.Counted() | tree.Group():
            yield from _assigns(node.body)
        case tree.Case():
            for _, body, _ in node.clauses:
                yield from _assigns(body)
        case _:
            return


def _parts(assign: tree.Assign) -> Iterator[tree.Part]:
    """Iterate over the word pieces of an assignment."""
    if assign.is_array:
        for word in assign.value:
            yield from word  # type: ignore[misc]
    else:
        yield from assign.value  # type: ignore[misc]


def _is_beside(path: Path, directory: Path) -> bool:
    """Test whether a file is in the script's folder, its parent, or below these."""
    return directory.resolve().parent in path.resolve().parents
