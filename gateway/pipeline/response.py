"""Pass a provider's response on to the client, read its usage, and write refusals.

A whole response is settled before it is passed on. A stream is settled before its last bytes are passed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Sequence
from http import HTTPStatus
from typing import Final

from gateway.background.settlement import BackgroundSettlement
from gateway.budget.accounts import Accounts
from gateway.budget.settlement import CallSettlement
from gateway.call.state import CallState
from gateway.call.types import ActiveStep, ClientResponse, RequestReport
from gateway.core.errors import GatewayError, RequestFault, UpstreamProtocolError
from gateway.core.http.headers import (
    EVENTS,
    Headers,
    content_type,
    header,
    mask,
    mask_values,
    response_headers,
)
from gateway.core.ledger.refusals import Allowance
from gateway.core.ports import UpstreamReply
from gateway.core.record import CallRecord
from gateway.core.usage import Charge, Totals
from gateway.dialects.base import Call, ParsedResponse, StreamMeter
from gateway.dialects.partial_body import PartialBody, read_partial, read_whole
from gateway.pipeline.stream import StreamPassage
from gateway.upstream.body import (
    Chained,
    check_compression,
    check_transfer_coding,
    decompress,
    is_compressed,
    pass_pieces,
)

#: A response of up to this many bytes is read completely before it is passed on. A larger one is passed on as it
#: arrives, and its usage is estimated.
MAX_WHOLE_ANSWER: Final = 64 * 1024 * 1024
_MAX_ERROR_BODY: Final = 1024 * 1024
#: seconds to read on after the end mark of a stream, so that the connection can be used again
_AFTER_END_S: Final = 2.0
_EMBEDDINGS: Final = "embeddings"
#: the beginning of JSON, and that of a stream of events: the name of a field, or a comment
_JSON: Final = re.compile(rb"(?:\xef\xbb\xbf)?\s*[{\[]")
_EVENTS: Final = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:data|event|id|retry)?:")
#: bytes that are enough to distinguish JSON from events; no response begins with so much white space
_TELLING_BYTES: Final = 64

TotalsComment = Callable[[Totals, Charge | None, Allowance | None, ActiveStep | None], bytes]


class ResponseRelay:
    """Pass responses on to clients. One instance serves all calls.

    `totals_comment`: makes the comment before the end of a stream; None for no comment. `secrets`: keys that are masked
    if a provider repeats them in an error, or in the headers of any response.
    """

    def __init__(
        self,
        accounts: Accounts,
        background: BackgroundSettlement,
        settlement: CallSettlement,
        clock: Callable[[], float],
        *,
        totals_comment: TotalsComment | None,
        secrets: Sequence[bytes],
    ) -> None:
        self._accounts = accounts
        self._background = background
        self._settlement = settlement
        self._secrets = secrets
        self._clock = clock
        self._totals_comment = totals_comment

    async def success(self, state: CallState, call: Call, response: UpstreamReply) -> ClientResponse:
        """Pass on a successful response: of a model, or a file."""
        endpoint = state.incoming.endpoint
        is_read = endpoint.metered or endpoint.fetched_id
        if endpoint.metered and endpoint.format is not None:
            check_compression(response)
        check_transfer_coding(response)
        kind, was_compressed = content_type(response.headers), is_compressed(response)
        pieces = decompress(response) if was_compressed else response.chunks()
        if is_read and kind == EVENTS:
            return await self._event_stream(state, call, response, pieces)
        is_json = kind.endswith((b"/json", b"+json")) or not kind
        is_models = endpoint.wire is not None or _is_embeddings(state)
        if not is_read or not (is_json or is_models):
            return await self._unread(state, response, pieces)
        # Some providers give a wrong content type, so the first bytes decide.
        first = await self._first_bytes(state, pieces)
        if _EVENTS.match(first) and endpoint.wire:
            return await self._event_stream(state, call, response, Chained([first], pieces))
        if is_json or _JSON.match(first):
            return await self._whole(state, response, first, pieces, was_compressed=was_compressed)
        return await self._unread(state, response, Chained([first], pieces))

    @staticmethod
    async def _first_bytes(state: CallState, pieces: AsyncIterator[bytes]) -> bytes:
        """Return the first bytes of a body, enough to distinguish JSON from a stream of events."""
        first = b""
        try:
            async for piece in pieces:
                first += piece
                if len(first) >= _TELLING_BYTES or _JSON.match(first) or _EVENTS.match(first):
                    break
        except GatewayError:
            state.response.outcome = "upstream_broken"
            raise
        return first

    async def failure(self, state: CallState, response: UpstreamReply) -> ClientResponse:
        """Pass on a provider's error unchanged, without a charge. A redirect comes here only without a body."""
        body = mask(await read_error(response), self._secrets)
        # It may be the error of an earlier provider, so the status of the last one is replaced.
        state.response.outcome, state.response.status = "provider_error", response.status
        state.response.bytes_sent = len(body)
        headers = self._headers(response, decompressed=is_compressed(response))
        reply = self._reply(state, response.status, headers, body)
        reply.upstream_error = response.status >= 400  # noqa: PLR2004
        reply.totals = await self._settlement.settle(state)
        reply.allowance = self._accounts.allowance(state)
        reply.is_final = True
        return reply

    async def refusal(self, state: CallState, fault: GatewayError) -> ClientResponse:
        """Return an error of the gateway, in the client's format."""
        state.response.fault, state.response.status = fault, fault.status
        if state.response.outcome != "upstream_broken":
            state.response.outcome = "refused" if state.dispatch.sent_at is None else "upstream_failed"
        totals = await self._settlement.settle(state)
        headers: Headers = [(b"content-type", b"application/json")]
        body = state.dialect.error(fault, state.incoming.request_id)
        reply = self._reply(state, fault.status, headers, body)
        reply.fault = fault
        if state.incoming.endpoint.metered and isinstance(fault, RequestFault):
            await self._accounts.look(state)
        reply.allowance = self._accounts.allowance(state)
        reply.totals = totals if totals is not None else await self._accounts.totals_now(state)
        reply.is_final = True
        return reply

    # --- read whole --------------------------------------------------------------------------------------------

    async def _whole(
        self,
        state: CallState,
        response: UpstreamReply,
        first: bytes,
        pieces: AsyncIterator[bytes],
        *,
        was_compressed: bool,
    ) -> ClientResponse:
        has_texts = not _is_embeddings(state)
        read, size = [first], len(first)
        # Reads what had arrived if the response breaks off. The function must not refer to `state`, which holds it:
        # this cycle would keep all data of the call until the garbage collector runs.
        dialect = state.dialect
        state.response.reader = lambda: read_partial(dialect, b"".join(read), has_texts=has_texts)
        try:
            async for piece in pieces:
                read.append(piece)
                size += len(piece)
                if size > MAX_WHOLE_ANSWER:
                    partial = PartialBody(state.dialect, has_texts=has_texts)
                    state.response.reader = partial.answer
                    return await self._as_it_comes(state, response, Chained(read, pieces), partial)
        except GatewayError:
            state.response.outcome = "upstream_broken"
            raise
        body = b"".join(read)
        state.response.parsed = read_whole(dialect, body, has_texts=has_texts)
        if state.response.parsed.error:
            body = mask(body, self._secrets)
        state.response.outcome = "ok" if not state.response.parsed.error else "provider_error"
        state.response.bytes_sent = len(body)
        totals = await self._settlement.settle(state)
        headers = self._headers(response, decompressed=was_compressed)
        reply = self._reply(state, response.status, headers, body)
        record = _settled(state)
        reply.totals = totals
        reply.charge = record.charge if record is not None else None
        reply.is_final = totals is not None and record is not None
        reply.upstream_error = state.response.is_billed and state.response.parsed.error and reply.charge is None
        return reply

    # --- metered as it comes -----------------------------------------------------------------------------------

    async def _event_stream(
        self, state: CallState, call: Call, response: UpstreamReply, pieces: AsyncIterator[bytes]
    ) -> ClientResponse:
        # A client that did not ask for usage must not see the chunk with it, because the gateway asked for it.
        sent = state.context.plan.context.tokens if state.context.plan is not None else None
        meter = StreamMeter(state.dialect.reader(call, drop_usage=not call.usage_asked, input_tokens=sent))
        state.response.reader, state.response.is_event_stream = meter.response, True
        if state.budget.hold is not None:
            state.budget.hold.lease.delivered = lambda: meter.response().output_estimate
        passage = StreamPassage(state, self._accounts, meter, self._secrets)
        reply = await self._started(state, response)
        reply.is_event_stream, reply.failure_events = True, _failure_events(state, meter)
        reply.body, reply.direct = self._metered(state, response, pieces, passage, reply), passage.output
        return reply

    async def _metered(
        self,
        state: CallState,
        response: UpstreamReply,
        pieces: AsyncIterator[bytes],
        passage: StreamPassage,
        reply: ClientResponse,
    ) -> AsyncIterator[bytes]:
        """Yield what `passage` does not write to the client itself. See `gateway.pipeline.stream`."""
        meter, is_blank, is_found = passage.meter, True, not state.is_fetched_later
        try:
            while not meter.ended and await pass_pieces(pieces, passage.take):
                if is_blank and _JSON.match(passage.unread):
                    async for part in self._no_events(state, response, Chained([passage.unread], pieces), reply):
                        yield part
                    return
                # Some providers send blank lines until their response begins.
                is_blank = is_blank and not passage.unread.strip()
                for events in passage.events_for_task():
                    if events:
                        await self._accounts.deliver(state)
                        is_found = is_found or await self._background.note_call(state)
                        yield events
                    # If one event brought far more than the hold, the rest of its piece has the usage that is billed.
                    if await self._accounts.is_over(state) and not (passage.has_rest and state.budget.is_far_over):
                        yield await self._end_of_budget(state, meter)
                        return
                if is_found and not is_blank:
                    passage.open()
            _check_end(state, meter)
        except GatewayError as fault:
            state.response.outcome, state.response.fault = "upstream_broken", fault
            reply.is_incomplete = True
            await self._settlement.settle(state)
            yield passage.without_keys(self._broken_off(state, meter, fault))
            return
        tail = passage.without_keys(meter.close())
        state.response.parsed = meter.response()
        state.response.outcome = "ok" if not state.response.parsed.error else "provider_error"
        # Events that arrived together with the end are passed on together with it.
        yield passage.unsent + await self._closing(state, tail)
        # The end mark was passed on. What follows changes nothing; reading it frees the connection for another call.
        with contextlib.suppress(GatewayError, TimeoutError):
            async with asyncio.timeout(_AFTER_END_S):
                await pass_pieces(pieces, passage.take_after_end)
        if rest := meter.close():
            yield rest

    @staticmethod
    def _broken_off(state: CallState, meter: StreamMeter, fault: GatewayError) -> bytes:
        """Return the end of a stream that its provider broke off, with an error event.

        A stream that is fetched gets no error event: its client sees where it ended, and fetches the rest from there.
        """
        tail = meter.close_broken()
        if not state.incoming.endpoint.metered:
            return tail
        return tail + _failure_events(state, meter)(fault)

    async def _no_events(
        self, state: CallState, response: UpstreamReply, pieces: AsyncIterator[bytes], reply: ClientResponse
    ) -> AsyncIterator[bytes]:
        """Pass on JSON whose content type claims a stream: it is read completely, and gets no comment."""
        whole = await self._whole(state, response, b"", pieces, was_compressed=is_compressed(response))
        if isinstance(whole.body, bytes):
            yield whole.body
            return
        async for piece in whole.body:
            yield piece
        reply.is_incomplete = whole.is_incomplete

    async def _end_of_budget(self, state: CallState, meter: StreamMeter) -> bytes:
        """End a stream for which no more could be reserved, as if its output limit had been reached."""
        state.response.outcome = "budget_end"
        tail = meter.end_at_limit()
        # The provider stops when its connection is closed. It bills what it made until then, and so does the gateway.
        await state.dispatch.hang_up()
        return await self._closing(state, tail)

    async def _closing(self, state: CallState, tail: bytes) -> bytes:
        """Settle, and return the last bytes of a stream after a comment with the totals.

        The call is settled before the client can see the end of the stream.
        """
        totals = await self._settlement.settle(state)
        if totals is None:
            return tail
        record = _settled(state)
        charge = record.charge if record is not None else None
        allowance, stepped = self._accounts.allowance(state), state.steps.active
        return (self._totals_comment(totals, charge, allowance, stepped) if self._totals_comment else b"") + tail

    # --- passed on unread --------------------------------------------------------------------------------------

    async def _unread(self, state: CallState, response: UpstreamReply, pieces: AsyncIterator[bytes]) -> ClientResponse:
        """Pass on files, audio and images. The tokens of a transcription's text are counted on the way."""
        partial, endpoint = None, state.incoming.endpoint
        # Instead of a model's response, a text is the error page of a proxy in between: its tokens are not counted.
        if endpoint.metered and endpoint.wire is None and not _is_embeddings(state):
            is_text = header(response.headers, b"content-type").lower().startswith(b"text/")
            partial = PartialBody(state.dialect, has_texts=True) if is_text else None
            state.response.reader = partial.answer if partial is not None else _not_seen
        reply = await self._as_it_comes(state, response, pieces, partial)
        length = header(response.headers, b"content-length")
        # A response with status 204 has no content length (RFC 9110, section 8.6).
        if length and not is_compressed(response) and response.status != HTTPStatus.NO_CONTENT:
            reply.headers.append((b"content-length", length))
        return reply

    async def _as_it_comes(
        self,
        state: CallState,
        response: UpstreamReply,
        pieces: AsyncIterator[bytes],
        partial: PartialBody | None = None,
    ) -> ClientResponse:
        """Pass the body on as it arrives. `partial` reads it on the way, if given."""
        reply = await self._started(state, response)
        reply.body = self._passed_on(state, pieces, reply, partial)
        return reply

    async def _passed_on(
        self, state: CallState, pieces: AsyncIterator[bytes], reply: ClientResponse, partial: PartialBody | None
    ) -> AsyncIterator[bytes]:
        try:
            async for piece in pieces:
                if partial is not None:
                    partial.feed(piece)
                state.response.bytes_sent += len(piece)
                await self._accounts.deliver(state)
                yield piece
        except GatewayError as fault:
            state.response.outcome, state.response.fault = "upstream_broken", fault
            reply.is_incomplete = True
            return
        state.response.outcome = "ok"
        await self._settlement.settle(state)

    # --- what they share ---------------------------------------------------------------------------------------

    async def _started(self, state: CallState, response: UpstreamReply) -> ClientResponse:
        """Return the reply to a response whose body is still to come."""
        headers = self._headers(response, decompressed=is_compressed(response))
        reply = self._reply(state, response.status, headers, b"")
        before = state.budget.totals_before
        reply.totals = before if before is not None else await self._accounts.totals_now(state)
        return reply

    def _headers(self, response: UpstreamReply, *, decompressed: bool) -> Headers:
        return mask_values(response_headers(response.headers, decompressed=decompressed), self._secrets)

    def _reply(self, state: CallState, status: int, headers: Headers, body: bytes) -> ClientResponse:
        sent_at = state.dispatch.sent_at
        report = RequestReport(
            session=state.session,
            context=state.context.plan.context if state.context.plan is not None else None,
            mode=state.context.mode,
            at_provider=state.at_provider,
            is_uncounted=state.context.plan is None and sent_at is not None and state.incoming.endpoint.metered,
            is_billed_later=state.response.is_billed and state.is_billed_later and not state.is_fetched_later,
            is_count_estimated=state.response.is_count_estimated,
            overhead_s=(sent_at if sent_at is not None else self._clock()) - state.incoming.started,
            is_closing=state.budget.closing is not None and state.response.fault is None,
            cheaper_model=state.routing.route.model if state.routing.route in state.routing.cheaper else None,
            warnings=state.steps.warnings,
        )
        return ClientResponse(
            status,
            headers,
            body,
            report,
            allowance=self._accounts.allowance(state),
            active_step=state.steps.active,
        )


