"""Read and write the messages of the Responses API over a WebSocket.

Each `response.create` is the body of one POST /v1/responses. Each event of its response stream is one message
(OpenAI's guide "WebSocket mode", and `ResponsesClientEvent` in its OpenAPI document). This module has the differences
from HTTP: the envelope of a body, the lanes of a connection, and responses that only the connection remembers.

A response that is not stored (`store: false`) can still be continued by `previous_response_id`. The connection keeps it
as an `EarlierTurn`, and the next request is sent with its items instead of the id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway.core.counting.parts import COMPACTIONS
from gateway.core.errors import GatewayError, InvalidRequest, PreviousNotFound
from gateway.core.values import dataclass
from gateway.dialects import openai_errors
from gateway.dialects.error_status import status_of
from gateway.dialects.openai_responses import SKELETON

Raw = msgspec.Raw
#: the fields of an event, values as received
Fields = dict[str, Raw]

_CREATE: Final = "response.create"
#: Codex sends this after it has processed a response. It expects no reply.
_NOTICES: Final = frozenset({"response.processed"})
_LANE: Final = re.compile(r"[A-Za-z0-9_.-]{1,256}")
#: fields of a message that do not belong to the HTTP body
_ENVELOPE: Final = ("type", "stream_id", "generate", "background", "stream")
_NULL: Final = Raw(b"null")
_TRUE: Final = Raw(b"true")
_FALSE: Final = Raw(b"false")
_ITEM_DONE: Final = "response.output_item.done"
#: a response that ended with one of these can be continued
_CONTINUABLE: Final = frozenset({"response.completed", "response.incomplete"})
_LAST: Final = _CONTINUABLE | {"response.failed"}
_ERROR: Final = "error"
#: every event that must be parsed contains one of these
_MARKS: Final = (b"response.completed", b"response.incomplete", b"response.failed", b'"error"', _ITEM_DONE.encode())
#: bytes of an error that is not JSON that are sent to the client
_MAX_TEXT: Final = 2_000
#: usage of a response that nothing was generated for
_NO_USAGE: Final = {
    "input_tokens": 0,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens": 0,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 0,
}

_FIELDS: Final = msgspec.json.Decoder(Fields)


_ABSENT: Final = Raw(b"")


class _Item(msgspec.Struct):
    """Fields of an output item that decide whether it can be sent again."""

    type: str = ""
    encrypted_content: str | None = None


class _Response(msgspec.Struct):
    """Fields of a response that are needed to continue it."""

    id: str = ""
    store: bool | None = None
    output: list[Raw] | None = None


class _Event(msgspec.Struct):
    """Fields of an event that are read."""

    type: str = ""
    item: Raw = _ABSENT
    response: Raw = _ABSENT


_EVENT: Final = msgspec.json.Decoder(_Event)
_ITEM: Final = msgspec.json.Decoder(_Item)
_RESPONSE: Final = msgspec.json.Decoder(_Response)


@dataclass(frozen=True, slots=True)
class CreateFrame:
    """A `response.create` message.

    Attributes:
        lane: its `stream_id`; None: the default lane of the connection.
        body: the fields of the request.
        generates: False if the model must not be called yet (`generate: false`).
    """

    lane: str | None
    body: Fields
    generates: bool

    @property
    def is_stored(self) -> bool:
        """Return True if the request asks the provider to store the response, which is the default."""
        return self.body.get("store") != _FALSE

    @property
    def is_in_conversation(self) -> bool:
        """Return True if earlier content is stored at the provider (`conversation`)."""
        return self.body.get("conversation", _NULL) != _NULL

    @property
    def previous_response_id(self) -> str | None:
        """Return the id of the response that the request continues, or None."""
        return _text(self.body.get("previous_response_id"))


@dataclass(frozen=True, slots=True)
class EarlierTurn:
    """Conversation up to a response that only the connection remembers.

    Attributes:
        items: the items of all requests and responses, encoded as in a JSON list without its brackets. This takes no
            more memory than the messages did, even for millions of small items, and needs no parsing.
    """

    response_id: str
    items: bytes


def read_create(message: str | bytes) -> CreateFrame | None:
    """Read a message of the client; return None if it is a notice that needs no response.

    Raises:
        InvalidRequest: it is not a supported message.
    """
    try:
        fields = _FIELDS.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"A message must be one JSON object: {error}.") from None
    kind = _text(fields.get("type"))
    if kind in _NOTICES:
        return None
    if kind != _CREATE:
        named = f'the type "{kind[:80]}"' if kind is not None else "no type"
        raise InvalidRequest(f"A message has {named}; over a WebSocket only {_CREATE} is understood.", param="type")
    lane = fields.get("stream_id")
    name = _text(lane)
    if lane not in (None, _NULL) and (name is None or not _LANE.fullmatch(name)):
        raise InvalidRequest("stream_id is 1 to 256 letters, digits, underscores, dots or dashes.", param="stream_id")
    if fields.get("background") == _TRUE:
        raise InvalidRequest("background is not supported over a WebSocket. Send it by POST.", param="background")
    body = {key: value for key, value in fields.items() if key not in _ENVELOPE}
    return CreateFrame(name, body, generates=fields.get("generate") != _FALSE)


def request_of(create: CreateFrame, earlier: EarlierTurn | None) -> bytes:
    """Return the body for POST /v1/responses. `earlier` replaces the id of the response that it continues.

    Raises:
        InvalidRequest: its `input` is neither a text nor a list.
    """
    body = {**create.body, "stream": _TRUE}
    if earlier is not None:
        del body["previous_response_id"]
        body["input"] = Raw(b"[%b]" % input_items(create, earlier))
    return msgspec.json.encode(body)


def input_items(create: CreateFrame, earlier: EarlierTurn | None) -> bytes:
    """Return the items of the continued conversation and of the request's `input`; a text becomes a user message.

    Raises:
        InvalidRequest: `input` is neither a text nor a list.
    """
    return _joined(earlier.items if earlier is not None else b"", _input_items(create))


def _input_items(create: CreateFrame) -> bytes:
    value = create.body.get("input")
    if value is None or value == _NULL:
        return b""
    text = _text(value)
    if text is not None:
        return msgspec.json.encode({"type": "message", "role": "user", "content": text})
    spelled = bytes(value)
    if not spelled.startswith(b"["):
        raise InvalidRequest("input is a text or a list of items.", param="input")
    return spelled[1:-1].strip()


def _joined(*parts: bytes | Raw) -> bytes:
    return b",".join(part for part in map(bytes, parts) if part)


class ResponseFrames:
    """Convert the events of one response stream to messages.

    `create`: the request; `earlier`: the conversation that it continues, if the connection remembers it.
    """

    def __init__(self, create: CreateFrame, earlier: EarlierTurn | None) -> None:
        self._create = create
        self._before = earlier
        self._done: list[Raw] = []
        #: True after the end of the response, or an error instead of it
        self.has_ended = False
        #: the conversation that the next request can continue, or None
        self.continuable_turn: EarlierTurn | None = None

    def message(self, data: bytes, headers: Mapping[str, str]) -> str | None:
        """Return the message for the data of an event; `headers` are added to the last message.

        Return None for an end mark and for everything after the last event. OpenAI sends `response.failed` after
        `error`. A client that stops at the first would treat the second as the end of its next request.
        """
        if self.has_ended or not data.startswith(b"{"):
            return None
        if not any(mark in data for mark in _MARKS):
            return _with_lane(data, self._create.lane)
        try:
            event = _EVENT.decode(data)
        except msgspec.MsgspecError:
            return _with_lane(data, self._create.lane)
        if event.type == _ITEM_DONE and event.item != _ABSENT and not self._create.is_stored:
            self._done.append(event.item.copy())
        elif event.type in _LAST or event.type == _ERROR:
            self.has_ended = True
            if event.type in _CONTINUABLE:
                self._keep_turn(event.response)
            return self._last(event.type, data, headers)
        return _with_lane(data, self._create.lane)

    def _keep_turn(self, raw: bytes | Raw) -> None:
        """Keep what is needed to continue the response, if only the connection can continue it."""
        create, before = self._create, self._before
        try:
            response = _RESPONSE.decode(raw)
        except msgspec.MsgspecError:
            return
        is_stored = create.is_stored and response.store is not False
        has_other_content = (create.previous_response_id is not None and before is None) or create.is_in_conversation
        if is_stored or not response.id or has_other_content:
            return
        # Some hosts leave the items out of the last event.
        output = [item.copy() for item in response.output] if response.output else self._done
        if any(_type_of(item) in COMPACTIONS for item in output):
            # It replaces the whole conversation before it, including the request.
            self.continuable_turn = EarlierTurn(response.id, _joined(*output))
            return
        self.continuable_turn = EarlierTurn(response.id, _joined(input_items(create, before), *_sendable(output)))

    def _last(self, event_type: str, data: bytes, headers: Mapping[str, str]) -> str:
        """Return the last event, with the headers that a response over HTTP would have."""
        fields: dict[str, Any] = _FIELDS.decode(data)
        known = fields.get("headers")
        try:
            own_headers = msgspec.json.decode(known, type=dict[str, Any]) if known is not None else {}
        except msgspec.MsgspecError:
            own_headers = {}
        if event_type == _ERROR and "error" not in fields:
            # In the documentation of HTTP streams the fields of the error are in the event itself.
            fields["error"] = {name: fields[name] for name in ("code", "message", "param") if name in fields}
        if event_type == _ERROR and "status" not in fields:
            # Codex ignores an error without a status and continues to wait.
            fields["status"] = status_of(data)
        fields["headers"] = {**headers, **own_headers}
        if self._create.lane is not None:
            fields["stream_id"] = self._create.lane
        return msgspec.json.encode(fields).decode()

    def complete_message(self, body: bytes, headers: Mapping[str, str]) -> str:
        """Return the single message for a response that a host without streaming sent as a whole."""
        self.has_ended = True
        try:
            fields = _FIELDS.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return error_message(502, body, headers, self._create.lane)
        if "status" not in fields and bytes(fields.get("error", b"null"))[:1] in (b"{", b'"'):
            # The body is an error instead of a response.
            return error_message(status_of(body), body, headers, self._create.lane)
        status = _text(fields.get("status"))
        kind = f"response.{status}" if f"response.{status}" in _LAST else "response.completed"
        if kind in _CONTINUABLE:
            self._keep_turn(body)
        lane = {"stream_id": self._create.lane} if self._create.lane is not None else {}
        event = {"type": kind, "sequence_number": 0, "response": Raw(body), "headers": headers, **lane}
        return msgspec.json.encode(event).decode()


def warm_up_messages(
    create: CreateFrame, earlier: EarlierTurn | None, response_id: str, now: float
) -> tuple[list[str], EarlierTurn]:
    """Return the messages for a request that generates nothing yet, and the turn that the next one can continue.

    Raises:
        PreviousNotFound: it continues a response that the connection does not remember.
        InvalidRequest: its `input` is neither a text nor a list.
    """
    if create.previous_response_id is not None and earlier is None:
        raise PreviousNotFound(
            f'This connection does not remember the response "{create.previous_response_id[:80]}". Send all input.',
            param="previous_response_id",
        )
    response = {**SKELETON, "incomplete_details": None, "model": "", "id": response_id, "created_at": int(now)}
    response.update({name: value for name, value in create.body.items() if name in response})
    response.update(status="in_progress", output=[], store=False)
    ended = {**response, "status": "completed", "usage": _NO_USAGE}
    events: list[dict[str, object]] = [
        {"type": "response.created", "sequence_number": 0, "response": response},
        {"type": "response.completed", "sequence_number": 1, "response": ended},
    ]
    messages = [str(_with_lane(msgspec.json.encode(event), create.lane)) for event in events]
    return messages, EarlierTurn(response_id, input_items(create, earlier))


def error_message(status: int, body: bytes, headers: Mapping[str, str], lane: str | None) -> str:
    """Return the message for an error with this status and body, in OpenAI's format or any other."""
    error: object = None
    try:
        fields = _FIELDS.decode(body)
        error = msgspec.json.decode(fields["error"], type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError):
        text = body[:_MAX_TEXT].decode("utf-8", "replace").strip()
        kind = "invalid_request_error" if 400 <= status < 500 else "api_error"  # noqa: PLR2004
        text = text or f"The response has the status {status}."
        error = {"type": kind, "code": None, "message": text, "param": None}
    event = {"type": _ERROR, "status": status, "error": error, "headers": headers}
    return str(_with_lane(msgspec.json.encode(event), lane))


