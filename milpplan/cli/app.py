"""The program: its commands by section, its options before the command, and the exit codes of all errors.

A command's module is imported when the command is run, completed, or asked for its help; ``milpplan --help``
prints the table below.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

import milpplan
from milpplan.cli import interrupts
from milpplan.cli.outcome import (
    ExitCode,
    beyond_numbers,
    emit,
    is_beyond_numbers,
    of_error,
    say,
    say_error,
    say_traceback,
)
from milpplan.errors import MilpplanError
from milpplan.units import printable

COMMANDS: Final = {
    "Find plans": {
        "solve": "Find the best plan for a model on a cluster, and prove it.",
        "solve-lengths": (
            "Find the best step for sequences of several lengths: which strategies run which sequences, in turn "
            "or side by side, with a proved bound."
        ),
        "min-gpus": (
            "Find the fewest GPUs on which a model trains at all, or in time for a deadline, and prove that "
            "every smaller number does not suffice (up to a node every number is tried, beyond it whole nodes)."
        ),
        "sweep": "Solve every cell of a design study.",
    },
    "Understand and check plans": {
        "simulate": "Simulate one step of a plan.",
        "explain": (
            "Explain a plan: what limits it, what more memory or bandwidth would gain, why not another choice; "
            "proved."
        ),
        "compare": (
            "Compare plans: what differs, how long a step of each takes, and where the difference comes from."
        ),
        "report": "Write a plan as a page that needs no network, and its step as a trace.",
        "traffic": "Count who sends how much to whom in one step of a plan: by parallelism, tier, link and time.",
        "switch": (
            "Plan the switch of a job to another plan: who sends which states to whom, and how long that takes."
        ),
        "program": (
            "Write the answer of a problem as one integer program: degrees, divisibility, memory, critical paths."
        ),
        "certify": "Prove a result again with another solver, without trusting the run that made it.",
    },
    "Launchers": {
        "export": "Write the files that start a plan with a launcher, checked against the launcher's own rules.",
        "import": "Read the plan from a launcher's files and simulate it.",
        "gap": (
            "Judge plans that anybody made: how far they are from the proved best, what closes the gap, what it "
            "costs."
        ),
    },
    "Measurements": {
        "validate": (
            "Compare the simulator with measured training runs: step time, memory, and the order of layouts."
        ),
        "calibrate": (
            "Fit constants of hardware and software to your own measurements, as an overlay on a description."
        ),
        "tune": (
            "Choose trial runs one after another: propose a plan with its launch files, take its log, drop the "
            "scenarios that it refutes, and stop when the regret of the best measured plan is proved small."
        ),
        "profile": (
            "Measure this machine's GPUs, as an overlay on a description (needs PyTorch: milpplan[profile])."
        ),
    },
    "Files and set-up": {
        "list": "List the models or the hardware that ship with milpplan.",
        "show": "Print a model or hardware description.",
        "schema": "Print the JSON Schema of a file that milpplan reads or writes.",
        "init": "Ask a few questions and write a job file for `solve --job`.",
        "mcp": (
            "Serve the commands as tools of the Model Context Protocol on standard input and output "
            "(milpplan[mcp])."
        ),
        "doctor": "Check the installed solvers on small programs that broken solvers have got wrong.",
    },
}
"""First sentence of every command's help, by section and name."""
FUNCTIONS: Final = {"import": "import_plan", "list": "list_names", "show": "show_preset"}
"""Functions of commands, and their modules in ``milpplan.cli.commands``, that are not called as the command is."""


def function_of(name: str) -> str:
    """Return the name of a command's function, which is that of its module."""
    return FUNCTIONS.get(name, name.replace("-", "_"))


def load_command(name: str) -> Any:
    """Import a command, and build the click command that reads its words."""
    from milpplan.cli.command import Command, spread

    function = function_of(name)
    module = import_module(f"milpplan.cli.commands.{function}")
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name, cls=Command)(spread(getattr(module, function)))
    command: Any = typer.main.get_command(single)
    command.examples = module.EXAMPLES
    return command


class Commands(TyperGroup):
    """Group of all commands, which turns their exceptions into a message and an exit code."""

    def __init__(self, **settings: Any) -> None:
        """Fill the group from the table, with commands that know only their help."""
        super().__init__(**settings)
        for section, names in COMMANDS.items():
            for name, line in names.items():
                self.add_command(TyperCommand(name, help=line, rich_help_panel=section))

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read the options before the command."""
        try:
            return super().make_context(*args, **kwargs)
        except Exception as error:
            _clean_usage(error)
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that words name, and import it."""
        name, command, rest = super().resolve_command(ctx, args)
        # An import could lose the exception of a signal.
        with interrupts.leaving():
            return name, command and load_command(str(command.name)), rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands by section."""
        width = formatter.width - 6 - max(map(len, self.commands))
        for section, names in COMMANDS.items():
            with formatter.section(section):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(width)) for name in names])

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and end with the exit code of its error."""
        with interrupts.raised():
            try:
                code = super().invoke(ctx)
            except MilpplanError as error:
                code = _refuse(ctx, error)
            except KeyboardInterrupt:
                say(interrupts.message())
                code = ExitCode.STOPPED_WITHOUT_PLAN
            except Exception as error:
                # typer's own exits and usage errors know their codes.
                if hasattr(error, "exit_code") or isinstance(error, typer.Abort):
                    _clean_usage(error)
                    raise
                absurd = is_beyond_numbers(error)
                code = _refuse(ctx, beyond_numbers(error)) if absurd else _fail(ctx, error)
            raise typer.Exit(int(code or ExitCode.OPTIMAL))


def _clean_usage(error: Exception) -> None:
    """Remove control characters from a usage error, which typer prints itself."""
    message = getattr(error, "message", None)
    if isinstance(message, str):
        error.message = printable(message)  # type: ignore[attr-defined]


def _refuse(ctx: Any, error: MilpplanError) -> ExitCode:
    """Print an error of the user's, and its traceback with ``--debug``."""
    say_error(error)
    if ctx.params.get("debug"):
        say_traceback()
    return of_error(error)


def _fail(ctx: Any, error: Exception) -> ExitCode:
    """Print an error of milpplan's own, and its traceback with ``--debug``."""
    say(
        f"error: Internal error of milpplan {milpplan.__version__}: {type(error).__name__}: {error}. This is a "
        "bug, not your mistake. Please report it with the command you ran and the output of "
        "`milpplan --debug ...`, which adds the traceback."
    )
    if ctx.params.get("debug"):
        say_traceback()
    return ExitCode.INTERNAL_FAILURE


def _version(wanted: bool) -> None:
    if wanted:
        emit(f"milpplan {milpplan.__version__}\n")
        raise typer.Exit(0)


app = typer.Typer(
    name="milpplan",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Proved-best parallel training plans for large language models. Results on stdout, progress on stderr. "
        "Exit codes: 0 optimal within the tolerance, 2 wrong usage or bad input, 3 proved infeasible, 4 a plan "
        "that is not proved within the tolerance (its gap is printed), 5 stopped without a plan, 6 internal "
        "failure."
    ),
)


@app.callback()
def _milpplan(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")] = False,
) -> None:
    """Declare the options before the command."""