async def read_error(response: UpstreamReply) -> bytes:
    """Return the body of a provider's error.

    Raises:
        UpstreamProtocolError: the body is far longer than an error.
    """
    body = bytearray()
    async for piece in decompress(response) if is_compressed(response) else response.chunks():
        body += piece
        if len(body) > _MAX_ERROR_BODY:
            raise UpstreamProtocolError(
                f"The provider answered {response.status} with an error of over {_MAX_ERROR_BODY:,} bytes."
            )
    return bytes(body)


def _failure_events(state: CallState, meter: StreamMeter) -> Callable[[GatewayError], bytes]:
    """Return a function that makes the events which end a stream with an error.

    A response that its provider makes in the background continues without its stream, so it has not failed.
    """
    # The function must not refer to `state`: this cycle would keep all data of the call until the garbage collector
    # runs.
    dialect, request_id, goes_on = state.dialect, state.incoming.request_id, state.is_fetched_later

    def events(fault: GatewayError) -> bytes:
        if goes_on:
            return dialect.error_event(fault, request_id, meter.next_number())
        return meter.failure(dialect, fault, request_id)

    return events


def _check_end(state: CallState, meter: StreamMeter) -> None:
    """Check that a stream in a known format ended with its end mark.

    Raises:
        UpstreamProtocolError: the end mark is missing, although HTTP ended the body regularly.
    """
    if state.incoming.endpoint.wire is not None and meter.lacks_end():
        raise UpstreamProtocolError("The provider ended the stream before the response was complete.")


def _settled(state: CallState) -> CallRecord | None:
    """Return the record of the call, or of the earlier one whose response it fetched; None while that is pending."""
    record = state.settlement.fetched or state.settlement.record
    return record if record is not None and not record.is_pending else None


def _is_embeddings(state: CallState) -> bool:
    return state.incoming.endpoint.operation == _EMBEDDINGS


def _not_seen() -> ParsedResponse:
    return ParsedResponse(is_counted=False)
