"""`gateway demo`: run a session with tools through a real gateway, without a key or network."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from gateway.cli.common import AsJson, Exit, config_problems, print_json, print_table, stop
from gateway.cli.numbers import count

_MODEL = "mock-small"
_SESSION = "demo"
#: context budget in input tokens; after some questions the conversation no longer fits into it
_CONTEXT = 1500
#: most output tokens of a response
_MAX_OUTPUT = 120
#: session budget in tokens; it is used up before all questions are asked
_BUDGET = 12_000
_COLUMNS = (
    "call",
    "",
    "last message",
    "response",
    "context",
    "sent",
    "allowed",
    "trimmed",
    "in",
    "out",
    "used",
    "left",
    "results as",
    "overhead",
)
_RIGHT = ("context", "sent", "allowed", "in", "out", "used", "left", "overhead")
#: columns that a small terminal leaves out, in this order
_FIRST_TO_GO = ("overhead", "results as", "", "last message", "out", "in", "response")
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search_orders",
            "description": "Find a customer's orders.",
            "parameters": {"type": "object", "properties": {"customer": {"type": "string"}}, "required": ["customer"]},
        },
    }
]


def demo(
    steps: Annotated[
        int, typer.Option(metavar="N", parser=count(1, 200), help="Number of questions that the user asks.")
    ] = 8,
    context: Annotated[
        int, typer.Option(metavar="N", parser=count(500), help="Most input tokens of a call (context.budget).")
    ] = _CONTEXT,
    budget: Annotated[
        int, typer.Option(metavar="N", parser=count(1000), help="Budget of the session in tokens (budget.tokens).")
    ] = _BUDGET,
    as_json: AsJson = False,
) -> None:
    """Run a sample session offline: show trimming, token counts, and what happens when the budget is used up."""
    from gateway import config
    from gateway.app.worker import build_app
    from gateway.cli.serve import only_provider
    from gateway.counters.registry import FALLBACK, Counters
    from gateway.mock.server import MockServer
    from gateway.server.serving import ServerThread, make_config

    started = time.monotonic()
    with config_problems():
        config.families()
    Counters().counter(FALLBACK)  # otherwise the first row would show the time to load it as overhead
    with MockServer() as provider:
        flags = {
            **only_provider("mock", provider.url, auth="none"),
            "store.url": "memory://",
            "context.budget": context,
            "budget.tokens": budget,
            "telemetry.log.level": "error",
        }
        app = build_app(lambda: config.load(environment={}, flags=flags, search=False))
        options = make_config(app, max_head_bytes=65536, max_body=2**24, head_timeout_s=20, grace_s=1)
        with ServerThread(options) as gateway, closing(_Client(gateway.url)) as client:
            rows = client.play(steps)
        billed = provider.provider.billed()
    total = json.loads(rows[-1]["headers"]["x-session-cumulative-token-usage"])["totalTokens"]
    if as_json:
        print_json(
            {
                "calls": rows,
                "refused": client.refused,
                "provider_billed_tokens": billed.total_tokens,
                "session_total_tokens": total,
            }
        )
    else:
        print_table(_COLUMNS, [_row(row) for row in rows], right=_RIGHT, first_to_go=_FIRST_TO_GO)
        typer.echo(f"\n{_trimmed(rows, context)}")
        if client.refused is not None:
            typer.echo(f"Call {len(rows) + 1} was refused: {client.refused['message']}")
        typer.echo(f"The session's total in the last response: {total:,} tokens.")
        typer.echo(f"The provider's own count for all {billed.calls} calls: {billed.total_tokens:,} tokens.")
        typer.echo(f"{time.monotonic() - started:.1f} s")
    if total != billed.total_tokens:
        stop("The two totals differ. This is a bug, please report it.", Exit.FAILED)


class _Client:
    """A sample agent: send questions, run the tools that the model calls, and send their results."""

    def __init__(self, url: str) -> None:
        import http.client  # imports the email package, which takes 20 ms; other commands do not need it

        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": "You look up orders and answer briefly."}]
        self._rows: list[dict[str, Any]] = []
        #: the error that ended the session
        self.refused: dict[str, Any] | None = None

    def close(self) -> None:
        self._connection.close()

    def play(self, steps: int) -> list[dict[str, Any]]:
        for step in range(1, steps + 1):
            self._messages.append(
                {"role": "user", "content": f"What did customer {1000 + step} order, and is it paid?"}
            )
            message = self._call(stream=False)
            if message is None:
                break
            for call in message.get("tool_calls") or []:
                orders = [_order(step, line) for line in range(8)]
                result = json.dumps(orders)
                self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            if message.get("tool_calls") and self._call(stream=True) is None:
                break
        return self._rows

    def _call(self, *, stream: bool) -> dict[str, Any] | None:
        """Return the message of the response, or None if the session's budget is used up."""
        limit = {"max_tokens": _MAX_OUTPUT}
        body = {"model": _MODEL, "messages": self._messages, "tools": _TOOLS, "stream": stream, **limit}
        headers = {"content-type": "application/json", "x-session-id": _SESSION}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = self._connection.getresponse()
        content = response.read().decode()
        if response.status != 200:  # noqa: PLR2004
            error = json.loads(content).get("error", {})
            if error.get("code") == "budget_exhausted":
                self.refused = error
                return None
            stop(f"The gateway answered {response.status}: {content}", Exit.FAILED)
        ours = {name.lower(): value for name, value in response.getheaders() if name.lower().startswith("x-")}
        message = _read_stream(content, ours) if stream else json.loads(content)["choices"][0]["message"]
        asked_with = self._messages[-1]["role"]
        self._messages.append({key: value for key, value in message.items() if value is not None})
        context = self._record(ours["x-gateway-request-id"])["context"]
        self._rows.append(
            {"asked_with": asked_with, "stream": stream, "answer": message, "headers": ours, "context": context}
        )
        return message

    def _record(self, request_id: str) -> dict[str, Any]:
        """Return the gateway's record of a call."""
        self._connection.request("GET", f"/api/calls/{request_id}")
        record: dict[str, Any] = json.loads(self._connection.getresponse().read())
        return record


