"""Detect an error at the beginning of a response with status 200, before it is passed on.

Some providers take a request with status 200 and refuse it in the first event, or behind those that only say that it
was taken: OpenAI does so with streams of Responses that are too long. Nothing of the answer is there by then: it costs
nothing, unless the refusal itself reports usage, and the next try may have one. But one that is made in the background
is made, and billed, once it has an id, whatever becomes of its stream.

A whole answer of status 200 may be such a refusal, too (OpenRouter): its beginning tells.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from gateway.core.errors import UpstreamFault, UpstreamProtocolError
from gateway.core.http.headers import EVENTS, content_type, is_success
from gateway.core.http.retry_policy import FAILED
from gateway.core.http.sse import EventBuffer, event_data, split_events
from gateway.core.ports import UpstreamReply
from gateway.core.values import dataclass
from gateway.dialects.base import EventReader, ParsedResponse
from gateway.dialects.error_status import plain, status_of
from gateway.dialects.length_error import length_error
from gateway.upstream.body import AlreadyRead, chain, is_compressed

#: Comments that only keep a connection open are passed over for so long, and in so many bytes: then they go out. So are
#: events that say that a request was taken, each of which may hold its instructions and its tools.
_MAX_WAIT_S: Final = 10.0
_MOST_BYTES: Final = 2**20
#: OpenAI says so in every stream of Responses, also in one that it refuses for its length
_TAKEN: Final = re.compile(
    rb"(?:\A|\n)(?:event: ?(?:response\.(?:created|queued|in_progress)|ping)[\r\n]"
    rb'|data: ?\{"type": ?"(?:response\.(?:created|queued|in_progress)|ping)")'
)
#: how a whole answer begins that is an error and nothing else, and the bytes by which that can be told
_ERROR: Final = re.compile(rb'\s*\{\s*(?:"type"\s*:\s*"error"\s*,\s*)?"error"\s*:\s*[{"]')
_TELLING_BYTES: Final = 64
_JSON: Final = b"application/json"
#: the status with which providers refuse a request that is too long
_TOO_LONG: Final = 400


@dataclass(frozen=True, slots=True)
class BegunResponse:
    """An answer whose first pieces were read.

    `refusal`: the error in its first event as an answer of its own, where another try may do better; None else.
    """

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    first: list[bytes]
    rest: AsyncIterator[bytes]
    refusal: AlreadyRead | None = None

    def chunks(self) -> AsyncIterator[bytes]:
        """See `UpstreamReply.chunks`."""
        return chain(self.first, self.rest)


def is_event_stream(answer: UpstreamReply) -> bool:
    """Whether there are events to look at."""
    return is_success(answer.status) and content_type(answer.headers) == EVENTS and not is_compressed(answer)


async def looked_at(answer: UpstreamReply, reader: EventReader, *, is_fetched_later: bool = False) -> BegunResponse:
    """The answer as it came, and whether its first event refuses the call.

    `is_fetched_later`: it is made in the background.

    Raises:
        UpstreamFault: it broke off before, or ended.
    """
    pieces, first, said = answer.chunks(), list[bytes](), b""
    try:
        said = await _first(pieces, first)
    except UpstreamFault as fault:
        if not (is_fetched_later and _is_being_made(first, reader)):
            raise
        return BegunResponse(answer.status, answer.headers, [], _then(first, fault))
    is_taken = is_fetched_later and _is_being_made(first, reader)
    refusal = None
    if said and not is_taken:
        reader.read(said)
        refusal = _refusal(said, reader.answer())
    return BegunResponse(answer.status, answer.headers, first, pieces, refusal)


def is_whole(answer: UpstreamReply) -> bool:
    """Whether it is JSON, and none of it has to be unpacked."""
    return is_success(answer.status) and content_type(answer.headers) == _JSON and not is_compressed(answer)


async def looked_at_whole(answer: UpstreamReply, read: Callable[[bytes], ParsedResponse]) -> BegunResponse:
    """The answer as it came, and whether all of it is a refusal; `read`: reads it in its format.

    Where it breaks off, it does so for who reads on: what may be an answer may be billed.
    """
    pieces, first = answer.chunks(), list[bytes]()
    try:
        body = await _error(pieces, first)
    except UpstreamFault as fault:
        return BegunResponse(answer.status, answer.headers, [], _then(first, fault))
    refusal = _refusal(body, read(body)) if body else None
    return BegunResponse(answer.status, answer.headers, first, pieces, refusal)


async def _error(pieces: AsyncIterator[bytes], first: list[bytes]) -> bytes:
    """The whole body where it begins as an error does, empty where it does not; `first` gets what was read."""
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
    """Whether a provider is at work on an answer of which this was read."""
    for event in split_events(EventBuffer().feed(b"".join(first))):
        if said := event_data(event):
            reader.read(said)
    answer = reader.answer()
    return answer.id is not None and answer.finish_reason is None


async def _then(first: list[bytes], fault: UpstreamFault) -> AsyncIterator[bytes]:
    for piece in first:
        yield piece
    raise fault


def _refusal(said: bytes, answer: ParsedResponse) -> AlreadyRead | None:
    # What is billed as well is an answer: it is charged as it comes, and nobody else is asked.
    if not answer.error or (answer.usage is not None and answer.usage.is_billed):
        return None
    status, body = status_of(said), plain(said)
    # What is too long may be cut, or another model takes it; any other such request is the caller's to mend.
    if status not in FAILED and length_error(_TOO_LONG, body) is None:
        return None
    return AlreadyRead(status, [(b"content-type", _JSON)], body)


async def _first(pieces: AsyncIterator[bytes], first: list[bytes]) -> bytes:
    """The data of the first event that says something, empty where none came in time; `first` gets what was read.

    Raises:
        UpstreamFault: the stream ended, or broke off, before there was one.
    """
    clock = asyncio.get_running_loop().time
    buffer, size, until, is_foreign = EventBuffer(), 0, clock() + _MAX_WAIT_S, False
    async for piece in pieces:
        first.append(piece)
        size += len(piece)
        for event in split_events(buffer.feed(piece)):
            if (said := event_data(event)) and not _TAKEN.search(event):
                return said
            is_foreign = is_foreign or not (said or _is_silent(event))
        if size > _MOST_BYTES or clock() > until:
            return b""
    if is_foreign or not _is_silent(buffer.rest()):
        # JSON, or another format.
        return b""
    raise UpstreamProtocolError("The provider ended the stream before its answer had begun.")


def _is_silent(text: bytes) -> bool:
    """Whether there is nothing in it but blank lines and comments."""
    return all(not line.strip() or line.startswith(b":") for line in text.splitlines())
