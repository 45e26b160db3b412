"""Apply the rules of a Claude model to one request, and create the thinking of its response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from gateway.mock import tokens
from gateway.mock.binding import Checked, Terms, check, create
from gateway.mock.claude_requests import (
    Controls,
    has_beta,
    mismatch,
    refuse_forced_choice,
    refuse_messages,
    refuse_sampling,
    refuse_thinking,
)
from gateway.mock.claude_rules import rules_of
from gateway.mock.prefixes import Prefix, is_thinking
from gateway.mock.prompts import last_text
from gateway.mock.tool_changes import refuse_tool_changes
from gateway.mock.wire import JsonObject, decode, encode

if TYPE_CHECKING:
    from gateway.mock.provider import Exchange

#: Characters of the user's last message that the thinking quotes.
_QUOTED: Final = 80


class Thoughts(NamedTuple):
    """The thinking blocks of a response, and their tokens, which are output."""

    blocks: tuple[JsonObject, ...] = ()
    tokens: int = 0


NO_THOUGHTS: Final = Thoughts()


@dataclass(frozen=True, slots=True)
class ClaudeCall:
    """A request that its model accepts."""

    controls: Controls
    terms: Terms
    checked: Checked

    @property
    def transformations(self) -> list[JsonObject] | None:
        """Return what the response reports about thinking blocks; None: nothing, without the beta."""
        return self.checked.transformations if self.terms.has_beta else None

    def sizes(self) -> list[tuple[bytes, int]]:
        """Return each message as billed: without dropped blocks and without signatures, and its tokens."""
        found: list[tuple[bytes, int]] = []
        for message in self.checked.messages:
            billed = _without_signatures(message)
            found.append((encode(billed), tokens.count_json(billed) + tokens.MESSAGE_TOKENS))
        return found

    def think(self, exchange: Exchange, max_tokens: int) -> Thoughts:
        """Return the thinking of the response; none if the request turns it off or leaves no tokens for it."""
        messages = self.checked.messages
        if not self.controls.thinks(self.terms.rules, messages):
            return NO_THOUGHTS
        scripted = exchange.turn.thinking if exchange.turn else ()
        texts: Sequence[str] = scripted or (f"The request says: {last_text(messages)[:_QUOTED]}",)
        spent = sum(map(tokens.count, texts))
        if spent >= max_tokens:
            return NO_THOUGHTS
        shown = [""] * len(texts) if self.controls.hides_thinking else texts
        return Thoughts(tuple(create(shown, self.checked, self.terms, exchange.number)), spent)


def enforce(
    exchange: Exchange, model: str, messages: list[JsonObject], *, counts_only: bool = False
) -> ClaudeCall | None:
    """Apply the rules of `model` to a request; None if the provider has none for it.

    Args:
        exchange: the call.
        model: as asked for.
        messages: as sent.
        counts_only: the request only counts tokens, so that nothing is generated after its last message.

    Raises:
        ApiError: 400, the model does not accept the request.
    """
    provider, behaviour = exchange.provider, exchange.behaviour
    rules = rules_of(provider.claude, model)
    if rules is None:
        return None
    controls = decode(exchange.request.body, Controls)
    refuse_thinking(controls, rules, exchange.request)
    refuse_forced_choice(controls, rules)
    refuse_sampling(controls, rules)
    if not counts_only:
        refuse_messages(controls, rules, messages)
    terms = Terms(
        rules=rules,
        account=behaviour.account,
        mismatch=mismatch(controls, rules, is_old_account=behaviour.old_account),
        has_beta=has_beta(exchange.request),
    )
    checked = check(messages, Prefix(controls.system, controls.tools), terms, provider.prefix_memory)
    refuse_tool_changes(controls.tools or [], rules, messages, exchange.request)
    return ClaudeCall(controls, terms, checked)


def _without_signatures(message: JsonObject) -> JsonObject:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    hidden = ("signature", "data")
    shown = [
        {key: value for key, value in block.items() if key not in hidden} if is_thinking(block) else block
        for block in content
    ]
    return {**message, "content": shown}
