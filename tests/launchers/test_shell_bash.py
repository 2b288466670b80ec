"""Random launch scripts against bash itself: what is decided is what bash does, and what is not never vanishes."""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from milpplan.errors import InvalidInputError
from milpplan.launchers.shell import is_mark, readable, script_commands
from milpplan.launchers.shell.tree import MARK
from tests.amounts import long_but

STUB = '#!/bin/sh\nfor one in "$@"; do printf "%s\\001" "$one" >> "$LOG"; done\nprintf "\\002" >> "$LOG"\n'
"""Programs that write down their arguments."""
OUTSIDE = ("E0", "E1")
"""Variables from outside: nobody says what they are."""


class Scripts:
    """Random scripts. ``V*`` are texts, ``A*`` arrays, ``E*`` come from outside, ``D*`` are never set."""

    def __init__(self, seed: int, arguments: bool) -> None:
        self.random = random.Random(seed)
        self.arguments = arguments
        self.files: dict[str, str] = {}
        self.functions: list[str] = []
        self.counters = 0

    def pick(self, *ways: str) -> str:
        """One of several texts."""
        return self.random.choice(ways)

    def name(self) -> str:
        """A variable of text."""
        return f"V{self.random.randrange(4)}"

    def array(self) -> str:
        """A variable of words."""
        return f"A{self.random.randrange(3)}"

    def word(self) -> str:
        """A word of an assignment or a command."""
        number, name, array = self.random.randrange(12), self.name(), self.array()
        return self.pick(
            str(number), f"w{number}", f'"two {number}"', f"'s $x {number}'", f"${name}", f'"${name}"',
            f'"${{{name}}}z"', f'"${{{array}[@]}}"', f"${{{array}[@]}}", f"${{D{number % 3}:-d{number}}}",
            f'"${{D{number % 3}:-d e}}"', f"$(({number} + 2 * 3))", f"$(( {number} > 5 ? 1 : 0 ))",
            f"${{#{array}[@]}}", f"${self.pick(*OUTSIDE)}", f'"${self.pick(*OUTSIDE)}"', f"--f{number}",
            f"--f{number}=${name}", "pre$E0", f'"$(echo {number} b)"', f"a\\ {number}", '""',
            f"${{{name}:+set}}" if number % 2 else f"${{{name}#w}}", f"${{{array}[0]}}",
            *(("$1", '"${2:-none}"', '"$@"', "$#") if self.arguments or number < 2 else ()),
        )  # fmt: skip

    def test(self) -> str:
        """A condition."""
        name, number = self.name(), self.random.randrange(12)
        outside = self.pick(*OUTSIDE)
        return self.pick(
            f'[ "${name}" = w{number} ]', f'[ -n "${name}" ]', f'[ -z "${outside}" ]', f'[ "${outside}" = full ]',
            f'[[ ${name} == w* ]]', f"[[ ${outside} == f* || -n ${name} ]]", f"[ {number} -gt 5 ]",
            "true", "false",
            f"[[ {number} -lt 6 && -n ${outside} ]]", f"! [ {number} -eq 3 ]", "[ ${D0:-1} -eq 1 ]",
            f"(( {number} > 6 ))", f'[ "${outside}" = 1 ] && [ {number} -gt 4 ]', f"test -d /nowhere{number}",
        )  # fmt: skip

    def block(self, level: int) -> str:
        """Commands."""
        return "\n".join(self.command(level) for _ in range(self.random.randrange(1, 3)))

    def command(self, level: int) -> str:
        """A command."""
        simple: list[Callable[[], str]] = [
            lambda: f"{self.name()}={self.word()}",
            lambda: f"{self.name()}+={self.word()}",
            lambda: f"{self.array()}=({self.word()} {self.word()})",
            lambda: f"{self.array()}+=({self.word()})",
            lambda: f"export {self.name()}={self.word()}",
            lambda: f"{self.test()} && {self.name()}={self.word()}",
            lambda: f"{self.test()} || {self.array()}+=({self.word()})",
            lambda: f": ${{{self.name()}:=w3}}",
            lambda: f"unset {self.name()}",
            lambda: f'set -- {self.word()} "$@"',
            lambda: "shift",
            lambda: f'eval "{self.name()}=w{self.random.randrange(9)}"',
            lambda: f"( {self.name()}={self.word()} )",
            lambda: f"echo x | {self.name()}=lost",
            lambda: f"((N{self.counters} += 2)); {self.name()}=$N{self.counters}",
            self.called,
        ]
        nested: list[Callable[[], str]] = [
            lambda: f"if {self.test()}; then\n{self.block(level - 1)}\nfi",
            lambda: f"if {self.test()}; then\n{self.block(level - 1)}\nelse\n{self.block(level - 1)}\nfi",
            lambda: (
                f"if {self.test()}; then\n{self.block(level - 1)}\nelif {self.test()}; then\n"
                f"{self.block(level - 1)}\nelse\n{self.block(level - 1)}\nfi"
            ),
            lambda: (
                f"case {self.word()} in\nw*|1) {self.block(level - 1)} ;;\n--x*) {self.block(level - 1)} ;;\n"
                f"{self.pick('*', 'full')}) {self.block(level - 1)} ;;\nesac"
            ),
            lambda: (
                f"for {self.name()} in {self.word()} {self.word()}; do\n{self.block(level - 1)}\n"
                f"{self.left()}\n{self.command(0)}\ndone"
            ),
            self.counted,
            lambda: f'while [ -n "$E1" ]; do\n{self.block(level - 1)}\nbreak\ndone',
            self.sourced,
        ]
        return self.random.choice(simple + (nested if level > 0 else []))()

    def left(self) -> str:
        """A way out of a loop, or none."""
        return self.pick("", f"{self.test()} && break", f"{self.test()} && continue")

    def counted(self) -> str:
        """A loop with a counter."""
        self.counters += 1
        i = f"i{self.counters}"
        return self.pick(
            f"{i}=0; while [ ${i} -lt 3 ]; do {i}=$(({i} + 1))\n{self.command(0)}\ndone",
            f"for (({i} = 0; {i} < 2; {i}++)); do {self.array()}+=(--n ${i})\ndone",
        )

    def sourced(self) -> str:
        """A file beside the script."""
        name = f"part{len(self.files)}.sh"
        self.files[name] = ""
        self.files[name] = self.block(1)
        return self.pick(f"source ./{name}", f'. "$(dirname "$0")/{name}"')

    def called(self) -> str:
        """A call of a function."""
        if not self.functions:
            return f"{self.name()}=w1"
        return f"{self.random.choice(self.functions)} {self.word()} {self.word()}"

    def function(self) -> str:
        """A definition."""
        name = f"f{len(self.functions)}"
        body = (
            f"local {self.name()}={self.word()}\n{self.command(1)}\n"
            f'{self.pick("", self.test() + " && return 0", "return 1")}\n{self.name()}=$1\n{self.array()}+=("$2")'
        )
        self.functions.append(name)
        return f"{name}() {{\n{body}\n}}"

    def script(self) -> str:
        """A whole script; the last command trains."""
        start = ["V0=w0", "V1=", "V2='a b'", "V3=1", "A0=(--a 1)", "A1=()", "A2=()"]
        start = [line for line in start if self.random.random() < 0.9]
        parts = [*start, *(self.function() for _ in range(self.random.randrange(2)))]
        parts += [self.command(2) for _ in range(self.random.randrange(1, 7))]
        flags = " ".join(self.word() for _ in range(3))
        train = f'pretrain_gpt.py "${{A0[@]}}" {flags} "$V0" $V1 "${{A1[@]}}" ${{A2[@]}}'
        wrapped = self.pick(
            f"torchrun {train}", f"env X=1 torchrun {train}", "GO=\"torchrun pretrain_gpt.py $V2 $V3\"; eval $GO",
            "export V0 V1; bash -c 'torchrun pretrain_gpt.py --q \"$V0\" $V1'", f"exec torchrun {train}",
            f"if ! torchrun {train}; then exit 1; fi", f"torchrun {train} 2>&1 | cat",
        )  # fmt: skip
        return "\n".join([*parts, wrapped]) + "\n"


