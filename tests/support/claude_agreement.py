"""Compare the built-in provider's rules for Claude models with `claude_checker` on generated sessions.

python -m tests.support.claude_agreement 10000 [SEED]
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from gateway.mock import CLAUDE_RULES, Behaviour, MockProvider, ToolCall, Turn
from gateway.mock.app import create_app
from tests.support.claude_checker import ClaudeChecker
from tests.support.claude_edits import MODELS, Edits
from tests.support.claude_grammar import Finding, Model

Json = dict[str, Any]

#: rules that the built-in provider leaves to the grammar of messages
_GRAMMAR = ("first", "empty", "pairs")
#: rules that the pages state only for the newest models
_FIELDS = ("thinking_type", "between_tools", "forced", "sampling", "prefill")
_BINDING = ("prefix_changed", "gap", "restored")
_TEXTS = (
    ("bound to a different conversation", _BINDING),
    ("cannot be modified", ("modified",)),
    ("Invalid `", ("unknown_signature",)),
    ("block_binding: Extra inputs", ("beta",)),
    ("thinking.type.", ("thinking_type",)),
    ("thinking.between_tools", ("between_tools",)),
    ("tool_choice", ("forced",)),
    ("temperature", ("sampling",)),
    ("top_", ("sampling",)),
    ("prefill", ("prefill",)),
)
_PATH = re.compile(r"messages\.\d+(?:\.content\.\d+)?")


@dataclass
class Result:
    """The findings of comparing some sessions."""

    requests: int = 0
    unsure: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    disagreements: list[str] = field(default_factory=list)


class Caller:
    """Call the built-in provider without a network."""

    def __init__(self, *, old_account: bool) -> None:
        self.provider = MockProvider(claude=CLAUDE_RULES, behaviour=Behaviour(old_account=old_account))
        self._app = create_app(self.provider)

    def call(self, body: Json, headers: Mapping[str, str]) -> tuple[int, Json]:
        """Return the status and the body of a response."""
        return asyncio.run(self._call(json.dumps(body).encode(), headers))

    async def _call(self, raw: bytes, headers: Mapping[str, str]) -> tuple[int, Json]:
        sent: list[MutableMapping[str, Any]] = []

        async def receive() -> MutableMapping[str, Any]:
            if not sent:
                return {"type": "http.request", "body": raw}
            return await asyncio.Future[MutableMapping[str, Any]]()

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": "/v1/messages", "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }  # fmt: skip
        await self._app(scope, receive, send)
        return sent[0]["status"], json.loads(b"".join(one.get("body", b"") for one in sent[1:]))


def compare(seed: int, result: Result) -> None:
    """Play one generated session and add the findings to `result`."""
    chance = random.Random(seed)
    caller = Caller(old_account=chance.random() < 0.3)
    checker = ClaudeChecker(new_account=not caller.provider.behaviour.old_account)
    edits = Edits(chance, _first_body(chance))
    trail: list[str] = []
    for _ in range(chance.randint(3, 10)):
        before = copy.deepcopy(edits.body)
        trail.append(",".join(edits.edit() for _ in range(chance.choice([0, 0, 1, 1, 2, 3]))))
        caller.provider.push(_turn(chance))
        status, response = caller.call(edits.body, edits.headers)
        beta = edits.headers.get("anthropic-beta", "")
        findings = [one for one in checker.check(edits.body, beta) if one.rule not in _GRAMMAR]
        result.requests += 1
        wrong = _differs(findings, status, response, knows_fields=Model.of(edits.body["model"]).checks_prefix)
        result.outcomes[f"{status} {'/'.join(sorted({one.rule for one in findings}))}"] += 1
        if wrong and all(one.sure for one in findings):
            result.disagreements.append(
                f"seed {seed} after {trail}: {wrong}; checker: {[(one.path, one.rule, one.detail) for one in findings]}"
            )
            return
        if not all(one.sure for one in findings):
            # From here on, the two may remember different things.
            result.unsure += 1
            return
        if status != 200:
            edits.body = before
            caller.provider.reset()
            continue
        checker.record(edits.body, response, beta)
        edits.append({"role": "assistant", "content": response["content"]})
        edits.append({"role": "user", "content": _reply(chance, response["content"])})


def _differs(findings: list[Finding], status: int, response: Json, *, knows_fields: bool) -> str | None:
    """Return how the provider's response differs from the findings, or None.

    `knows_fields`: the pages say which fields the model accepts.
    """
    refused = [one for one in findings if one.effect == "refused"]
    if status == 200:
        if refused:
            return "the provider accepted it"
        reported = response.get("input_transformations")
        if reported is None:
            return None
        theirs = [(one["path"], one["type"]) for one in reported]
        names = {"dropped": "thinking_dropped", "tolerated": "thinking_mismatch_allowed"}
        ours = [(one.path, names[one.effect]) for one in findings]
        return None if theirs == ours else f"the provider reports {theirs}"
    message = str(response["error"]["message"])
    rules = next((rules for text, rules in _TEXTS if text in message), ())
    if not knows_fields and set(rules) <= set(_FIELDS):
        return None
    same = next((one for one in refused if one.rule in rules), None)
    path = _PATH.search(message)
    if same is None:
        return f"the provider refused it: {message}"
    if path is not None and same.path.startswith("messages") and not path[0].startswith(same.path):
        return f"the provider refused another block: {message}"
    return None


def _first_body(chance: random.Random) -> Json:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    words: Any = "Repair the program."
    if chance.random() < 0.3:
        words = [{"type": "text", "text": "Repair what this shows."}, image]
    tools = [
        {"name": name, "description": f"Do {name}.", "input_schema": {"type": "object"}} for name in ("read", "search")
    ]
    return {
        "model": chance.choice(MODELS),
        "max_tokens": 3000,
        "system": "You repair programs.",
        "tools": tools,
        "thinking": {"type": "adaptive"},
        "messages": [{"role": "user", "content": words}],
    }


def _turn(chance: random.Random) -> Turn:
    thinking = tuple(f"I look at part {chance.randrange(10**6)}." for _ in range(chance.choice([1, 1, 1, 2, 3])))
    calls = tuple(ToolCall("read", json.dumps({"path": f"{chance.randrange(99)}"})) for _ in range(chance.randrange(3)))
    return Turn(text=f"Part {chance.randrange(99)}.", thinking=thinking, tool_calls=calls)


def _reply(chance: random.Random, content: list[Json]) -> str | list[Json]:
    calls = [block["id"] for block in content if block["type"] == "tool_use"]
    if not calls:
        return f"Go on with part {chance.randrange(99)}."
    results: list[Json] = [
        {"type": "tool_result", "tool_use_id": call, "content": f"result {chance.randrange(99)}"} for call in calls
    ]
    if chance.random() < 0.2:
        results.append({"type": "text", "text": "Be careful."})
    return results


def main() -> int:
    """Compare as many sessions as the command line says; return 1 if the two disagree."""
    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    result = Result()
    for number in range(count):
        compare(seed * 1_000_000 + number, result)
    for line in result.disagreements:
        print(line)
    for name, times in result.outcomes.most_common():
        print(f"{times:7} {name}")
    print(f"{count} sessions, {result.requests} requests, {len(result.disagreements)} disagreements")
    print(f"{result.unsure} sessions ended early where the pages leave a case open")
    return bool(result.disagreements)


if __name__ == "__main__":
    sys.exit(main())