def _read_stream(content: str, headers: dict[str, str]) -> dict[str, Any]:
    """Return the message of a stream. Its last comments replace the totals in `headers`, which were sent earlier."""
    text = ""
    for line in content.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                text += choice["delta"].get("content") or ""
        elif line.startswith(": x-"):
            name, _, value = line[2:].partition(": ")
            headers[name] = value
    return {"role": "assistant", "content": text}


def _order(step: int, line: int) -> dict[str, Any]:
    item = ("lamp", "desk", "chair", "shelf")[(step + line) % 4]
    return {"order": step * 100 + line, "item": item, "paid": line % 3 > 0, "depot": f"hall-{line * 7 % 5}"}


def _trimmed(rows: Sequence[dict[str, Any]], context: int) -> str:
    """Return text that says how many calls were trimmed to which limit, and how many tokens were not sent."""
    from gateway.core.modes import MODES

    records = [row["context"] for row in rows]
    cut = [record for record in records if record["trimmed"].keys() - set(MODES)]
    to_context = sum(record["budget"] == context for record in cut)
    shorter = sum(bool(record["trimmed"]) for record in records) - len(cut)
    saved = sum(record["original_tokens"] - record["tokens"] for record in records)
    return (
        f"Trimmed to the context budget of {context:,} tokens: {_call_count(to_context)}.\n"
        f"Trimmed to the remaining session budget: {_call_count(len(cut) - to_context)}.\n"
        f"Not trimmed, but sent with shorter tool results because the budget was low: {_call_count(shorter)}.\n"
        f"Not sent: about {saved:,} tokens. Numbers with ~ are estimates."
    )


def _call_count(number: int) -> str:
    return f"{number:,} call{'' if number == 1 else 's'}"


def _estimate_marked(tokens: int, source: str) -> str:
    """Return a number of tokens, with `~` if it is an estimate."""
    return f"{tokens:,}" if source == "exact" else f"~{tokens:,}"


def _row(row: dict[str, Any]) -> list[str]:
    headers, context = row["headers"], row["context"]
    usage = json.loads(headers["x-token-usage"])
    total = json.loads(headers["x-session-cumulative-token-usage"])
    calls = [call["function"]["name"] for call in row["answer"].get("tool_calls") or []]
    number = int(headers["x-session-cumulative-calls"])
    return [
        str(number),
        "stream" if row["stream"] else "",
        row["asked_with"],
        f"call {', '.join(calls)}" if calls else "text",
        _estimate_marked(context["original_tokens"], context["source"]),
        _estimate_marked(context["tokens"], context["source"]),
        f"{context['budget']:,}",
        headers["x-context-trimmed"].replace("none", ""),
        f"{usage['promptTokens']:,}",
        f"{usage['completionTokens']:,}",
        f"{total['totalTokens']:,}",
        f"{int(headers['x-session-budget-remaining-tokens']):,}",
        headers["x-response-mode"],
        f"{headers['x-gateway-overhead-ms']} ms",
    ]
