"""The command ``mcp``: the other commands as tools of the Model Context Protocol (modelcontextprotocol.io).

A tool is made of a command's declaration: its parameters, their types and helps. A call runs the command in its
own process, so that output, time limit and end are those of the command line.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from subprocess import DEVNULL
from typing import Annotated, Any, Final, get_type_hints

import typer
from pydantic import TypeAdapter

from milpplan.cli.app import COMMANDS, function_of, load_command
from milpplan.cli.command import MOVED, WRITTEN, spread
from milpplan.cli.outcome import ExitCode
from milpplan.errors import InvalidInputError
from milpplan.version import __version__

EXAMPLES: Final = (
    ("Tools that read, over standard input and output", ""),
    ("Tools that may write", "--allow-write"),
)
LEFT_OUT: Final = ("init", "mcp")
"""Commands that are no tools: one asks questions, one is this command."""
WRITERS: Final = ("sweep", "report", "calibrate", "tune", "profile")
"""Commands that write files even where no parameter asks for it."""
WRITING: Final = (*WRITTEN, "programs", "job")
"""Parameters that make a command write; a job file may name outputs."""
OF_THE_SERVER: Final = ("as_json", "progress")
"""Parameters that the server decides."""
ANSWERS: Final = (ExitCode.OPTIMAL, ExitCode.INFEASIBLE, ExitCode.STOPPED_WITH_PLAN)
"""Exit codes of calls that answer the question."""
INSTRUCTIONS: Final = (
    "Plans for parallel training of large language models, with proofs. `solve` finds the best plan; its"
    " document is the `plan` of `simulate`, `explain`, `compare`, `export` and `traffic`, and the `result` of"
    " `certify`. Wherever a path is taken, the document itself may be given as an object. `list` and `show` name"
    " models and hardware."
)
_PROGRAM: Final = (sys.executable, "-P", "-c", "from milpplan.cli import main; main()")


def mcp(
    allow_write: Annotated[
        bool, typer.Option("--allow-write", help="Offer the commands and parameters that write files, too.")
    ] = False,
) -> None:
    """Serve the commands as tools of the Model Context Protocol on standard input and output (milpplan[mcp])."""
    try:
        import anyio
        from mcp.server.lowlevel import Server
        from mcp.server.stdio import stdio_server
    except ImportError as error:
        raise InvalidInputError(
            f"The Python SDK of the Model Context Protocol cannot be imported: {error}.",
            "Expected the package mcp, version 2 or later.",
            "Install it with: pip install -e '.[mcp]'.",
        ) from error
    server = Server(
        "milpplan",
        version=__version__,
        instructions=INSTRUCTIONS,
        on_list_tools=_listing(allow_write),
        on_call_tool=_calling(allow_write),
    )

    async def serve() -> None:
        async with stdio_server() as (reads, writes):
            await server.run(reads, writes, server.create_initialization_options())

    anyio.run(serve)


def tool_names(allow_write: bool) -> list[str]:
    """List the commands that are tools."""
    excluded = LEFT_OUT if allow_write else (*LEFT_OUT, *WRITERS)
    return [name for names in COMMANDS.values() for name in names if name not in excluded]


def parameters_of(name: str, allow_write: bool) -> dict[str, Any]:
    """Return the parameters of a command's tool by name."""
    excluded = OF_THE_SERVER if allow_write else (*OF_THE_SERVER, *WRITING)
    return {
        parameter.name: parameter
        for parameter in load_command(name).params
        if parameter.name not in excluded and getattr(parameter, "rich_help_panel", None) != MOVED.get(name, "")
    }


