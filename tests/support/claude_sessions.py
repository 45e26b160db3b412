"""Agent sessions that use Anthropic's own context features: compaction, context edits, task budgets, fallbacks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import anthropic
from anthropic.types.beta import BetaMessage

from gateway.mock import MockProvider, Turn
from tests.support.agents import SYSTEM, TOOLS, result, script

Json = dict[str, Any]


@dataclass
class Feature:
    """The features that a session requests. `fields` are sent with every request except the request for a summary."""

    betas: list[str]
    fields: Json = field(default_factory=dict)
    model: str = "claude-opus-5-5"
    lines: int = 40
    compacts_every: int = 0
    """Number of turns after which the client asks for a summary; 0: never."""
    keeps: int = 0
    """Number of messages that the client keeps after a summary."""
    refuses_every: int = 0
    """Number of turns after which the first model refuses."""
    remaining_at: int = 0
    """The turn that sends the remaining task budget."""
    stream: bool = False
    lowers: tuple[int, int] = (0, 0)
    """The turn from which on the client requests a context budget, and that budget; 0: never."""


@dataclass
class Played:
    """The results of a session."""

    errors: list[str] = field(default_factory=list)
    responses: list[Json] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    """The JSON of each signed or unsigned compaction block, as the client sends it."""


class Agent:
    """A client that sends its whole history, and compacts it as documented."""

    def __init__(self, base_url: str, provider: MockProvider, feature: Feature, headers: dict[str, str]) -> None:
        self._client = anthropic.Anthropic(
            base_url=base_url.removesuffix("/v1"), api_key="none", max_retries=0, default_headers=headers
        )
        self._provider = provider
        self._feature = feature
        self.messages: list[Any] = [{"role": "user", "content": "Repair the program, part by part."}]
        self.headers: dict[str, str] = {}
        """Additional headers of the following requests."""
        self.played = Played()

    def play(self, turns: int) -> Played:
        """Play this number of turns; stop at the first error."""
        try:
            for number, turn in enumerate(self._turns(turns), 1):
                self._provider.push(turn)
                self._step(number)
                every = self._feature.compacts_every
                if every and number % every == 0:
                    self.compact()
        except anthropic.APIStatusError as error:
            self.played.errors.append(f"after {len(self.played.responses)} responses: {error.message}")
        return self.played

    def _turns(self, turns: int) -> Iterator[Turn]:
        every = self._feature.refuses_every
        for number, turn in enumerate(script(turns), 1):
            if every and number % every == 0:
                said = "I begin." if self._feature.stream and number % (2 * every) == 0 else ""
                yield replace(turn, refusals=(("bio", "cyber")[number % 2],), refused_text=said)
            else:
                yield turn

    def _step(self, number: int) -> None:
        fields = self._feature.fields
        if number == self._feature.remaining_at:
            left = {**fields["output_config"]["task_budget"], "remaining": 30_000}
            fields = {**fields, "output_config": {"task_budget": left}}
        start, budget = self._feature.lowers
        if start and number >= start:
            self.headers = {"x-context-budget": str(budget)}
        content = self._ask(self.messages, **fields)["content"]
        self.messages.append({"role": "assistant", "content": content})
        self.played.blocks += [dumped(block) for block in content if block["type"] == "compaction"]
        calls = [block["id"] for block in content if block["type"] == "tool_use"]
        text = result(number, self._feature.lines)
        found = [{"type": "tool_result", "tool_use_id": one, "content": text} for one in calls]
        self.messages.append({"role": "user", "content": found or "Go on."})

    def compact(self) -> None:
        """Replace older messages by their summary. They end with a tool result; the kept messages start after it."""
        count = len(self.messages) - self._feature.keeps
        self.messages[:count] = [{"role": "assistant", "content": self.ask_for_summary(self.messages[:count])}]
        if not self._feature.keeps:
            self.messages.append({"role": "user", "content": "Go on with the next part."})

    def ask_for_summary(self, messages: list[Any]) -> list[Json]:
        """Return the signed block that replaces these messages."""
        self._provider.push(Turn())
        answer = self._ask(messages, compaction={"type": "summarize"}, max_tokens=2_000)
        assert answer["stop_reason"] == "compaction", answer
        content: list[Json] = answer["content"]
        self.played.blocks.append(dumped(content[0]))
        return content

    def _ask(self, messages: list[Any], **fields: Any) -> Json:
        request: Json = {
            "model": self._feature.model, "max_tokens": 1_000, "system": SYSTEM, "tools": TOOLS, "messages": messages,
            "thinking": {"type": "adaptive"}, "betas": self._feature.betas,
            "extra_headers": self.headers, **fields,
        }  # fmt: skip
        message: BetaMessage
        if self._feature.stream:
            with self._client.beta.messages.stream(**request) as events:
                message = events.get_final_message()
                self.played.headers.append(dict(events.response.headers))
        else:
            raw = self._client.beta.messages.with_raw_response.create(**request)
            self.played.headers.append(dict(raw.headers))
            message = raw.parse()
        response = message.to_dict(mode="json")
        self.played.responses.append(response)
        return response


def dumped(value: object) -> str:
    """Return JSON as the SDK writes it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
