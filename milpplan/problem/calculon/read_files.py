"""Reader of Calculon's three files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from milpplan.problem.calculon.fields import CalculonExecution, CalculonModel, CalculonSystem
from milpplan.problem.reading import RecordType, parse_json, read_text, validated


@dataclass(frozen=True, slots=True)
class CalculonFiles:
    """Checked contents of the three files, and their names."""

    model: CalculonModel
    execution: CalculonExecution
    system: CalculonSystem
    names: tuple[str, str, str] = ("model", "execution", "system")


def read_calculon(model: Path, execution: Path, system: Path) -> CalculonFiles:
    """Read and check three files of Calculon.

    Raises:
        InvalidInputError: the file and the field that are wrong.
    """
    return CalculonFiles(
        _read(CalculonModel, model),
        _read(CalculonExecution, execution),
        _read(CalculonSystem, system),
        (str(model), str(execution), str(system)),
    )


def _read(record: type[RecordType], path: Path) -> RecordType:
    return validated(record, parse_json(read_text(path), str(path)), str(path))
