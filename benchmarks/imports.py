"""Published launch files, imported: which are read, and why the others are refused.

    python -m benchmarks.imports CLONES [--out benchmarks/results/imports.md]

CLONES holds git clones of the repositories of ``data/published_launches.json`` as OWNER/NAME; the files themselves
are not part of this project. Every file is imported at the commit of the list, beside the other files of its
folder and of the folders that the list names in ``with``, with the options of the list: they say what the file
leaves to its trainer, such as batches and lengths. ``config`` is the configuration of a model that it only names.
The list also has the judgement of every refusal, which a person made: ``unpriced`` (a key or a model that no plan
has), ``program`` (a program whose files are not read), or ``wrong`` (the message names something else than what
prevents the import).
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown_table, replace_section

LIST = Path(__file__).parent / "data" / "published_launches.json"
VERDICTS = ("read", "read in part", "unpriced", "program", "wrong")


def main() -> int:
    """Import all files and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clones", type=Path)
    parser.add_argument("--out", type=Path, help="A page whose section `imports` is replaced.")
    words = parser.parse_args()
    launches = json.loads(LIST.read_text(encoding="utf-8"))
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(partial(answer_of, words.clones), launches))
    text = tables(launches, answers)
    if words.out is None:
        print(text)
    else:
        replace_section(words.out, "imports", text)
    return int(any(answer[0] == "unjudged" for answer in answers))


def answer_of(clones: Path, launch: Mapping[str, Any]) -> tuple[str, str]:
    """Import a file; return the verdict, and the first sentence of a refusal."""
    folder, _, name = launch["path"].rpartition("/")
    clone = ["git", "-C", str(clones / launch["repository"])]
    archive_of = [*clone, "archive", launch["commit"], folder, *launch.get("with", ())]
    packed = subprocess.run(archive_of, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as place:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(place, filter="data")
        options = ["--from", launch["from"], "--hardware", "dgx-h100", *launch["options"]]
        if "config" in launch:
            model = Path(place) / "model.json"
            model.write_text(json.dumps(launch["config"]), encoding="utf-8")
            options += ["--model", str(model)]
        program = "from milpplan.cli import main; main()"
        command = [sys.executable, "-c", program, "import", name, *options]
        result = subprocess.run(command, cwd=Path(place) / folder, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return ("read in part" if "--ignore" in launch["options"] else "read"), ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    return launch.get("judgement", "unjudged"), lines[0].removeprefix("error: ").replace("|", "\\|")[:160]


def tables(launches: list[dict[str, Any]], answers: list[tuple[str, str]]) -> str:
    """Write the counts by launcher, and every file with its verdict."""
    counts = Counter((launch["launcher"], verdict) for launch, (verdict, _) in zip(launches, answers, strict=True))
    names = list(dict.fromkeys(launch["launcher"] for launch in launches))
    rows = [[name, *(counts[name, verdict] for verdict in VERDICTS)] for name in names]
    rows.append(["all", *(sum(counts[name, verdict] for name in names) for verdict in VERDICTS)])
    told = []
    for launch, (verdict, why) in zip(launches, answers, strict=True):
        address = f"https://github.com/{launch['repository']}/blob/{launch['commit']}/{launch['path']}"
        told.append(f"- {launch['launcher']}: [{launch['path']}]({address}): {verdict}{f'. {why}' if why else ''}")
    return "\n".join([markdown_table(["launcher", *VERDICTS], rows), "", *told])


if __name__ == "__main__":
    sys.exit(main())
