"""Launch scripts are read as bash reads them, and nothing is run; what only a running shell knows is marked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milpplan.errors import InvalidInputError
from milpplan.launchers.shell import script_commands, unknown_in
from milpplan.launchers.shell.tree import deciders_in
from tests.amounts import long_but

SCRIPT = r"""#!/bin/bash
# A comment with --flags
GPUS=8
NODES=${NNODES:-4}   # the default counts
WORLD=$(($GPUS*$NODES)); NAME="two words"
ARGS=(
  --one 1   # said here
  --text "x  y" --layout 'E(t|)*2L'
)
ARGS+=(--world "${WORLD}" --name "$NAME")
OLD="
  --layers 24 \
  --nodes $NODES
"
OLD+=" --more 1"
cat <<EOF > /dev/null
python not_this.py --no
EOF
MODE=${MODE:-fast}
if [[ "$MODE" == "fast" ]]; then SPEED=(--speed 3); elif [ -z "$NAME" ]; then SPEED=(--speed 1); else SPEED=(); fi
if [ 8 -gt $GPUS ]; then SPEED=(--never); fi
[ -n "$NAME" ] || GPUS=1
if [ "$MODE" = slow ] || [[ -n "$NAME" && 1 == 1 ]]; then OR=1; fi
if [[ "$MODE" == slow ]] || [ "$NAME" = "two words" ]; then SPEED+=(--or); fi
if [ "$MODE" = fast ] && [ "$NAME" != "two words" ]; then SPEED+=(--and); fi
A=1 echo run "${SPEED[@]}" --half ${WORLD}th "${ARGS[@]}" $OLD --joined=${NAME} a\ b "q\"q" 'si$ngle' "do\$llar" \
    --split $NAME 2>&1 | cat
"""


def words_of(text: str, program: str) -> tuple[str, ...]:
    """Words of the only command of a program."""
    found = [command.words for command in script_commands(text) if command.words[0] == program]
    assert len(found) == 1
    return found[0]


def test_words_are_those_of_bash() -> None:
    """The words that bash gives the command are the words found, one by one."""
    shown = SCRIPT.replace("A=1 echo run", "A=1 printf '%s\\n' run")
    done = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True)
    assert list(words_of(SCRIPT, "echo")[1:]) == done.stdout.splitlines()


def test_here_documents_are_those_of_bash(tmp_path: Path) -> None:
    """The files that bash writes with ``cat`` are those found, whatever their quotes and end marks."""
    script = (
        'A=1; F=one\ncat <<EOT > $F\n{"a": $A, "b": "x\'$A\'", \'c\': \\$A, \\\\}\nEOT\n'
        "cat > two <<'END' \n$A \"quoted\"\nEND\ncat <<-E >three\n\t$((A+1))\n\tE\n"
    )
    subprocess.run(["bash", "-c", script], cwd=tmp_path, check=True)
    written = [command.written for command in script_commands(script) if command.written]
    files = [
        (name, (tmp_path / name).read_text(encoding="utf-8").rstrip("\n")) for name in ("one", "two", "three")
    ]
    assert written == files


def test_what_only_the_running_shell_knows_is_marked() -> None:
    """Variables from outside, output of commands, and what a condition decides."""
    text = """