def run_by_bash(folder: Path, arguments: list[str], outside: dict[str, str | None]) -> list[tuple[str, ...]]:
    """The arguments of every training command that bash starts."""
    log = folder / "log"
    log.write_bytes(b"")
    given = {name: value for name, value in outside.items() if value is not None}
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "LOG": str(log), **given}
    subprocess.run(
        ["bash", str(folder / "run.sh"), *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        timeout=60,
        check=False,
    )
    runs = log.read_bytes().decode().split("\x02")[:-1]
    return [tuple(one.split("\x01")[:-1]) for one in runs]


def admits(words: tuple[str, ...], run: tuple[str, ...]) -> bool:
    """Whether words, of which marks stand for anything, may be those of a run."""
    expression = ""
    for word in words:
        if is_mark(word):
            expression += "(?:[^\x01]*\x01)*"
            continue
        pieces = re.split(f"{MARK}[^{MARK}]*{MARK}", word)
        # What is not known outside quotes may have blanks, and be several words.
        expression += "(?s:.*)".join(map(re.escape, pieces)) + "\x01"
    return re.fullmatch(expression, "".join(one + "\x01" for one in run), re.DOTALL) is not None


@pytest.mark.parametrize("count", long_but((50,), (50, 4000)))
def test_random_scripts_are_read_as_bash_runs_them(tmp_path: Path, count: int) -> None:
    """Whatever comes from outside, bash starts training with words that the reader's admit; where nothing comes
    from outside they are the same words."""
    stub = tmp_path / "torchrun"
    stub.write_text(STUB)
    stub.chmod(0o755)
    told = decided = refused = 0
    unclear: list[str] = []
    for seed in range(count):
        made = Scripts(seed, arguments=seed % 2 == 0)
        text = made.script()
        arguments = ["one", "t w o"] if made.arguments else []
        for name, part in made.files.items():
            (tmp_path / name).write_text(part)
        (tmp_path / "run.sh").write_text(text)
        known = "set -- one 't w o'; " if arguments else ""
        cases: list[tuple[str | None, str | None]] = [(None, None), ("1", ""), ("full", "--x y"), ("", "w2")]
        if seed % 4 < 2:
            # Somebody says what the script does not: as `--set` does.
            cases = [made.random.choice(cases[1:])]
            known += "".join(f"readonly {name}='{value}'; " for name, value in zip(OUTSIDE, cases[0], strict=True))
        try:
            commands = script_commands(known + text, str(tmp_path / "run.sh"))
        except InvalidInputError as error:
            unclear.append(error.seen)
            refused += 1
            continue
        ours = [command.words for command in commands if "pretrain_gpt.py" in command.words]
        ours = [words[words.index("pretrain_gpt.py") :] for words in ours]
        told += 1
        decided += bool(ours) and not any(MARK in word for words in ours for word in words)
        for values in cases:
            runs = run_by_bash(tmp_path, arguments, dict(zip(OUTSIDE, values, strict=True)))
            for run in runs:
                assert any(admits(words, run) for words in ours), (
                    f"seed {seed}, {values}\n{text}\n{made.files}\nbash: {run}\n"
                    f"read: {[[readable(word) for word in words] for words in ours]}"
                )
    assert all("line" in seen for seen in unclear)
    # The test says nothing of scripts that are all refused, or all marks.
    assert told >= 0.6 * count, refused
    assert decided >= 0.1 * count, decided
