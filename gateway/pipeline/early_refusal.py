"""Detect an error at the beginning of a response with status 200, before it is passed on.

Some providers accept a request with status 200 and refuse it in the first event, or after events that only confirm the
request. OpenAI does so with streams of Responses that are too long. At that point nothing of the response exists: it
costs nothing, unless the refusal itself reports usage, and another route may succeed. A response in the background is
the exception: once it has an id, it is made and billed, whatever happens to its stream.

A whole response with status 200 can also be a refusal (OpenRouter). Its first bytes show it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from gateway.core.errors import UpstreamFault, UpstreamProtocolError
from gateway.core.http.headers import EVENTS, content_type, is_success
from gateway.core.http.retry_policy import FALLS_BACK
from gateway.core.http.sse import EventBuffer, event_data, split_events
from gateway.core.ports import UpstreamReply
from gateway.core.providers import CONFIRMING_EVENTS
from gateway.core.values import dataclass
from gateway.dialects.base import EventReader, ParsedResponse
from gateway.dialects.error_status import status_of, unwrapped
from gateway.dialects.length_error import length_error
from gateway.upstream.body import AlreadyRead, Chained, is_compressed

#: For this long, and in this many bytes, comments that keep a connection open are held back, and so are events that
#: only confirm the request. Such an event may repeat the instructions and tools of the request.
_MAX_WAIT_S: Final = 10.0
_MOST_BYTES: Final = 2**20
_CONFIRMS: Final = "|".join(map(re.escape, CONFIRMING_EVENTS)).encode()
_TAKEN: Final = re.compile(
    rb"(?:\A|\n)(?:event: ?(?:" + _CONFIRMS + rb')[\r\n]|data: ?\{"type": ?"(?:' + _CONFIRMS + rb')")'
)
#: the beginning of a whole response that is only an error, and the bytes that are enough to recognise it
_ERROR: Final = re.compile(rb'\s*\{\s*(?:"type"\s*:\s*"error"\s*,\s*)?"error"\s*:\s*[{"]')
_TELLING_BYTES: Final = 64
_JSON: Final = b"application/json"
#: the status with which providers refuse a request that is too long
_TOO_LONG: Final = 400


@dataclass(frozen=True, slots=True)
class BegunResponse:
    """A response whose first pieces were read.

    `refusal`: the error in its first event as a response of its own, if another route may succeed; None otherwise.
    """

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    first: list[bytes]
    rest: AsyncIterator[bytes]
    refusal: AlreadyRead | None = None

    def chunks(self) -> AsyncIterator[bytes]:
        """Return the whole body, including the pieces that were read. See `UpstreamReply.chunks`."""
        return Chained(self.first, self.rest)


def is_event_stream(response: UpstreamReply) -> bool:
    """Return whether a response is a readable stream of events."""
    return is_success(response.status) and content_type(response.headers) == EVENTS and not is_compressed(response)


async def looked_at(response: UpstreamReply, reader: EventReader, *, is_fetched_later: bool = False) -> BegunResponse:
    """Return a stream with its bytes unchanged, and with the refusal in its first event, if there is one.

    `is_fetched_later`: the response is made in the background.

    Raises:
        UpstreamFault: the stream broke off, or ended, before its first event.
    """
    pieces, first, data = response.chunks(), list[bytes](), b""
    try:
        data = await _first(pieces, first)
    except UpstreamFault as fault:
        if not (is_fetched_later and _is_being_made(first, reader)):
            raise
        return BegunResponse(response.status, response.headers, [], _then(first, fault))
    is_taken = is_fetched_later and _is_being_made(first, reader)
    refusal = None
    if data and not is_taken:
        reader.read(data)
        refusal = _refusal(data, reader.answer())
    return BegunResponse(response.status, response.headers, first, pieces, refusal)


def is_whole(response: UpstreamReply) -> bool:
    """Return whether a response is JSON that is not compressed."""
    return is_success(response.status) and content_type(response.headers) == _JSON and not is_compressed(response)


async def looked_at_whole(response: UpstreamReply, read: Callable[[bytes], ParsedResponse]) -> BegunResponse:
    """Return a JSON response with its bytes unchanged, and with its refusal if it is one. `read`: parses its format.

    If it breaks off, it also breaks off for its reader, because what may be a response may be billed.
    """
    pieces, first = response.chunks(), list[bytes]()
    try:
        body = await _error(pieces, first)
    except UpstreamFault as fault:
        return BegunResponse(response.status, response.headers, [], _then(first, fault))
    refusal = _refusal(body, read(body)) if body else None
    return BegunResponse(response.status, response.headers, first, pieces, refusal)


async def _error(pieces: AsyncIterator[bytes], first: list[bytes]) -> bytes:
    """Return the whole body if it begins like an error, otherwise empty bytes. `first` receives what was read."""
    head, size = b"", 0
    async for piece in pieces:
        first.append(piece)
        size += len(piece)
        if len(head) < _TELLING_BYTES:
            head = (head + piece).lstrip()
        if size > _MOST_BYTES or (len(head) >= _TELLING_BYTES and _ERROR.match(head) is None):
            return b""
    return b"".join(first) if _ERROR.match(head) is not None else b""


def _is_being_made(first: Sequence[bytes], reader: EventReader) -> bool:
    """Return whether the events so far show that the provider is working on a response."""
    for event in split_events(EventBuffer().feed(b"".join(first))):
        if data := event_data(event):
            reader.read(data)
    response = reader.answer()
    return response.id is not None and response.finish_reason is None


async def _then(first: list[bytes], fault: UpstreamFault) -> AsyncIterator[bytes]:
    for piece in first:
        yield piece
    raise fault


def _refusal(data: bytes, response: ParsedResponse) -> AlreadyRead | None:
    # A refusal that is billed counts as a response: it is charged, and no other route is tried.
    if not response.error or (response.usage is not None and response.usage.is_billed):
        return None
    status, body = status_of(data), unwrapped(data)
    # A request that is too long can be trimmed, or another model takes it. Other bad requests are up to the caller.
    if status not in FALLS_BACK and length_error(_TOO_LONG, body) is None:
        return None
    return AlreadyRead(status, [(b"content-type", _JSON)], body)


async def _first(pieces: AsyncIterator[bytes], first: list[bytes]) -> bytes:
    """Return the data of the first event with content, empty if none came in time. `first` receives what was read.

    Raises:
        UpstreamFault: the stream ended, or broke off, before such an event.
    """
    clock = asyncio.get_running_loop().time
    buffer, size, until, is_foreign = EventBuffer(), 0, clock() + _MAX_WAIT_S, False
    async for piece in pieces:
        first.append(piece)
        size += len(piece)
        for event in split_events(buffer.feed(piece)):
            if (data := event_data(event)) and not _TAKEN.search(event):
                return data
            is_foreign = is_foreign or not (data or _is_silent(event))
        if size > _MOST_BYTES or clock() > until:
            return b""
    if is_foreign or not _is_silent(buffer.rest()):
        # The body is JSON, or in another format.
        return b""
    raise UpstreamProtocolError("The provider ended the stream before its response had begun.")


def _is_silent(text: bytes) -> bool:
    """Return whether a text has only blank lines and comments."""
    return all(not line.strip() or line.startswith(b":") for line in text.splitlines())
