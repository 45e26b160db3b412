"""Keep the newest refusals without a call record for `/api/health`, and notify observers of them.

Most of them are requests that never become calls: an unknown key, a web page of another origin, an invalid path. Anyone
can send any number of these, so they are not written to the store, and cause no webhooks or callbacks. The others are
calls without a session, and calls that the gateway itself could not serve.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from gateway.call.observers import notify
from gateway.core.bounded import BoundedDict
from gateway.core.errors import (
    GatewayError,
    InternalError,
    Overloaded,
    ShuttingDown,
    StoreConflict,
    StoreDamaged,
    StoreUnavailable,
    Unauthenticated,
)
from gateway.core.http.headers import Headers
from gateway.core.ledger.refusals import Allowance
from gateway.core.ports import Observer
from gateway.core.record import NOTE_CREDENTIAL, REFUSED, CallError, CallRecord
from gateway.core.usage import Totals
from gateway.core.values import dataclass
from gateway.server import headers as ours
from gateway.server.auth import credential_hash

#: number of the newest refusals that are kept
MOST_KEPT: Final = 50
#: error codes of calls that the gateway itself could not serve; they have no record, even with a session
_UNRECORDED_CODES: Final = frozenset(
    kind.code for kind in (StoreUnavailable, StoreConflict, StoreDamaged, Overloaded, ShuttingDown)
)


@dataclass(slots=True)
class UnrecordedRefusal:
    """Refusals with the same error code and credential.

    `credential`: a short hash of the unknown key; None if no key was sent, or for other errors. Times are Unix times in
    seconds.
    """

    code: str
    status: int
    credential: str | None
    message: str
    count: int
    first_at: float
    last_at: float


class UnrecordedRefusals(Observer):
    """Keep the newest refusals, and notify observers of requests that never became calls.

    Each worker has one instance.
    """

    def __init__(self, observers: Iterable[Observer], wall: Callable[[], float] = time.time) -> None:
        self._refusal_listeners = [observer.refused for observer in observers]
        self._wall = wall
        self._kept = BoundedDict[tuple[str, str | None], UnrecordedRefusal](MOST_KEPT)

    def note(self, fault: GatewayError, headers: Headers, call_id: str, dialect: str, operation: str) -> None:
        """Note a request that never becomes a call. Bugs are not noted: they have a log entry."""
        if isinstance(fault, InternalError):
            return
        credential = credential_hash(headers) if isinstance(fault, Unauthenticated) else None
        record = CallRecord(
            call_id=call_id,
            request_id=ours.request_id(headers) or call_id,
            session=None,
            derived_session=False,
            started_at=self._wall(),
            dialect=dialect,
            operation=operation,
            provider="",
            model="",
            response_model=None,
            stream=False,
            status=fault.status,
            outcome=REFUSED,
            error_code=fault.code,
            finish_reason=None,
            tools=(),
            charge=None,
            overhead_s=0.0,
            first_byte_s=None,
            duration_s=0.0,
            request_bytes=0,
            response_bytes=0,
            notes={NOTE_CREDENTIAL: credential} if credential is not None else {},
            error=CallError.of(fault),
        )
        self._keep(record)
        notify(self._refusal_listeners, record)

    def record(self, call: CallRecord, totals: Totals | None, left: Allowance | None = None) -> None:
        """Keep a refused call that has no record, see `Observer.record`."""
        del totals, left
        if call.outcome == REFUSED and (call.session is None or call.error_code in _UNRECORDED_CODES):
            self._keep(call)

    def _keep(self, call: CallRecord) -> None:
        code, credential, now = call.error_code or "", call.credential_hash, call.started_at
        refusal = self._kept.get((code, credential))
        if refusal is None:
            refusal = UnrecordedRefusal(code, call.status, credential, "", 0, now, now)
        refusal.message = call.error.message if call.error is not None else ""
        refusal.count, refusal.last_at = refusal.count + 1, now
        self._kept[code, credential] = refusal

    def newest(self) -> Sequence[UnrecordedRefusal]:
        """Return the kept refusals, newest first."""
        return [*reversed(self._kept.values())]
