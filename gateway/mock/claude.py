"""Apply the rules of a Claude model to one request, and create the thinking of its response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from gateway.mock import betas, tokens
from gateway.mock.binding import BindingTerms, Checked, check, create
from gateway.mock.claude_fields import Controls
from gateway.mock.claude_requests import (
    mismatch,
    refuse_forced_choice,
    refuse_messages,
    refuse_sampling,
    refuse_task_budget,
    refuse_thinking,
)
from gateway.mock.claude_rules import ModelRules, rules_of
from gateway.mock.claude_sizes import sizes_of, total_of
from gateway.mock.compactions import CompactionContext, refuse_request, signed_block, signed_summary, summary_of
from gateway.mock.context_edits import Compact, Edit, apply_edits, read_edits
from gateway.mock.fallbacks import Fallback, read_fallbacks
from gateway.mock.prefixes import Prefix
from gateway.mock.prompts import extra_tokens, last_text
from gateway.mock.tool_changes import refuse_tool_changes
from gateway.mock.wire import ApiError, JsonObject, decode

if TYPE_CHECKING:
    from gateway.mock.provider import MockExchange

#: Characters of the user's last message that the thinking quotes.
_QUOTED: Final = 80


class ThinkingOutput(NamedTuple):
    """The thinking blocks of a response, and their tokens, which are output."""

    blocks: tuple[JsonObject, ...] = ()
    tokens: int = 0


NO_THOUGHTS: Final = ThinkingOutput()


@dataclass(frozen=True, slots=True)
class ClaudeCall:
    """A request that a model accepts: the one that was asked for, or one that answers if it refuses."""

    model: str
    controls: Controls
    terms: BindingTerms
    checked: Checked
    messages: list[JsonObject]
    """The messages as the model reads them, after context edits."""
    edits: tuple[Edit, ...] = ()
    applied: list[JsonObject] | None = None
    """What context edits cleared; None: the request has none."""
    max_tokens: int | None = None
    """The limit of this attempt; None: the request's."""

    @property
    def transformations(self) -> list[JsonObject] | None:
        """Return what the response reports about thinking blocks; None: nothing, without the beta."""
        return self.checked.transformations if self.terms.has_beta else None

    @property
    def compact(self) -> Compact | None:
        """Return the edit that compacts at a threshold."""
        return next((edit for edit in self.edits if isinstance(edit, Compact)), None)

    @property
    def original_tokens(self) -> int:
        """Return the tokens of the messages before context edits."""
        return total_of(self.checked.messages)

    def sizes(self) -> list[tuple[bytes, int]]:
        """Return each message as billed: without dropped blocks and without signatures, and its tokens."""
        return sizes_of(self.messages)

    def think(self, exchange: MockExchange, max_tokens: int) -> ThinkingOutput:
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
        return ThinkingOutput(tuple(create(shown, self.checked, self.terms, exchange.number)), spent)

    def summarized(self) -> tuple[JsonObject, ClaudeCall]:
        """Return an unsigned compaction block of all messages, and the request after it."""
        block: JsonObject = {"type": "compaction", "content": summary_of(self.messages)}
        checked = self.checked.after(block)
        return block, replace(self, checked=checked, messages=checked.messages)

    def signed(self, text: str) -> JsonObject:
        """Return a signed compaction block with the summary `text`."""
        checked = self.checked
        return signed_summary(text, checked.prefix, checked.messages, checked.lineage, self.terms.rules)

    def continues(self, text: str) -> None:
        """Take a text that another model said before it refused, which this one goes on from."""
        self.checked.prefix.add("partial", "assistant", {"type": "text", "text": text}, opens=True)


class _Request(NamedTuple):
    """What all attempts to answer a request have in common."""

    exchange: MockExchange
    messages: list[JsonObject]
    betas: frozenset[str]
    counts_only: bool


def enforce(
    exchange: MockExchange, model: str, messages: list[JsonObject], *, counts_only: bool = False
) -> list[ClaudeCall]:
    """Apply the rules of `model` to a request, and those of the models that answer if it refuses.

    Args:
        exchange: the call.
        model: as asked for.
        messages: as sent.
        counts_only: the request only counts tokens, so that nothing is generated after its last message.

    Returns:
        The request for each model, in the order in which they are asked; empty if the provider has no rules for it.

    Raises:
        ApiError: 400, a model does not accept the request.
    """
    table = exchange.provider.claude
    rules = rules_of(table, model)
    if rules is None:
        return []
    controls = decode(exchange.request.body, Controls)
    request = _Request(exchange, messages, betas.betas_of(exchange.request), counts_only)
    fallbacks = read_fallbacks(controls, model, table, request.betas)
    calls = [_call(request, Fallback(model, rules, controls, None, is_named=True))]
    for fallback in fallbacks:
        try:
            calls.append(_call(request, fallback))
        except ApiError:
            if fallback.is_named:
                raise
    return calls


def _call(request: _Request, attempt: Fallback) -> ClaudeCall:
    controls, rules, messages = attempt.controls, attempt.rules, request.messages
    behaviour, memory = request.exchange.behaviour, request.exchange.provider.prefix_memory
    _refuse_fields(request, controls, rules)
    thinks = controls.mode(rules) in ("adaptive", "enabled")
    edits = read_edits(controls.context_management, request.betas, thinks=thinks)
    if any(isinstance(edit, Compact) for edit in edits) and not rules.compacts:
        raise ApiError(400, "context_management: This model does not support `compact_20260112`.")
    terms = BindingTerms(
        rules=rules,
        account=behaviour.account,
        mismatch=mismatch(controls, rules, is_old_account=behaviour.old_account),
        has_beta=betas.BINDING in request.betas,
        signed=signed_block(messages, CompactionContext(request.betas, edits, controls.task_budget)),
    )
    checked = check(messages, Prefix(controls.system, controls.tools), terms, memory)
    refuse_tool_changes(controls.tools or [], rules, messages, request.betas)
    overhead = overhead_of(controls.system, controls.tools)
    edited = apply_edits(checked.messages, edits, overhead=overhead, keeps_thinking=rules.keeps_thinking)
    applied = edited.applied if controls.context_management is not None else None
    return ClaudeCall(attempt.model, controls, terms, checked, edited.messages, edits, applied, attempt.max_tokens)


def _refuse_fields(request: _Request, controls: Controls, rules: ModelRules) -> None:
    refuse_thinking(controls, rules, request.betas)
    refuse_task_budget(controls, rules, request.betas)
    refuse_sampling(controls, rules)
    if controls.compaction is not None and not request.counts_only:
        refuse_request(controls, rules, request.messages, request.betas)
        return
    refuse_forced_choice(controls, rules)
    if not request.counts_only:
        refuse_messages(controls, rules, request.messages)


def overhead_of(system: object, tools: object) -> int:
    """Return the tokens of what goes with the messages."""
    prompt = tokens.count_json(system) + tokens.MESSAGE_TOKENS if system else 0
    return prompt + extra_tokens(tools)
