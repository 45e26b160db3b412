"""Read and write the messages of the Responses API over a WebSocket.

Each `response.create` is the body of one POST /v1/responses, and each event of that answer's stream is one message
(OpenAI's guide "WebSocket mode", and `ResponsesClientEvent` in its OpenAPI document). What differs from HTTP stands
here: the envelope around a body, the lanes of one connection, and answers that only the connection remembers.

A response that is not stored (`store: false`) can still be continued by `previous_response_id`: the connection keeps it
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
#: fields of an event, each spelled as it came
Fields = dict[str, Raw]

_CREATE: Final = "response.create"
#: Codex tells that it has taken an answer in; nobody waits for a word on it.
_NOTICES: Final = frozenset({"response.processed"})
_LANE: Final = re.compile(r"[A-Za-z0-9_.-]{1,256}")
#: what is not a part of the body that HTTP takes
_ENVELOPE: Final = ("type", "stream_id", "generate", "background", "stream")
_NULL: Final = Raw(b"null")
_TRUE: Final = Raw(b"true")
_FALSE: Final = Raw(b"false")
_ITEM_DONE: Final = "response.output_item.done"
#: an answer that ended in one of these can be gone on from
_TOLD: Final = frozenset({"response.completed", "response.incomplete"})
_LAST: Final = _TOLD | {"response.failed"}
_ERROR: Final = "error"
#: in an event that has to be looked at stands one of these
_MARKS: Final = (b"response.completed", b"response.incomplete", b"response.failed", b'"error"', _ITEM_DONE.encode())
#: how much of an answer that is no JSON is told
_MOST_TEXT: Final = 2_000
#: what has no answer yet
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
    """What matters of an item of an answer for whether it can be sent again."""

    type: str = ""
    encrypted_content: str | None = None


class _Response(msgspec.Struct):
    """What matters of a response for going on from it."""

    id: str = ""
    store: bool | None = None
    output: list[Raw] | None = None


class _Event(msgspec.Struct):
    """An event, as far as it has to be read."""

    type: str = ""
    item: Raw = _ABSENT
    response: Raw = _ABSENT


_EVENT: Final = msgspec.json.Decoder(_Event)
_ITEM: Final = msgspec.json.Decoder(_Item)
_RESPONSE: Final = msgspec.json.Decoder(_Response)


@dataclass(frozen=True, slots=True)
class CreateFrame:
    """A `response.create`.

    Attributes:
        lane: its `stream_id`; None: the connection's own lane.
        body: the fields of the request.
        generates: False where the model is not to be asked yet (`generate: false`).
    """

    lane: str | None
    body: Fields
    generates: bool

    @property
    def is_stored(self) -> bool:
        """Whether the provider is to keep the answer, as the request has it; that is its default."""
        return self.body.get("store") != _FALSE

    @property
    def is_in_conversation(self) -> bool:
        """Whether the provider has more of what was said (`conversation`)."""
        return self.body.get("conversation", _NULL) != _NULL

    @property
    def previous(self) -> str | None:
        """The answer that it goes on from."""
        return _text(self.body.get("previous_response_id"))


@dataclass(frozen=True, slots=True)
class EarlierTurn:
    """What was said up to an answer that only the connection remembers.

    Attributes:
        items: those of all requests and answers, as they stand between the brackets of a list. Millions of tiny ones
            take no more than they were sent as, and nothing has to take them apart.
    """

    response_id: str
    items: bytes


def read_create(message: str | bytes) -> CreateFrame | None:
    """What a message of the client's asks for; None where it only tells something.

    Raises:
        InvalidRequest: it is no event that is understood here.
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


def request_of(create: CreateFrame, told: EarlierTurn | None) -> bytes:
    """The body for POST /v1/responses. `told` stands in the place of the answer that the request goes on from.

    Raises:
        InvalidRequest: its `input` is neither a text nor a list.
    """
    body = {**create.body, "stream": _TRUE}
    if told is not None:
        del body["previous_response_id"]
        body["input"] = Raw(b"[%b]" % said(create, told))
    return msgspec.json.encode(body)


