"""The shape of the house: imports point one way, modules and functions stay small, names say something."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import milpplan
from benchmarks.house import exported, statements, tree
from milpplan.library import HOMES

PACKAGE = Path(milpplan.__file__).parent
MODULES = {
    ".".join(("milpplan", *path.relative_to(PACKAGE).with_suffix("").parts)): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

Node = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef
MAX_MODULE_LINES = 700
MAX_FUNCTION_LINES = 80
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "misc", "common", "manager"}

BASE = ("milpplan.errors", "milpplan.library", "milpplan.units", "milpplan.plugins")
SOLVER_ROOM = (
    "milpplan.optimize.milp.program",
    "milpplan.optimize.milp.solution",
    "milpplan.optimize.milp.backends",
)
ALLOWED = {
    "milpplan.errors": (),
    "milpplan.units": (),
    "milpplan.version": (),
    "milpplan.plugins": ("milpplan.errors",),
    "milpplan.parallel": ("milpplan.errors",),
    "milpplan.problem": (*BASE, "milpplan.problem"),
    "milpplan.simulation": (*BASE, "milpplan.problem", "milpplan.simulation"),
    "milpplan.communication": (*BASE, "milpplan.problem", "milpplan.simulation", "milpplan.communication"),
    "milpplan.switching": (
        *BASE,
        "milpplan.problem",
        "milpplan.simulation",
        "milpplan.communication.records",
        "milpplan.switching",
    ),
    # What launchers can run is declared once, and restricts spaces as well as exports.
    "milpplan.optimize": (
        *BASE,
        "milpplan.problem",
        "milpplan.simulation",
        "milpplan.launchers.capabilities",
        "milpplan.launchers.targets",
        "milpplan.reports.files",
        "milpplan.parallel",
        "milpplan.optimize",
    ),
    "milpplan.graph": (*BASE, *SOLVER_ROOM, "milpplan.graph"),
    # Programs and backends only: its strategies are tables of times from anywhere, not of a cost model.
    "milpplan.lengths.tabled": (
        *BASE,
        "milpplan.problem",
        "milpplan.lengths.bounds.count_cuts",
        "milpplan.lengths.bounds.glop",
        "milpplan.lengths.bounds.long_sequence",
        "milpplan.lengths.bounds.pipeline_bounds",
        "milpplan.optimize.milp.program",
        "milpplan.optimize.milp.linear_relaxation",
        "milpplan.optimize.milp.solution",
        "milpplan.optimize.milp.backends",
        "milpplan.lengths.deadline",
        "milpplan.lengths.search_parameters",
        "milpplan.lengths.tabled",
    ),
    "milpplan.lengths": (
        *BASE,
        *SOLVER_ROOM,
        "milpplan.problem",
        "milpplan.simulation",
        "milpplan.switching",
        "milpplan.optimize.milp.cpsat",
        "milpplan.optimize.space.enumerate_layouts",
        "milpplan.optimize.bounds.uniform_plans",
        "milpplan.lengths",
    ),
    "milpplan.launchers": (*BASE, "milpplan.problem", "milpplan.launchers"),
    "milpplan.validation": (
        *BASE,
        "milpplan.problem",
        "milpplan.simulation",
        "milpplan.reports.files",
        "milpplan.version",
        "milpplan.validation",
    ),
    "milpplan.calibration": (
        *BASE,
        "milpplan.problem",
        "milpplan.simulation",
        "milpplan.validation",
        "milpplan.reports.blocks",
        "milpplan.reports.files",
        "milpplan.version",
        "milpplan.calibration",
    ),
    "milpplan.profiling": (
        *BASE,
        "milpplan.problem",
        "milpplan.simulation",
        "milpplan.calibration",
        "milpplan.reports.blocks",
        "milpplan.reports.files",
        "milpplan.version",
        "milpplan.profiling",
    ),
    "milpplan.studies": (
        *BASE,
        "milpplan.problem",
        "milpplan.optimize",
        "milpplan.reports.files",
        "milpplan.reports.documents.plan_file",
        "milpplan.version",
        "milpplan.parallel",
        "milpplan.studies",
    ),
    "milpplan.explain": (
        *BASE,
        "milpplan.problem",
        "milpplan.simulation",
        "milpplan.communication",
        "milpplan.optimize",
        "milpplan.explain",
        "milpplan.launchers",
        "milpplan.version",
    ),
    "milpplan.reports": (
        *BASE,
        "milpplan.problem",
        "milpplan.simulation.step_report",
        "milpplan.simulation.pipeline.lanes",
        "milpplan.communication.records",
        "milpplan.switching.records",
        "milpplan.lengths.records",
        "milpplan.simulation.layout_columns",
        "milpplan.simulation.layers.parameter_counts",
        "milpplan.optimize.search.closed_layouts",
        "milpplan.optimize.records",
        "milpplan.optimize.milp.solver_self_test",
        "milpplan.explain.records",
        "milpplan.explain.hardware_choice",
        "milpplan.explain.judge.records",
        "milpplan.calibration.error_bars",
        "milpplan.calibration.trials",
        "milpplan.validation.evidence",
        "milpplan.version",
        "milpplan.reports",
    ),
}
"""What the modules of a room may import of the package; the front door (cli, __init__) may import all."""

SOLVER_SIDE = (
    "program",
    "solution",
    "cpsat",
    "cbc",
    "math_opt",
    "linear_relaxation",
    "write_program",
)
SOLVER_SIDE_ALLOWED = {
    "milpplan.errors",
    "milpplan.reports.files",
    *(f"milpplan.optimize.milp.{name}" for name in SOLVER_SIDE),
}
"""Programs and backends: they know no GPUs. Writing a file whole is everybody's."""


