"""Apply the rules of a Claude model to one request, and create the thinking of its response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from gateway.mock import betas, tokens
from gateway.mock.binding import BindingTerms, Checked, check, create
from gateway.mock.cache_marks import unmarked
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
    """The thinking blocks of a response, and their output tokens."""

    blocks: tuple[JsonObject, ...] = ()
    tokens: int = 0


NO_THINKING: Final = ThinkingOutput()


@dataclass(frozen=True, slots=True)
class ClaudeCall:
    """A request that was accepted by one model: the requested model or one of its fallbacks."""

    model: str
    controls: Controls
    terms: BindingTerms
    checked: Checked
    messages: list[JsonObject]
    """The messages as the model reads them, after context edits."""
    edits: tuple[Edit, ...] = ()
    applied: list[JsonObject] | None = None
    """A report of what context edits cleared; None: the request has no context edits."""
    max_tokens: int | None = None
    """The limit of this attempt; None: the request's."""

    @property
    def transformations(self) -> list[JsonObject] | None:
        """Return the response's report about thinking blocks, or None without the beta."""
        return self.checked.transformations if self.terms.has_beta else None

    @property
    def compact(self) -> Compact | None:
        """Return the edit that compacts at a threshold, or None."""
        return next((edit for edit in self.edits if isinstance(edit, Compact)), None)

    @property
    def original_tokens(self) -> int:
        """Return the tokens of the messages before context edits."""
        return total_of(self.checked.messages)

    def sizes(self) -> list[tuple[bytes, int]]:
        """Return each message without dropped blocks and signatures, which are not billed, and its tokens."""
        return sizes_of(self.messages)

    def think(self, exchange: MockExchange, max_tokens: int) -> ThinkingOutput:
        """Return the thinking of the response. It is empty if thinking is off or `max_tokens` leaves no room for it."""
        messages = self.checked.messages
        if not self.controls.thinks(self.terms.rules, messages):
            return NO_THINKING
        scripted = exchange.turn.thinking if exchange.turn else ()
        texts: Sequence[str] = scripted or (f"The request says: {last_text(messages)[:_QUOTED]}",)
        size = sum(map(tokens.count, texts))
        if size >= max_tokens:
            return NO_THINKING
        visible = [""] * len(texts) if self.controls.hides_thinking else texts
        return ThinkingOutput(tuple(create(visible, self.checked, self.terms, exchange.number)), size)

    def summarized(self) -> tuple[JsonObject, ClaudeCall]:
        """Return an unsigned compaction block of all messages, and the request after it."""
        block: JsonObject = {"type": "compaction", "content": summary_of(self.messages)}
        checked = self.checked.after(block)
        return block, replace(self, checked=checked, messages=checked.messages)

    def signed(self, text: str) -> JsonObject:
        """Return a signed compaction block with the summary `text`."""
        checked = self.checked
        return signed_summary(text, checked.prefix, checked.messages, checked.lineage, self.terms.rules)

    def continue_from(self, text: str) -> None:
        """Add the text that another model sent before it refused; this model continues the text."""
        self.checked.prefix.add("partial", "assistant", {"type": "text", "text": text}, opens=True)


class _Request(NamedTuple):
    """The data that all attempts to respond to a request share."""

    exchange: MockExchange
    messages: list[JsonObject]
    betas: frozenset[str]
    counts_only: bool


def enforce(
    exchange: MockExchange, model: str, messages: list[JsonObject], *, counts_only: bool = False
) -> list[ClaudeCall]:
    """Apply the rules of the requested model and of its fallbacks to a request.

    Args:
        exchange: the call.
        model: the requested model.
        messages: as sent.
        counts_only: the request only counts tokens, so that nothing is generated after its last message.

    Returns:
        The request for each model, in the order in which they are tried; empty if the provider has no rules for
        `model`.

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


def overhead_of(system: object, tools: Sequence[JsonObject] | None) -> int:
    """Return the tokens of the overhead: system prompt and tools. Cache marks have none."""
    prompt = tokens.count_json(system) + tokens.MESSAGE_TOKENS if system else 0
    return prompt + extra_tokens([unmarked(tool) for tool in tools or ()])
