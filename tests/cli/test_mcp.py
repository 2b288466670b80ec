"""``milpplan mcp``: tools over standard input and output, as a client of the protocol's own SDK sees them."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from milpplan.cli.app import COMMANDS, load_command

mcp = pytest.importorskip("mcp")
anyio = pytest.importorskip("anyio")

JOB = {"model": "llama3-8b", "hardware": "dgx-h100", "gpus": 8, "global_batch": 8, "space": "uniform"}
Talk = Callable[[Any], Awaitable[Any]]
BAD_CALLS = (
    ("simulate", {"plan": "plan.json", "out": "x.json"}, "simulate has no argument out"),
    ("simulate", {"plan": "--help"}, "--help does not exist"),
    ("report", {"plan": "plan.json"}, "There is no tool 'report'"),
    ("solve", JOB | {"model": "llama9"}, "llama9"),
)
"""Calls that are refused, and a part of the reason."""


def talk(words: Talk, *options: str, folder: Path | None = None) -> Any:
    """Start a server, run a conversation with it, and return what that returns."""
    code = "from milpplan.cli import main; main()"
    server = mcp.StdioServerParameters(command=sys.executable, args=["-c", code, "mcp", *options], cwd=folder)

    async def run() -> Any:
        async with mcp.Client(server) as client:
            return await words(client)

    return anyio.run(run)


@pytest.fixture(scope="module")
def heard() -> tuple[Any, Any, list[Any]]:
    """What one server says: its tools, an answer, and what it says to ``BAD_CALLS``."""

    async def words(client: Any) -> Any:
        tools = (await client.list_tools()).tools
        shown = await client.call_tool("show", {"name": "llama3-8b"})
        return tools, shown, [await client.call_tool(name, arguments) for name, arguments, _ in BAD_CALLS]

    said: tuple[Any, Any, list[Any]] = talk(words)
    return said


def test_commands_are_tools_that_only_read(heard: tuple[Any, Any, list[Any]]) -> None:
    """Every command but those that ask or write; no parameter names a file to write. One of them answers."""
    listed, shown, _ = heard
    assert not shown.is_error
    assert "llama3-8b" in shown.content[0].text
    tools = {tool.name: tool for tool in listed}
    commands = {name for names in COMMANDS.values() for name in names}
    assert commands - tools.keys() == {"init", "mcp", "sweep", "report", "calibrate", "tune", "profile"}
    for name, tool in tools.items():
        assert tool.annotations.read_only_hint
        assert tool.description == load_command(name).help
        assert not tool.input_schema["properties"].keys() & {"out", "html", "report", "programs", "as_json", "job"}
    assert tools["explain"].input_schema["properties"]["time_limit"]["type"] == "number"
    assert tools["simulate"].input_schema["properties"]["plan"]["description"].startswith("A plan file")


@pytest.mark.long
def test_a_document_goes_from_tool_to_tool(tmp_path: Path) -> None:
    """The answer of ``solve`` is simulated and certified without a file; nothing is left in the folder."""

    async def words(client: Any) -> Any:
        solved = await client.call_tool("solve", JOB)
        document = solved.structured_content
        simulated = await client.call_tool("simulate", {"plan": document})
        certified = await client.call_tool("certify", {"result": document})
        return solved, simulated, certified

    results = talk(words, folder=tmp_path)
    assert not any(result.is_error for result in results)
    solved, simulated, _ = (result.structured_content for result in results)
    assert solved["status"] == "optimal"
    assert json.loads(results[0].content[0].text) == solved
    assert simulated["step_time_s"] == pytest.approx(solved["step_time_s"])
    assert not list(tmp_path.iterdir())


def test_bad_calls_are_errors_with_their_reason(heard: tuple[Any, Any, list[Any]]) -> None:
    """An unknown argument, an option in an argument's place, a hidden writer, an unknown model."""
    for result, (_, _, part) in zip(heard[2], BAD_CALLS, strict=True):
        assert result.is_error
        assert part in result.content[-1].text


@pytest.mark.long
def test_writing_is_allowed_on_request(tmp_path: Path) -> None:
    """With ``--allow-write`` the parameters that name outputs are there, and files are written."""

    async def words(client: Any) -> Any:
        return await client.call_tool("solve", JOB | {"out": str(tmp_path / "plan.json")})

    assert not talk(words, "--allow-write").is_error
    assert json.loads((tmp_path / "plan.json").read_text())["status"] == "optimal"