@cache
def imports_and_functions(path: Path) -> tuple[Node, ...]:
    """Every import and every function of a module, wherever in it."""
    wanted = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef)
    return tuple(node for node in statements(path) if isinstance(node, wanted))


def imported(path: Path) -> Iterator[str]:
    """Modules of the package that a file imports, wherever in it."""
    for node in imports_and_functions(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "milpplan")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module and node.module.split(".")[0] == "milpplan":
                homes = exported(node.module)
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    yield inner if inner in MODULES else homes.get(alias.name, node.module)


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method."""
    for node in imports_and_functions(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def room(name: str) -> str | None:
    """The room a module belongs to, None for the front door."""
    return next((key for key in ALLOWED if name == key or name.startswith(f"{key}.")), None)


def test_imports_point_one_way() -> None:
    """units, errors <- problem <- simulation <- optimize <- explain <- cli; launchers, reports: records only."""
    assert [wrong for name in MODULES for wrong in strays(name)] == []


def strays(name: str) -> Iterator[str]:
    """Imports of a module that point the other way."""
    here = room(name)
    if here is None:
        assert name in ("milpplan.__init__", "milpplan.answers", "milpplan.library") or name.startswith(
            "milpplan.cli"
        ), name
        return
    for target in imported(MODULES[name]):
        if not any(target == ok or target.startswith(f"{ok}.") for ok in ALLOWED[here]):
            yield f"{name} imports {target}"


@pytest.mark.parametrize("name", [f"milpplan.optimize.milp.{part}" for part in SOLVER_SIDE])
def test_backends_know_no_gpus(name: str) -> None:
    """A backend imports programs, solutions, scaling and errors only."""
    assert set(imported(MODULES[name])) <= SOLVER_SIDE_ALLOWED


HEAVY = {"ortools", "pulp", "scipy", "plotly", "pyarrow", "ray", "jinja2", "yaml", "torch"}
"""What only those need who solve, draw or read files: most take half a second to import."""


ROOMS_BEYOND_SOLVE = {f"milpplan.{room}" for room in ("graph", "explain", "lengths", "reports")}
"""What plans without several strategies, questions and pages do without."""


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import milpplan; milpplan.__version__", HEAVY | {"numpy", "pydantic"}),
        ("from milpplan import *", HEAVY),
        # A name brings what it needs, and not the rest of the library.
        ("from milpplan import StrategyGraph; import milpplan.graph", HEAVY | {"pydantic", "milpplan.problem"}),
        ("from milpplan import Problem, load_hardware, load_model", HEAVY | {"rich", "milpplan.simulation"}),
        ("from milpplan import solve, simulate", HEAVY | {"rich", *ROOMS_BEYOND_SOLVE}),
        (
            "import milpplan.cli.solving",
            {
                "milpplan.graph",
                "milpplan.lengths",
                "milpplan.launchers",
                "milpplan.reports.html",
            },
        ),
        # The program with the list of its commands.
        ("import milpplan.cli.app", HEAVY | {"numpy", "pydantic", "rich"}),
        ("import milpplan.cli.commands.solve", HEAVY | {"milpplan.optimize", "milpplan.explain", "rich"}),
        ("import milpplan.cli.commands.list_names", HEAVY | {"milpplan.optimize", "milpplan.explain"}),
    ],
)
def test_what_takes_long_is_not_imported_early(code: str, heavy: set[str]) -> None:
    """The package is there at once, with all its names without a solver, and so is the help of the commands."""
    check = f"import sys\n{code}\nsys.exit(' '.join({heavy} & sys.modules.keys()) or 0)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{code} imports {done.stderr}"


def test_type_checkers_see_the_public_names() -> None:
    """What ``milpplan/__init__.py`` imports for them is what ``milpplan.library`` fetches when it is asked for."""
    told = [
        (node.module, alias.name)
        for node in imports_and_functions(MODULES["milpplan.__init__"])
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if node.module in HOMES and alias.asname == alias.name
    ]
    assert sorted(told) == sorted((home, name) for home, names in HOMES.items() for name in names)


def test_public_names_of_folders_are_not_those_of_modules() -> None:
    """Once a module is imported, its folder has the module under its name, whatever the folder offers."""
    folders = [name.removesuffix(".__init__") for name in MODULES if name.endswith(".__init__")]
    public = [f"{folder}.{name}" for folder in folders for name in exported(folder)]
    assert public
    assert not [name for name in public if name in MODULES or f"{name}.__init__" in MODULES]


def test_pytorch_stays_in_its_room() -> None:
    """Only milpplan.profiling.pytorch imports torch: everything else works without."""
    for name, path in MODULES.items():
        if name.startswith("milpplan.profiling.pytorch"):
            continue
        names = [
            one
            for node in imports_and_functions(path)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for one in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
        ]
        assert not [one for one in names if one.split(".")[0] == "torch"], name
        assert "milpplan.profiling.pytorch" not in " ".join(names), name


def test_modules_are_one_idea() -> None:
    """A module beyond 700 lines holds two ideas; a module called utils holds none."""
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert {name: count for name, count in lines.items() if count > MAX_MODULE_LINES} == {}
    assert {path.stem for path in MODULES.values()} & VAGUE_NAMES == set()


def test_functions_are_short() -> None:
    """No function is longer than 80 lines, docstring included."""
    long = [
        f"{name}.{f.name}"
        for name, path in MODULES.items()
        for f in functions(path)
        if (f.end_lineno or 0) - f.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_public_things_say_what_they_are() -> None:
    """Every module, and every public class, function and method, has a docstring."""
    bare = [name for name, path in MODULES.items() if tree(path).body and not ast.get_docstring(tree(path))]
    assert bare == []
    assert [f"{name}.{one}" for name, path in MODULES.items() for one in silent(tree(path).body)] == []


def silent(body: list[ast.stmt]) -> Iterator[str]:
    """Public classes, functions and methods without a docstring."""
    for node in body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{inner}" for inner in silent(node.body))