def input_schema(name: str, allow_write: bool) -> dict[str, Any]:
    """Make the JSON Schema of a tool's arguments from the types of the command's function."""
    function = function_of(name)
    types = get_type_hints(spread(getattr(import_module(f"milpplan.cli.commands.{function}"), function)))
    properties, required = {}, []
    for key, parameter in parameters_of(name, allow_write).items():
        meaning = " ".join(filter(None, (parameter.help, parameter.metavar and f"({parameter.metavar})")))
        properties[key] = {"description": meaning, **_with_documents(TypeAdapter(types[key]).json_schema())}
        if parameter.required:
            required.append(key)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _with_documents(schema: Any) -> Any:
    """Let an object stand wherever a schema takes a path."""
    if isinstance(schema, list):
        return [_with_documents(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("format") == "path":
        return {"anyOf": [{"type": "string"}, {"type": "object"}]}
    return {key: _with_documents(part) for key, part in schema.items()}


def command_line(name: str, arguments: Mapping[str, Any], folder: Path, allow_write: bool) -> list[str]:
    """Make the words of a call, and write documents that were given as objects into a folder.

    Raises:
        InvalidInputError: an argument that the tool does not have.
    """
    known = parameters_of(name, allow_write)
    others = sorted(arguments.keys() - known.keys())
    if others:
        raise InvalidInputError(
            f"{name} has no argument {', '.join(others)}.",
            f"Expected some of {', '.join(known)}.",
            "Leave it out.",
        )
    options, words = [], []
    if any(parameter.name == "as_json" for parameter in load_command(name).params):
        options.append("--json")
    for key, parameter in known.items():
        value = arguments.get(key)
        if value is None:
            continue
        parts = value if isinstance(value, list) else [value]
        texts = [_text(part, folder / f"{key}-{index}.json") for index, part in enumerate(parts)]
        if parameter.param_type_name == "argument":
            words += texts
        else:
            options += _option(parameter, value, texts)
    return [name, *options, "--", *words]


def _option(parameter: Any, value: Any, texts: list[str]) -> Iterator[str]:
    """Yield the words of an option."""
    if isinstance(value, bool):
        yield from (parameter.opts if value else parameter.secondary_opts)[:1]
    elif parameter.nargs > 1:
        yield from (parameter.opts[0], *texts)
    else:
        yield from (f"{parameter.opts[0]}={text}" for text in texts)


def _text(value: Any, path: Path) -> str:
    """Return a value as a word; an object as the path of its document."""
    if not isinstance(value, dict):
        return str(value)
    path.write_text(json.dumps(value), encoding="utf-8")
    return str(path)


def _listing(allow_write: bool) -> Any:
    """Make the handler that lists the tools."""
    from mcp import types

    async def listed(context: Any, parameters: Any) -> Any:
        tools = [
            types.Tool(
                name=name,
                description=load_command(name).help,
                input_schema=input_schema(name, allow_write),
                annotations=types.ToolAnnotations(read_only_hint=not allow_write, open_world_hint=False),
            )
            for name in tool_names(allow_write)
        ]
        return types.ListToolsResult(tools=tools)

    return listed


def _calling(allow_write: bool) -> Any:
    """Make the handler that runs a command; a call that the client cancels ends its process."""
    import anyio
    from mcp import types

    async def called(context: Any, parameters: Any) -> Any:
        with tempfile.TemporaryDirectory(prefix="milpplan-") as folder:
            try:
                if parameters.name not in tool_names(allow_write):
                    raise InvalidInputError(
                        f"There is no tool {parameters.name!r}.",
                        f"Expected one of {', '.join(tool_names(allow_write))}.",
                        "Start milpplan mcp with --allow-write for commands that write.",
                    )
                words = command_line(parameters.name, parameters.arguments or {}, Path(folder), allow_write)
            except InvalidInputError as error:
                return types.CallToolResult(content=[types.TextContent(text=str(error))], is_error=True)
            done = await anyio.run_process([*_PROGRAM, *words], stdin=DEVNULL, check=False)
        return _result(done.returncode, done.stdout.decode(), done.stderr.decode())

    return called


def _result(code: int, output: str, messages: str) -> Any:
    """Make the result of a call: the document, and the messages of calls that did not end with code 0."""
    from mcp import types

    texts = [output] if output else []
    if code or not output:
        texts.append(f"exit code {code}\n{messages}")
    try:
        document = json.loads(output)
    except ValueError:
        document = None
    return types.CallToolResult(
        content=[types.TextContent(text=text) for text in texts],
        structured_content=document if isinstance(document, dict) else None,
        is_error=code not in ANSWERS,
    )
