"""What is known of one call on its way: each step reads what those before it found, and the record is made of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final

from gateway.budgeting import Book, Taken
from gateway.calls import Incoming, Stepped
from gateway.core.counting.measure import Wire
from gateway.core.errors import GatewayError
from gateway.core.fitting.summary import Use
from gateway.core.forwarding import header
from gateway.core.modes import ResponseMode
from gateway.core.plan import Plan
from gateway.core.ports import AtWork, CallRecord, Outcome, SessionKey, UpstreamReply, told_nobody
from gateway.core.routing import Route
from gateway.core.session import Remembered
from gateway.core.spending import Charged
from gateway.core.steps import Step
from gateway.core.usage import Totals
from gateway.dialects.base import Answer, Call, Dialect
from gateway.dialects.contents import Contents
from gateway.dialects.elsewhere import gone_on_from, is_in_background, kept_elsewhere
from gateway.dialects.fields import AnyFields
from gateway.dialects.limits import least_output, output_limit
from gateway.dialects.tools import NOT_NARROWED, Narrowing
from gateway.planning import Asked, Weighing
from gateway.results import Showing

#: the status of a call whose client did not wait for an answer
CLIENT_CLOSED: Final = 499
#: https://www.w3.org/TR/trace-context/#traceparent-header
_TRACE: Final = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

_NOTHING_REMEMBERED: Final = Remembered()
_NO_ROUTE: Final = Route("", "")
_NOBODY: Final = Charged("")
_NO_BOOK: Final = Book()


@dataclass(slots=True)
class Progress:
    """One call: what came in, and what became of it so far.

    `started_at` is wall time, `sent_at` and `head_at` are monotonic. `routes`: where it may go, `route`: the one whose
    turn it is, `is_too_long`: for that one, `is_at_work`: it may be working on it, which `at_work` is told.
    `others`: models that the call tells its providers to call in the place of its own, at each of them; `advisors`:
    those that its own one may ask.
    `affordable`: input tokens that its budgets allow. `is_holding`: something may be held.
    `contents`: of the call, and their `weighing`, where a step had to look at them; `step`: the one that it was begun
    in; `narrowed`: how the provider is told which tools may be called.
    `before`: the session's totals as they were read before it was sent, where they go out before its answer.
    `reader` tells what was read of an answer that has not come to its end; `billed`: the provider charges for it;
    `is_unheard`: its client had left before it came to that.
    `record` and `totals` are there once it was settled, or was about to be.
    """

    incoming: Incoming
    started_at: float
    call: Call | None = None
    session: SessionKey | None = None
    derived: bool = False
    routes: tuple[Route, ...] = (_NO_ROUTE,)
    route: Route = _NO_ROUTE
    others: tuple[Route, ...] = ()
    advisors: tuple[Route, ...] = ()
    is_too_long: bool = False
    is_at_work: bool = False
    at_work: AtWork = told_nobody
    charged: Charged = _NOBODY
    book: Book = _NO_BOOK
    remembered: Remembered = _NOTHING_REMEMBERED
    stepped: Stepped | None = None
    contents: Contents | None = None
    weighing: Weighing | None = None
    step: Step | None = None
    narrowed: Narrowing = NOT_NARROWED
    mode: ResponseMode | None = None
    showing: Showing | None = None
    asked: Asked | None = None
    use: Use = "ask"
    plan: Plan | None = None
    affordable: int | None = None
    before: Totals | None = None
    is_holding: bool = False
    taken: Taken | None = None
    sending: AbstractAsyncContextManager[UpstreamReply] | None = None
    sent_at: float | None = None
    head_at: float | None = None
    status: int = CLIENT_CLOSED
    outcome: Outcome = "client_left"
    fault: GatewayError | None = None
    answer: Answer | None = None
    reader: Callable[[], Answer] | None = None
    billed: bool = False
    is_unheard: bool = False
    is_event_stream: bool = False
    response_bytes: int = 0
    notes: dict[str, str] = field(default_factory=dict)
    record: CallRecord | None = None
    totals: Totals | None = None
    is_settled: bool = False

    @classmethod
    def of(cls, incoming: Incoming, started_at: float) -> Progress:
        """Of a call that has just come in."""
        purpose, parent = incoming.purpose, header(incoming.headers, b"traceparent")
        if purpose is None:
            return cls(incoming, started_at, notes={"traceparent": parent.decode()} if _TRACE.fullmatch(parent) else {})
        return cls(incoming, started_at, derived=purpose.derived, notes=dict(purpose.notes))

    @property
    def dialect(self) -> Dialect:
        """The format that the client speaks, and the provider too."""
        return self.incoming.endpoint.dialect

    @property
    def is_billed_later(self) -> bool:
        """Whether what it begins is billed after its answer, where no session sees it."""
        endpoint = self.incoming.endpoint
        return endpoint.deferred or (self.call is not None and is_in_background(self.call.fields, endpoint.wire))

    @property
    def unseen(self) -> tuple[str, ...]:
        """What of the request stands for content that the provider keeps."""
        if self.call is None:
            return ()
        # What is shown of results is not all that came.
        contents = self.asked.contents if self.asked is not None and self.showing is None else None
        return kept_elsewhere(self.call.fields, self.incoming.endpoint.wire, contents)

    def kept_by(self, *routes: Route) -> int:
        """Tokens of an earlier answer that it goes on from, as the session knows of the provider that keeps most."""
        ids = gone_on_from(self.call.fields, self.incoming.endpoint.wire) if self.call is not None else ()
        return max(self.remembered.kept_by(route.provider, ids) for route in routes) if ids else 0

    def output_limit(self, fields: AnyFields, wire: Wire) -> int | None:
        """The most tokens that an answer may have, as the call says or its step."""
        asked, step = output_limit(fields, wire), self.limit_to_set(fields, wire)
        return asked if step is None else step

    def limit_to_set(self, fields: AnyFields, wire: Wire) -> int | None:
        """The limit of an answer that the step sets; None: as the call says, or below what can be set."""
        most = self.step.max_output_tokens if self.step is not None else None
        if most is None:
            return None
        asked, most = output_limit(fields, wire), max(most, least_output(fields, wire))
        return most if asked is None or most < asked else None

    def instead(self, *routes: Route, besides: bool = True) -> list[Route]:
        """The models that providers of these routes may call in the place of the call's own, as it tells them.

        `besides`: and those that its own one may ask, which never answer the call.
        """
        named = (*self.others, *self.advisors) if besides else self.others
        if not named:
            return []
        providers = {route.provider for route in routes}
        return [route for route in named if route.provider in providers]

    def client_left(self) -> None:
        """Nobody waits for the answer. Of a stream that has said why it ends the client knows all that matters."""
        has_ended = self.is_event_stream and self.reader is not None and self.reader().finish_reason is not None
        self.is_unheard = self.record is None and not has_ended

    async def hang_up(self) -> None:
        """Give the connection to the provider back, where one is in use."""
        sending, self.sending = self.sending, None
        if sending is not None:
            await sending.__aexit__(None, None, None)
