"""Measure how much thinking stays valid when sessions are trimmed with a model that binds thinking to its prefix.

    python bench/thinking.py [--turns 40] [--model claude-fable-5-2] [--json]

Each scenario plays one agent session through a gateway in front of the built-in provider, which enforces the rules of
today's Claude models. The client sends everything back on every turn, as agents do. The table has the errors that the
client saw, the calls that the provider refused (repaired by the gateway), the share of the received thinking blocks
that was sent to the provider, input tokens, and the cost of the session at the model's prices.

The second line of a scenario is the same session with a client that removes all thinking itself.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from gateway.mock import CLAUDE_RULES, MockProvider, MockServer  # noqa: E402
from tests.support.agents import STEPS, play  # noqa: E402
from tests.support.gateways import GatewayThread  # noqa: E402

#: USD per million tokens of Claude Fable 5.2
PRICE = {"input": 8, "output": 40, "cache_read": 0.2, "cache_write": 10}
SCENARIOS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no trimming": ({}, {}),
    "context budget": ({"context.budget": 12_000}, {}),
    "context budget, streamed": ({"context.budget": 12_000}, {"stream": True}),
    "client sends the beta": (
        {"context.budget": 12_000},
        {"headers": {"anthropic-beta": "thinking-binding-controls-2026-08-01"}},
    ),
    "session budget, modes": ({}, {"headers": {"x-session-budget-tokens": "640000"}}),
    "required steps": ({"steps": STEPS}, {}),
    "required steps, context budget": ({"steps": STEPS, "context.budget": 12_000}, {}),
}


@dataclass
class Row:
    """One session."""

    scenario: str
    thinking: str
    errors: int
    repairs: int
    #: share of the received blocks that was sent; None if the client sent none
    kept: float | None
    input_tokens: int
    cost_usd: float


def blocks(messages: list[dict[str, Any]]) -> int:
    """Return the number of thinking blocks in some messages."""
    contents = [one["content"] for one in messages if isinstance(one["content"], list)]
    return sum(part.get("type") == "thinking" for content in contents for part in content)


def measured(scenario: str, turns: int, model: str, *, strips: bool) -> Row:
    """Play one session."""
    settings, options = SCENARIOS[scenario]
    headers = {**options.get("headers", {}), "x-session-id": "bench"}
    with MockServer(MockProvider(claude=CLAUDE_RULES)) as server, tempfile.TemporaryDirectory() as folder:
        models = [{"match": "*", "provider": "upstream", "price": PRICE}]
        gateway = GatewayThread(Path(folder), server.url, {**settings, "models": models})
        try:
            session = play(
                gateway.base_url, server.provider, turns, model=model, strips_thinking=strips, caches=True,
                **{**options, "headers": headers},
            )  # fmt: skip
            cost = gateway.web.get("/api/sessions/bench").json["cost_usd"]
        finally:
            gateway.stop()
        calls = [call for call in server.provider.calls if call.path == "/v1/messages"]
        sent = sum(blocks(json.loads(call.body)["messages"]) for call in calls if call.status == 200)
        received = 0 if strips else sum(range(len(session.statuses)))
        return Row(
            scenario,
            "removed by the client" if strips else "as the gateway decides",
            len(session.errors),
            sum(call.status == 400 for call in calls),
            sent / received if received else None,
            server.provider.billed().input_tokens,
            float(cost or 0),
        )


def shown(rows: list[Row]) -> None:
    """Print a table."""
    print(f"{'scenario':32} {'thinking':24} {'errors':>6} {'repairs':>7} {'kept':>6} {'input':>9} {'USD':>8}")
    for row in rows:
        kept = f"{row.kept:6.1%}" if row.kept is not None else "     -"
        print(
            f"{row.scenario:32} {row.thinking:24} {row.errors:6} {row.repairs:7} {kept} {row.input_tokens:9,} "
            f"{row.cost_usd:8.3f}"
        )


def main(arguments: Mapping[str, Any]) -> None:
    """Run all scenarios."""
    rows = [
        measured(scenario, arguments["turns"], arguments["model"], strips=strips)
        for scenario in SCENARIOS
        for strips in (False, True)
    ]
    if arguments["json"]:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        shown(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--model", default="claude-fable-5-2")
    parser.add_argument("--json", action="store_true")
    main(vars(parser.parse_args()))
