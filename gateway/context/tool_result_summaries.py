"""Have a model summarize tool results, once for each result.

They are made once the call itself is held, so that they cannot take what it needs. Together they may cost a share of
what is left; the newest results go first, and a result without a summary is shown as an extract.

Calls side by side that show the same result wait for the first of them, which asks for all. Should it be cut before it
has decided, the next one asks. This holds within one process: another one asks for itself, and the first decision that
is in the store stays.
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
from gateway.core.ledger.charging import affordable_input, rate_of
from gateway.core.ledger.session_key import SessionKey
from gateway.core.modes import readable
from gateway.core.modes.summary import LONGEST_ANSWER, MOST, affordable, asking, is_taken, weight

OPERATION: Final = "result_summary"
#: all summaries for one call may take one part in so many of the calls and input tokens that the budgets leave
_SHARE: Final = 4


class ToolResultSummaries:
    """Has results summed up. Shared by all calls. `model`: by whom; None: by nobody."""

    def __init__(self, results: ToolResultRenderer, summaries: Summaries, model: SummaryModel | None) -> None:
        self._results = results
        self._summaries = summaries
        self._model = model
        #: results that a call is deciding on; a future gives that call's id, or None where it was cut before
        self._deciding: dict[tuple[SessionKey, str], asyncio.Future[str | None]] = {}

    @property
    def is_on(self) -> bool:
        """Whether anybody makes summaries."""
        return self._model is not None

    async def make(self, messages: Sequence[bytes], state: CallState) -> bool:
        """Decide on all results that are open; whether that was done, so that the call must be composed anew.

        `messages`: the request's, as they came.
        """
        showing, session, model = state.context.shown, state.session, self._model
        if showing is None or session is None or model is None or not showing.pending:
            return False
        left, is_decided = list(showing.pending), False
        while left:
            own = [one for one in left if (session, one.handle) not in self._deciding]
            theirs = {one.handle: self._deciding[session, one.handle] for one in left if one not in own}
            if own:
                is_decided |= await self._decide(messages, own, session, model, state)
            if theirs:
                await asyncio.wait(set(theirs.values()))
                callers = dict.fromkeys(one.result() for one in theirs.values())
                _note(state, [f"asked for by call {call_id}" for call_id in callers if call_id is not None])
                is_decided |= any(callers)
            left = [one for one in left if one.handle in theirs and theirs[one.handle].result() is None]
        return is_decided

    async def _decide(
        self,
        messages: Sequence[bytes],
        results: Sequence[PendingExtract],
        session: SessionKey,
        model: SummaryModel,
        state: CallState,
    ) -> bool:
        """Decide on results for all calls that show them; whether that was kept."""
        deciding: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        keys = [(session, one.handle) for one in results]
        self._deciding |= dict.fromkeys(keys, deciding)
        call_id = None
        try:
            said = dict.fromkeys((one.handle for one in results), EXTRACT)
            said |= await self._asked(messages, results, session, model, state)
            is_kept = await self._results.decide(said, session)
            call_id = state.incoming.call_id
            return is_kept
        finally:
            for key in keys:
                del self._deciding[key]
            deciding.set_result(call_id)

    async def _asked(
        self,
        messages: Sequence[bytes],
        results: Sequence[PendingExtract],
        session: SessionKey,
        model: SummaryModel,
        state: CallState,
    ) -> Mapping[str, str]:
        """The summaries of the results that can be afforded, by handle."""
        questions = await asyncio.to_thread(lambda: [_question(messages, one, model) for one in results])
        asked = [(one, question) for one, question in zip(results, questions, strict=True) if question is not None]
        costs = [weight(question.messages) + question.max_tokens for _, question in asked]
        chosen = [asked[number] for number in affordable(costs, *_allowed(model, state.budget.accounts.balances))]
        answers = await self._summaries.answers([question for _, question in chosen], session, state)
        said, notes = {}, []
        for (one, _), (text, note) in zip(chosen, answers, strict=True):
            is_good = text is not None and is_taken(text, one.limits.limit)
            if text is not None and is_good:
                said[one.handle] = text
            notes.append(note if is_good or text is None else f"none: {note} was answered with more than was asked for")
        _note(state, notes)
        return said


def _note(state: CallState, said: Sequence[str]) -> None:
    before = state.notes.get("result_summaries")
    if said:
        state.notes["result_summaries"] = "; ".join([*([before] if before else []), *said])


def _allowed(model: SummaryModel, balances: Sequence[Balance]) -> tuple[int | None, int]:
    """Tokens and calls that summaries may take of what the budgets still allow; None: as many as they like."""
    tokens = affordable_input(balances, LONGEST_ANSWER, rate_of(model.facts.price, 0, None))
    calls = [balance.left("calls") for balance in balances if balance.key.kind != "rate"]
    most = min((left // _SHARE for left in calls if left is not None), default=MOST)
    return tokens // _SHARE if tokens is not None else None, min(most, MOST)


def _question(messages: Sequence[bytes], result: PendingExtract, model: SummaryModel) -> SummaryQuestion | None:
    """What the model is asked; None where it has no room for it."""
    limit = min(result.limits.limit, model.facts.output or result.limits.limit)
    asked = asking(_tool(messages, result), readable(result.raw), limit, model.room)
    return SummaryQuestion(OPERATION, model.name, asked, limit) if asked is not None else None


def _tool(messages: Sequence[bytes], result: PendingExtract) -> str:
    """The name of the tool that gave a result: the call before it says it, or the result itself."""
    message, call_id = decode(result.raw), outline_of(result.raw).answers
    for raw in reversed(messages[: result.position]):
        if call_id is not None and b"tool_calls" in raw:
            names = dict(outline_of(raw).names)
            if call_id in names:
                return names[call_id]
    return str(message.get("name") or "unknown")
