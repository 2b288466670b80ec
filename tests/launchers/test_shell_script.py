"""Launch scripts are read as bash reads them, and nothing is run; what only a running shell knows is marked."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milpplan.errors import InvalidInputError
from milpplan.launchers.shell_marks import deciders_in, unknown_in
from milpplan.launchers.shell_script import script_commands

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


@pytest.mark.parametrize(
    "text",
    [
        "A=xxxxxxxxxxxxxxxx\n" + "A=$A$A$A$A\n" * 30,
        "A=(1 2 3 4)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40,
        "run " + "${A:-" * 20_000,
    ],
)
def test_scripts_that_grow_without_end_are_refused(text: str) -> None:
    """Values that double, arrays that double, expansions in expansions: a message, not all of the memory."""
    with pytest.raises(InvalidInputError, match="Write the command out"):
        script_commands(text)