def fault_message(fault: GatewayError, headers: Mapping[str, str], lane: str | None) -> str:
    """Return the message for an error of the gateway itself."""
    return error_message(fault.status, openai_errors.body(fault), headers, lane)


def _sendable(output: Sequence[Raw]) -> list[Raw]:
    """Return the items of a response that was not stored, in the form that a request accepts.

    Reasoning is accepted only with its `encrypted_content`. If reasoning is left out, the items after it are refused
    with the ids that the provider gave them, so the ids are removed.
    """
    kept = [item for item in output if not _is_orphaned(item)]
    return kept if len(kept) == len(output) else [_without_id(item) for item in kept]


def _type_of(item: Raw) -> str:
    try:
        return _ITEM.decode(item).type
    except msgspec.MsgspecError:
        return ""


def _is_orphaned(item: Raw) -> bool:
    try:
        known = _ITEM.decode(item)
    except msgspec.MsgspecError:
        return False
    return known.type == "reasoning" and not known.encrypted_content


def _without_id(item: Raw) -> Raw:
    try:
        fields = _FIELDS.decode(item)
    except msgspec.MsgspecError:
        return item
    fields.pop("id", None)
    return Raw(msgspec.json.encode(fields))


def _with_lane(data: bytes, lane: str | None) -> str:
    """Return an event as a message, with the name of its lane if it has one. The event must be a non-empty object."""
    text = data.decode("utf-8", "replace")
    return text if lane is None else f'{{"stream_id":"{lane}",{text[1:]}'


def _text(value: Raw | None) -> str | None:
    """Return the decoded string, or None if the value is not a string."""
    if value is None or bytes(memoryview(value)[:1]) != b'"':
        return None
    try:
        return msgspec.json.decode(value, type=str)
    except msgspec.MsgspecError:
        return None
