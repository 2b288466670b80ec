"""Files are written whole or not at all, whoever else writes beside them and whatever lies in their way."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from milpplan.errors import InvalidInputError
from milpplan.optimize.milp import ProgramBuilder, write_lp
from milpplan.reports import files, write_whole
from milpplan.studies import store


def leftovers(directory: Path) -> list[str]:
    """Temporary files that stayed."""
    return [path.name for path in directory.rglob(".milpplan-*")]


def test_many_threads_with_one_process_id_write_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each writes a file of its own and one that all write: each file has one writer's whole content."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    texts = {f"{number}": f"{number}\n" * (2_000 + number) for number in range(8)}
    wrong: list[str] = []

    def write(name: str) -> None:
        for _ in range(25):
            write_whole(tmp_path / name, texts[name])
            write_whole(tmp_path / "all", texts[name])
            if (tmp_path / name).read_text() != texts[name] or (
                tmp_path / "all"
            ).read_text() not in texts.values():
                wrong.append(name)

    threads = [threading.Thread(target=write, args=(name,)) for name in texts]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*texts, "all"])


def test_a_planted_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who guesses the temporary name and puts a link there harms nobody; the next name is taken."""
    victim, planted = tmp_path / "victim", tmp_path / ".milpplan-00.tmp"
    victim.write_text("precious")
    planted.symlink_to(victim)
    names = iter(["00", "01"])
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: next(names))
    write_whole(tmp_path / "plan.json", "content")
    assert (victim.read_text(), (tmp_path / "plan.json").read_text()) == ("precious", "content")
    assert planted.is_symlink()


def test_a_planted_lock_is_not_emptied(tmp_path: Path) -> None:
    """The lock of a sweep is opened, never cut to nothing: it may be a link to something precious."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / store.LOCK).symlink_to(victim)
    with store.opened(tmp_path / "study"):
        pass
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o755])
def test_permissions_stay(mode: int, tmp_path: Path) -> None:
    """A file that is replaced keeps its permissions; a new one gets those of any new file."""
    path = tmp_path / "plan.json"
    path.write_text("old")
    path.chmod(mode)
    write_whole(path, "new")
    assert (path.stat().st_mode & 0o7777, path.read_text()) == (mode, "new")
    (tmp_path / "usual").touch()
    write_whole(tmp_path / "fresh", "new")
    assert (tmp_path / "fresh").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """Behind a symbolic link, in another directory too, the file it points to is replaced; one that points to
    nothing makes that file."""
    (tmp_path / "there").mkdir()
    for name in ("old", "none"):
        link, target = tmp_path / f"{name}.json", tmp_path / "there" / name
        link.symlink_to(target)
        if name == "old":
            target.write_text("old")
            target.chmod(0o640)
        write_whole(link, "new")
        assert link.is_symlink()
        assert target.read_text() == "new"
    assert (tmp_path / "there" / "old").stat().st_mode & 0o777 == 0o640


LIMITED = """
import sys
from pathlib import Path
from milpplan.errors import InvalidInputError
from milpplan.reports.files import write_whole
try:
    write_whole(Path(sys.argv[1]), "x" * 100_000)
except InvalidInputError as error:
    print(error.seen)
"""


@pytest.mark.parametrize("exists", [False, True])
def test_a_disk_without_room_keeps_what_was_there(exists: bool, tmp_path: Path) -> None:
    """The system refuses to write after 4 KiB: an error, the old content, no temporary file."""
    path = tmp_path / "plan.json"
    if exists:
        path.write_text("old")
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "cannot be written: File too large" in ended.stdout
    assert (path.read_text() if path.exists() else None) == ("old" if exists else None)
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("wrong", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()])
def test_whatever_stops_it_no_part_remains(
    wrong: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk when the content is flushed, or Ctrl-C: what was there stays, alone."""

    def fails(_: int) -> None:
        raise wrong

    path = tmp_path / "plan.json"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(InvalidInputError if isinstance(wrong, OSError) else type(wrong)):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["plan.json"]


def test_programs_for_other_solvers_are_written_by_the_same_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An LP file keeps the permissions of the one it replaces, and a full disk is the user's matter."""
    builder = ProgramBuilder("small")
    builder.minimize([builder.add_variable("x", 0, 3)], [1])
    program, path = builder.build(), tmp_path / "small.lp"
    path.touch(0o600)
    write_lp(program, path)
    assert path.stat().st_mode & 0o777 == 0o600
    whole = path.read_text()

    def full(*_: object, **__: object) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "read_bytes", full)
    with pytest.raises(InvalidInputError, match="No space left"):
        write_lp(program, path)
    assert path.read_text() == whole
    assert not leftovers(tmp_path)


def test_text_is_cleaned_and_bytes_are_not(tmp_path: Path) -> None:
    """What an editor or a terminal would obey is spelled out in text; halves of characters do not stop it."""
    write_whole(tmp_path / "text", "a\x1b[31m\u202eb\r\x00\ud800\n\tc\u00e9\u4e2d")
    assert (tmp_path / "text").read_text() == "a\\u001b[31m\\u202eb\\u000d\\u0000\\ud800\n\tc\u00e9\u4e2d"
    write_whole(tmp_path / "bytes", b"\x1b\x00")
    assert (tmp_path / "bytes").read_bytes() == b"\x1b\x00"


def test_every_writer_of_the_package_goes_through_it() -> None:
    """No module opens a file to write on its own but this one, backends in a directory of their own, and locks."""
    package = Path(files.__file__).parents[1]
    writing = ("write_text(", "write_bytes(", '"w"', '"wb"', "os.replace(", "mkstemp(", "NamedTemporaryFile(")
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(word in path.read_text() for word in writing)
    }
    # cli: a closed stream is sent to nowhere. cbc, mcp: a directory of their own. parallel: a pipe.
    allowed = {
        "reports/files.py",
        "optimize/milp/cbc.py",
        "parallel.py",
        "cli/__init__.py",
        "cli/commands/mcp.py",
    }
    assert found <= allowed, found - allowed
