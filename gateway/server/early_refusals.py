"""Requests that are refused before they become calls: an unknown key, a foreign web page, an invalid path.

Anybody can send any number of these. So nothing of them goes to the store, to webhooks or to callbacks. The log and the
metrics hear of each, and a worker keeps a few in memory, counted by error code and credential, for `/api/health`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from gateway.core.errors import GatewayError, InternalError, Unauthenticated
from gateway.core.forwarding import Headers
from gateway.core.ports import Observer
from gateway.core.record import REFUSED, CallError, CallRecord
from gateway.core.values import dataclass
from gateway.server import headers as ours
from gateway.server.auth import credential_hash
from gateway.telling import tell

#: refusals that are kept; those that came last stay
MOST_KEPT: Final = 50
#: the name of the credential's hash among a record's notes
CREDENTIAL: Final = "credential"


@dataclass(slots=True)
class EarlyRefusal:
    """Requests with the same error code and credential.

    `credential`: a short hash of the unknown key; None where none was sent, or the error is another one. Times are
    seconds since the epoch.
    """

    code: str
    status: int
    credential: str | None
    message: str
    count: int
    first_at: float
    last_at: float


class EarlyRefusals:
    """Tells observers of early refusals, and keeps the newest. One for each worker, shared by all requests."""

    def __init__(self, observers: Iterable[Observer], wall: Callable[[], float] = time.time) -> None:
        self._listeners = [one.refused for one in observers]
        self._wall = wall
        self._kept: OrderedDict[tuple[str, str | None], EarlyRefusal] = OrderedDict()

    def note(self, fault: GatewayError, headers: Headers, call_id: str, dialect: str, operation: str) -> None:
        """Note a refusal. A bug is left out: it has a log entry of its own."""
        if isinstance(fault, InternalError):
            return
        credential = credential_hash(headers) if isinstance(fault, Unauthenticated) else None
        now = self._wall()
        self._keep(fault, credential, now)
        record = CallRecord(
            call_id=call_id,
            request_id=ours.request_id(headers) or call_id,
            session=None,
            derived_session=False,
            started_at=now,
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
            notes={CREDENTIAL: credential} if credential is not None else {},
            error=CallError.of(fault),
        )
        tell(self._listeners, record)

    def _keep(self, fault: GatewayError, credential: str | None, now: float) -> None:
        key = fault.code, credential
        kept = self._kept.pop(key, None)
        if kept is None:
            kept = EarlyRefusal(fault.code, fault.status, credential, "", 0, now, now)
        kept.message, kept.count, kept.last_at = CallError.of(fault).message, kept.count + 1, now
        self._kept[key] = kept
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)

    def newest(self) -> Sequence[EarlyRefusal]:
        """Return the refusals that are kept, the newest first."""
        return [*reversed(self._kept.values())]