if [ -z "$FAST" ]; then TP=4; else TP=8; fi
[ -z "$FAST" ] && PP=4
run --tp $TP --host "$(hostname -s)" --path ${DATA}/x --rank $((RANK + 1)) --pp $PP $EXTRA
"""
    words = words_of(text, "run")
    named = {word: unknown_in(value) for word, value in zip(words[1::2], words[2::2], strict=False)}
    assert named["--tp"] == ('$TP (set in line 2: if [ -z "$FAST" ]; then)',)
    assert named["--pp"] == ("$PP (set after &&, which may be reached)",)
    assert {deciders_in(word) for word in words[2:3] + words[10:11]} == {("FAST",)}
    assert named["--host"] == ("$(hostname -s)",)
    assert named["--path"] == ("$DATA",)
    assert named["--rank"] == ("$((RANK + 1))",)
    assert unknown_in(words[-1]) == ("$EXTRA",)


@settings(max_examples=40, deadline=None)
@given(st.text(alphabet=" \n\\\"'$(){}[]#=|&;<>`ab1-", max_size=60))
def test_any_text_is_read_to_its_end(text: str) -> None:
    """Quotes that never close, brackets in any order: commands come out or a line is named, and nothing hangs."""
    seen = "line"
    try:
        assert all(command.words for command in script_commands(text))
    except InvalidInputError as error:
        seen = error.seen
    assert "line" in seen


GROWING = {
    "doubled": "A=xxxxxxxxxxxxxxxx\n" + "A=$A$A$A$A\n" * 30,
    "doubled array": "A=(1 2 3 4)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40,
    "nested defaults": "run " + "${A:-" * 20_000,
    "variables": "run " + "$a" * 300_000,
    "replaced": f"A={'x' * 500_000}\nrun " + "${A//x/y}" * 40_000,
    "trimmed": f"A={'x' * 1999}\nrun " + "${A##*x*x*x*x*x*x*x*y}" * 10_000,
    "cut": f"A={'x' * 500_000}\nrun " + "${A:1:2}" * 60_000,
    "elements cut": f"A=({'x ' * 200_000})\nrun " + '"${A[@]:1:2}" ' * 40_000,
    "appended": "A=()\n" + "A+=(x)\n" * 120_000,
    "shifted": f"set -- {'x ' * 200_000}\n" + "shift\n" * 80_000,
    "matched": f"A={'x' * 100_000}\ncase $A in " + "*x*x*x*x*y) run;; " * 4_000 + " esac",
    "searched": f"[[ {'a' * 190} =~ a*a*a*b ]]\n" * 4_000,
    "numbers": "for i in $(seq 1 999999); do run; done",
    "sums": f"A={'1+' * 900}1\nrun " + "$((A))" * 100_000,
    "sums of sums": "".join(f"A{i}='{'+'.join([f'A{i + 1}'] * 300)}'\n" for i in range(3)) + "A3=1\nrun $((A0))",
    "calls": "f() { f; f; }\nf",
    "calls perhaps": "f() { if [ $X ]; then f; f; fi; }\nf",
    "texts run": 'A=\'A=$A$A; eval "$A"\'\neval "$A"',
    "sourced": "source ./run.sh\nsource ./run.sh",
    "shells": "".join(f"V{i}=1\n" for i in range(20_000)) + "bash -c a\n" * 20_000,
    "loop": "while true; do :; done",
    "passed over": f"f() {{ if false; then {'A=1;' * 60_000}fi; }}\n" + "f\n" * 20_000,
}
READ = {
    "braces": "run " + "{," * 400_000,
    "range": "run {1..999999999}",
    "power": "run $((2**99999999)) $((" + "9" * 100_000 + ")) $((0" + "7" * 100_000 + "))",
    "printf": "run $(printf '%099999999d' 1)\nprintf -v A '%999999999d' 1\nrun $A",
    "here document": "cat <<E\n" + "$a\n" * 300_000,
    "test": "[ " + "a -a " * 100_000 + "a ]",
    "range of letters": "case x in [z-a]) A=1;; esac\nA=${A%[z-a]}\nbreak \u00b2\nrun ${99999999999999999999}",
    "values": "python a.py --x " + "v " * 100_000,
}
"""Large scripts that are read, what is too much in them marked."""


SLOW = (
    "sums of sums",
    "values",
    "searched",
    "here document",
    "trimmed",
    "shells",
    "passed over",
    "elements cut",
    "shifted",
    "appended",
    "texts run",
    "doubled array",
    "variables",
    "test",
    "sums",
)
"""Those that take most of a second or more, and another one shows the same."""


@pytest.mark.parametrize("name", long_but({*GROWING, *READ} - {*SLOW}, [*GROWING, *READ]))
def test_large_scripts_are_read_or_refused_with_little_effort(name: str, tmp_path: Path) -> None:
    """Values that grow, operators over long values, calls and loops without end: a message, not all of the time
    and memory. Each takes a few seconds of the processor, of which the limit here is far more, so that it fails
    only where effort is not counted."""
    file = tmp_path / "run.sh"
    file.write_text(GROWING.get(name) or READ[name])
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_CPU, (60, 60))\n"
        "from pathlib import Path\n"
        "from milpplan.errors import InvalidInputError\n"
        "from milpplan.launchers.shell.launch_text import pairs_of\n"
        "from milpplan.launchers.shell.script import script_commands\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))\n"
        "try:\n"
        "    for one in script_commands(Path(sys.argv[1]).read_text(), sys.argv[1]): pairs_of(one.words)\n"
        "except InvalidInputError as error:\n"
        "    print(error.do)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Write the command out") == (name in GROWING)
