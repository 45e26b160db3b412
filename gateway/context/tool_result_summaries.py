"""Have a model summarize tool results, once for each result.

- Budget: summaries are requested after the call itself is reserved, so that they cannot use its tokens. Together they
  may cost a share of what is left. The newest results come first. A result without a summary is shown as an extract.
- Concurrent calls with the same result: the first one requests the summary, and the others wait for it. If it is
  cancelled before, the next one requests it.
- Workers do not wait for each other. The first decision in the store stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from gateway.call.state import CallState
from gateway.call.types import PendingExtract
from gateway.context.summaries import Summaries, SummaryQuestion
from gateway.context.summary_choices import EXTRACT
from gateway.context.tool_results import ToolResultRenderer
from gateway.core.context_budget import SummaryModel
from gateway.core.conversation.message import decode, outline_of
from gateway.core.ledger.arithmetic import Balance
from gateway.core.ledger.charging import rate_of
from gateway.core.ledger.output_limit import affordable_input
from gateway.core.ledger.session_key import SessionKey
from gateway.core.modes import summarizable_text
from gateway.core.modes.summary import (
    MAX_SUMMARIES,
    MAX_SUMMARY_TOKENS,
    choose_affordable,
    is_accepted,
    prompt_tokens,
    result_summary_prompt,
)

OPERATION: Final = "result_summary"
#: The summaries for one call may use a quarter of the calls and input tokens that the budgets leave.
_SHARE: Final = 4


class ToolResultSummaries:
    """Has tool results summarized, for all calls. `model`: the model that does it; None: there are no summaries."""

    def __init__(self, results: ToolResultRenderer, summaries: Summaries, model: SummaryModel | None) -> None:
        self._results = results
        self._summaries = summaries
        self._model = model
        #: Results that a call is deciding on. The future returns the id of that call, or None if it was cancelled.
        self._deciding: dict[tuple[SessionKey, str], asyncio.Future[str | None]] = {}

    @property
    def is_on(self) -> bool:
        """Return whether a model makes summaries."""
        return self._model is not None

    async def make(self, messages: Sequence[bytes], state: CallState) -> bool:
        """Decide on all pending results; return True if any was decided, so that the call is composed again.

        `messages`: the messages of the request, unchanged.
        """
        shown, session, model = state.context.shown, state.session, self._model
        if shown is None or session is None or model is None or not shown.pending:
            return False
        left, is_decided = list(shown.pending), False
        while left:
            own = [result for result in left if (session, result.handle) not in self._deciding]
            others = {result.handle: self._deciding[session, result.handle] for result in left if result not in own}
            if own:
                is_decided |= await self._decide(messages, own, session, model, state)
            if others:
                await asyncio.wait(set(others.values()))
                callers = dict.fromkeys(result.result() for result in others.values())
                _note(state, [f"requested by call {call_id}" for call_id in callers if call_id is not None])
                is_decided |= any(callers)
            left = [result for result in left if result.handle in others and others[result.handle].result() is None]
        return is_decided

    async def _decide(
        self,
        messages: Sequence[bytes],
        results: Sequence[PendingExtract],
        session: SessionKey,
        model: SummaryModel,
        state: CallState,
    ) -> bool:
        """Decide on results for all calls that show them; return whether the decision was stored."""
        deciding: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        keys = [(session, result.handle) for result in results]
        self._deciding |= dict.fromkeys(keys, deciding)
        call_id = None
        try:
            summaries = dict.fromkeys((result.handle for result in results), EXTRACT)
            summaries |= await self._request(messages, results, session, model, state)
            is_kept = await self._results.decide(summaries, session)
            call_id = state.incoming.call_id
            return is_kept
        finally:
            for key in keys:
                del self._deciding[key]
            deciding.set_result(call_id)

    async def _request(
        self,
        messages: Sequence[bytes],
        results: Sequence[PendingExtract],
        session: SessionKey,
        model: SummaryModel,
        state: CallState,
    ) -> Mapping[str, str]:
        """Request summaries of the results that the budgets allow; return those that are good, by handle."""
        questions = await asyncio.to_thread(lambda: [_question(messages, result, model) for result in results])
        pairs = [
            (result, question) for result, question in zip(results, questions, strict=True) if question is not None
        ]
        costs = [prompt_tokens(question.messages) + question.max_tokens for _, question in pairs]
        chosen = [
            pairs[number]
            for number in choose_affordable(costs, *_summary_allowance(model, state.budget.accounts.balances))
        ]
        responses = await self._summaries.request_all([question for _, question in chosen], session, state)
        summaries, notes = {}, []
        for (result, _), (text, note) in zip(chosen, responses, strict=True):
            is_good = text is not None and is_accepted(text, result.limits.limit)
            if text is not None and is_good:
                summaries[result.handle] = text
            notes.append(note if is_good or text is None else f"none: the response to {note} is longer than requested")
        _note(state, notes)
        return summaries


def _note(state: CallState, notes: Sequence[str]) -> None:
    before = state.notes.get("result_summaries")
    if notes:
        state.notes["result_summaries"] = "; ".join([*([before] if before else []), *notes])


def _summary_allowance(model: SummaryModel, balances: Sequence[Balance]) -> tuple[int | None, int]:
    """Return the tokens and calls that summaries may use of the budgets; tokens are None if not limited."""
    tokens = affordable_input(balances, MAX_SUMMARY_TOKENS, rate_of(model.facts.price, 0, None))
    calls = [balance.free("calls") for balance in balances if balance.key.kind != "rate"]
    most = min((left // _SHARE for left in calls if left is not None), default=MAX_SUMMARIES)
    return tokens // _SHARE if tokens is not None else None, min(most, MAX_SUMMARIES)


def _question(messages: Sequence[bytes], result: PendingExtract, model: SummaryModel) -> SummaryQuestion | None:
    """Return the request for a summary; None if the model's window has no room for the result."""
    limit = min(result.limits.limit, model.facts.output or result.limits.limit)
    prompt = result_summary_prompt(_tool_name(messages, result), summarizable_text(result.raw), limit, model.room)
    return SummaryQuestion(OPERATION, model.name, prompt, limit) if prompt is not None else None


def _tool_name(messages: Sequence[bytes], result: PendingExtract) -> str:
    """Return the name of the tool that gave a result, from its tool call or from the result itself."""
    message, call_id = decode(result.raw), outline_of(result.raw).result_of
    for raw in reversed(messages[: result.position]):
        if call_id is not None and b"tool_calls" in raw:
            names = dict(outline_of(raw).names)
            if call_id in names:
                return names[call_id]
    return str(message.get("name") or "unknown")