def said(create: CreateFrame, told: EarlierTurn | None) -> bytes:
    """The items of what the request goes on from and of its own `input`; a text is one message of the user's.

    Raises:
        InvalidRequest: `input` is neither a text nor a list.
    """
    return _joined(told.items if told is not None else b"", _input_items(create))


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
    """Makes the messages of one answer out of the events of its stream.

    `create`: what was asked; `told`: what that goes on from, where the connection remembers it.
    """

    def __init__(self, create: CreateFrame, told: EarlierTurn | None) -> None:
        self._create = create
        self._before = told
        self._done: list[Raw] = []
        #: the answer's end, or an error in its place, has been seen
        self.has_ended = False
        #: what can be gone on from
        self.told: EarlierTurn | None = None

    def message(self, data: bytes, headers: Mapping[str, str]) -> str | None:
        """The message for an event's data; `headers` go into the last.

        None where it is none: an end mark, or what follows the last one. OpenAI has `response.failed` behind `error`,
        and who stops at the first would take the second for the end of its next request.
        """
        if self.has_ended or not data.startswith(b"{"):
            return None
        if not any(mark in data for mark in _MARKS):
            return _in_lane(data, self._create.lane)
        try:
            event = _EVENT.decode(data)
        except msgspec.MsgspecError:
            return _in_lane(data, self._create.lane)
        if event.type == _ITEM_DONE and event.item != _ABSENT and not self._create.is_stored:
            self._done.append(event.item.copy())
        elif event.type in _LAST or event.type == _ERROR:
            self.has_ended = True
            if event.type in _TOLD:
                self._take(event.response)
            return self._last(event.type, data, headers)
        return _in_lane(data, self._create.lane)

    def _take(self, raw: bytes | Raw) -> None:
        """Keep what the answer can be gone on from by, if only the connection can."""
        create, before = self._create, self._before
        try:
            response = _RESPONSE.decode(raw)
        except msgspec.MsgspecError:
            return
        is_kept_there = create.is_stored and response.store is not False
        began_elsewhere = (create.previous is not None and before is None) or create.is_in_conversation
        if is_kept_there or not response.id or began_elsewhere:
            return
        # Some hosts leave the items out of the last event.
        output = [item.copy() for item in response.output] if response.output else self._done
        if any(_type_of(item) in COMPACTIONS for item in output):
            # It replaces all that was said before it, the request for it included.
            self.told = EarlierTurn(response.id, _joined(*output))
            return
        self.told = EarlierTurn(response.id, _joined(said(create, before), *_sendable(output)))

    def _last(self, event_type: str, data: bytes, headers: Mapping[str, str]) -> str:
        """The last event, with what an answer over HTTP would say in its headers."""
        fields: dict[str, Any] = _FIELDS.decode(data)
        known = fields.get("headers")
        try:
            theirs = msgspec.json.decode(known, type=dict[str, Any]) if known is not None else {}
        except msgspec.MsgspecError:
            theirs = {}
        if event_type == _ERROR and "error" not in fields:
            # The documents of HTTP's streams have the error's fields in the event itself.
            fields["error"] = {name: fields[name] for name in ("code", "message", "param") if name in fields}
        if event_type == _ERROR and "status" not in fields:
            # Codex takes an error without one for none, and waits on.
            fields["status"] = status_of(data)
        fields["headers"] = {**headers, **theirs}
        if self._create.lane is not None:
            fields["stream_id"] = self._create.lane
        return msgspec.json.encode(fields).decode()

    def whole(self, body: bytes, headers: Mapping[str, str]) -> str:
        """The one message for a response that came whole, from a host that knows no streams."""
        self.has_ended = True
        try:
            fields = _FIELDS.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return error_message(502, body, headers, self._create.lane)
        if "status" not in fields and bytes(fields.get("error", b"null"))[:1] in (b"{", b'"'):
            # No response, but an error in its place.
            return error_message(status_of(body), body, headers, self._create.lane)
        status = _text(fields.get("status"))
        kind = f"response.{status}" if f"response.{status}" in _LAST else "response.completed"
        if kind in _TOLD:
            self._take(body)
        lane = {"stream_id": self._create.lane} if self._create.lane is not None else {}
        event = {"type": kind, "sequence_number": 0, "response": Raw(body), "headers": headers, **lane}
        return msgspec.json.encode(event).decode()


def warmed_up(
    create: CreateFrame, told: EarlierTurn | None, response_id: str, now: float
) -> tuple[list[str], EarlierTurn]:
    """The messages that answer a request which asks for no answer yet, and what can be gone on from.

    Raises:
        PreviousNotFound: it goes on from an answer that the connection does not remember.
        InvalidRequest: its `input` is neither a text nor a list.
    """
    if create.previous is not None and told is None:
        raise PreviousNotFound(
            f'This connection remembers no answer "{create.previous[:80]}". Send the whole input.',
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
    messages = [str(_in_lane(msgspec.json.encode(event), create.lane)) for event in events]
    return messages, EarlierTurn(response_id, said(create, told))


def error_message(status: int, body: bytes, headers: Mapping[str, str], lane: str | None) -> str:
    """The message for a refusal that came with this status and body, OpenAI's or any other."""
    error: object = None
    try:
        fields = _FIELDS.decode(body)
        error = msgspec.json.decode(fields["error"], type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError):
        text = body[:_MOST_TEXT].decode("utf-8", "replace").strip()
        kind = "invalid_request_error" if 400 <= status < 500 else "api_error"  # noqa: PLR2004
        error = {"type": kind, "code": None, "message": text or f"The answer has the status {status}.", "param": None}
    event = {"type": _ERROR, "status": status, "error": error, "headers": headers}
    return str(_in_lane(msgspec.json.encode(event), lane))


def fault_message(fault: GatewayError, headers: Mapping[str, str], lane: str | None) -> str:
    """The message for what the gateway itself refuses."""
    return error_message(fault.status, openai_errors.body(fault), headers, lane)


def _sendable(output: Sequence[Raw]) -> list[Raw]:
    """The items of an answer that nobody stored, as a request may hold them.

    Reasoning is only taken back with its `encrypted_content`. What followed reasoning that is left out is refused by
    the id that the provider gave it, and taken without.
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


def _in_lane(data: bytes, lane: str | None) -> str:
    """An event as a message, with the name of its lane where it has one. It begins with a brace, and has a field."""
    text = data.decode("utf-8", "replace")
    return text if lane is None else f'{{"stream_id":"{lane}",{text[1:]}'


def _text(value: Raw | None) -> str | None:
    """The text that this spells, None where it is none."""
    if value is None or bytes(memoryview(value)[:1]) != b'"':
        return None
    try:
        return msgspec.json.decode(value, type=str)
    except msgspec.MsgspecError:
        return None
