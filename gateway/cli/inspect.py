"""`gateway count` and `gateway trim`: count or trim a request body without sending it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from gateway.cli.common import (
    AsJson,
    ConfigFile,
    Exit,
    config_problems,
    load,
    print_json,
    print_table,
    printable,
    quoted,
    stop,
)
from gateway.cli.numbers import count as count_of

if TYPE_CHECKING:
    from gateway.context.inspector import Inspector

T = TypeVar("T")

Body = Annotated[str, typer.Argument(metavar="FILE|-", help="File with a request body as JSON; - is stdin.")]
ModelName = Annotated[
    str | None,
    typer.Option("-m", "--model", metavar="NAME", help="Model to count for, instead of the one in the body."),
]
WireName = Annotated[
    str | None,
    typer.Option(
        "--wire", metavar="NAME", help="Format: chat, responses, messages, completions or embeddings; else guessed."
    ),
]


def count(  # noqa: PLR0917  # typer makes an option of each
    body: Body,
    model: ModelName = None,
    wire: WireName = None,
    items: Annotated[bool, typer.Option("--items", help="Also show the tokens of each message.")] = False,
    tools: Annotated[bool, typer.Option("--tools", help="Also show the tokens of each tool's results.")] = False,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Count the tokens of a request body, in total and by part."""
    from gateway.core.session import Remembered

    content = _read(body)

    async def work(inspector: Inspector) -> dict[str, Any]:
        _, asked = inspector.read(content, model=model, wire=_known_wire(wire))
        show = [name for name, is_asked in (("items", items), ("tools", tools)) if is_asked]
        return await inspector.count(asked, Remembered(), show)

    counts = _run_inspector(config, work)
    if as_json:
        print_json(counts)
        return
    exact = "exact" if counts["source"] == "exact" else f"{counts['source']}, about"
    rows = [
        ("total", f"{counts['tokens']:,}", f"{exact} · margin {counts['margin']:,}"),
        ("conversation", f"{counts['conversation_tokens']:,}", ""),
        ("tool results", f"{counts['tool_tokens']:,}", f"{counts['tool_results']} different"),
        ("tool definitions", f"{counts['definition_tokens']:,}", ""),
    ]
    if counts["budget"] is not None:
        rows.append(("context budget", f"{counts['budget']:,}", ""))
    summary = f"{counts['model']} at {counts['provider']} · {counts['wire']} · counted with {counts['counter']}"
    typer.echo(printable(summary), err=True)
    print_table(("part", "tokens", ""), rows, right=("tokens",))
    if tools:
        typer.echo("")
        by_tool = [
            (name, f"{tool['results']:,}", f"{tool['result_tokens']:,}") for name, tool in counts["tools"].items()
        ]
        print_table(("tool", "results", "tokens"), by_tool, right=("results", "tokens"))
    if items:
        typer.echo("")
        listed = [(str(item["index"]), item["role"], f"{item['tokens']:,}") for item in counts["items"]]
        print_table(("item", "role", "tokens"), listed, right=("item", "tokens"))


def trim(  # noqa: PLR0917  # typer makes an option of each
    body: Body,
    budget: Annotated[
        int | None,
        typer.Option(
            "--budget", metavar="N", parser=count_of(1), help="Most input tokens; else the model's context window."
        ),
    ] = None,
    model: ModelName = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show a table of what was done with each message.")
    ] = False,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="OUT", help="File for the trimmed body.")] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Trim a request body and print it. Response modes are not applied."""
    from gateway.core.context_budget import ContextOptions
    from gateway.core.session import Remembered

    content = _read(body)

    async def work(inspector: Inspector) -> tuple[bytes, dict[str, Any]]:
        call, asked = inspector.read(content, model=model, options=ContextOptions(trim="auto", budget=budget))
        trimmed, plan = await inspector.trim(call, asked, Remembered())
        return trimmed, await inspector.trim_json(asked, plan, explain=True)

    trimmed, context = _run_inspector(config, work)
    if out is not None:
        _write(out, trimmed)
    if as_json:
        print_json(context)
    elif explain:
        _explain(context)
    elif out is None:
        sys.stdout.buffer.write(trimmed + b"\n")
    if not explain and not as_json:
        typer.echo(_summary(context), err=True)


def _explain(context: dict[str, Any]) -> None:
    rows = [
        (str(item["index"]), item["role"], f"{item['tokens']:,}", f"{item['sent_tokens']:,}", item["rule"])
        for item in context["items"]
    ]
    print_table(("item", "role", "tokens", "sent", "rule"), rows, right=("item", "tokens", "sent"))
    typer.echo(_summary(context), err=True)


def _summary(context: dict[str, Any]) -> str:
    trimmed = ", ".join(f"{rule} {number}" for rule, number in context["trimmed"].items()) or "nothing changed"
    budget = f" of {context['budget']:,}" if context["budget"] is not None else ", no known budget"
    return f"{context['original_tokens']:,} → {context['tokens']:,} tokens{budget} ({trimmed})" + (
        f"\nnote: {context['note']}" if "note" in context else ""
    )


def _read(name: str) -> bytes:
    if name == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(name).read_bytes()
    except OSError as error:
        stop(f"{name} cannot be read: {error.strerror}", Exit.FAILED)


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        stop(f"{path} cannot be written: {error.strerror}", Exit.FAILED)


def _known_wire(name: str | None) -> str | None:
    from gateway.context.inspector import WIRES

    if name is not None and name not in WIRES:
        stop(f"--wire must be one of {', '.join(WIRES)}, not {quoted(name)}.", Exit.USAGE)
    return name


def _run_inspector(config: Path | None, work: Callable[[Inspector], Coroutine[Any, Any, T]]) -> T:
    """Return the result of `work` with the configured routes, limits and strategies, without learned corrections."""
    from gateway.app.resources import inspector_of
    from gateway.core.errors import GatewayError

    settings = load(config).settings

    async def run() -> T:
        with inspector_of(settings) as inspector:
            return await work(inspector)

    with config_problems():
        try:
            return asyncio.run(run())
        except GatewayError as fault:
            stop(fault.message, Exit.FAILED)
