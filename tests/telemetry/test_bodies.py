"""Bodies in the log: what was sent and what came back, of each answer, and nothing that is a credential."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.core.errors import UpstreamUnreachable
from gateway.core.http.request import Outgoing
from gateway.core.ports import UpstreamReply
from gateway.mock import MockProvider, MockServer
from gateway.telemetry.bodies import MAX_BYTES, LoggedUpstream
from tests.conftest import StartProcess, closed_port
from tests.support.gateways import GatewayProcess, until
from tests.support.web import HI

CHAT = "/v1/chat/completions"
SENT = Outgoing("POST", "https://host/v1/chat?key=secret", [(b"authorization", b"Bearer secret")], b"{}", call_id="c1")


class Answer:
    """An answer in some pieces."""

    def __init__(self, pieces: Sequence[bytes], encoding: str = "") -> None:
        self.status = 200
        self.headers = [(b"content-encoding", encoding.encode())] if encoding else []
        self._pieces = pieces

    async def chunks(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


class Way:
    """The way to a provider that gives this answer, or cannot be reached."""

    def __init__(self, answer: Answer | None) -> None:
        self.answer = answer
        self.is_closed = False

    @asynccontextmanager
    async def send(self, request: Outgoing) -> AsyncIterator[UpstreamReply]:
        del request
        if self.answer is None:
            raise UpstreamUnreachable("nobody is there")
        yield self.answer

    async def aclose(self) -> None:
        self.is_closed = True


async def lines_of(answer: Answer | None, request: Outgoing = SENT, *, as_json: bool = True) -> list[str]:
    lines = list[str]()
    upstream = LoggedUpstream(Way(answer), "openai", lines.append, as_json=as_json)
    async with upstream.send(request) as reply:
        async for _ in reply.chunks():
            assert not lines, "it is not over yet"
    return lines


async def told(answer: Answer, body: bytes = b"{}") -> Any:
    (line,) = await lines_of(answer, Outgoing("POST", "https://host/v1/chat", [], body, call_id="c1"))
    return json.loads(line)


async def test_a_line_says_what_was_sent_and_what_came() -> None:
    (line,) = await lines_of(Answer([b'{"a":', b'"\xc3\xb6\\n"}']))
    fields = json.loads(line)
    assert fields.pop("time") > 1_000_000_000
    assert fields == {
        "event": "bodies", "call_id": "c1", "provider": "openai", "method": "POST", "path": "/v1/chat",
        "status": 200, "request_bytes": 2, "request": "{}", "response_bytes": 12, "response": '{"a":"ö\\n"}',
    }  # fmt: skip


async def test_for_people_it_is_one_line_too() -> None:
    (line,) = await lines_of(Answer([b"one\ntwo"]), as_json=False)
    assert line == 'bodies c1 · openai POST /v1/chat · sent 2 bytes "{}" · 200 7 bytes "one\\ntwo"'


async def test_neither_headers_nor_a_query_are_written() -> None:
    for as_json in (True, False):
        assert "secret" not in str(await lines_of(Answer([b"x"]), as_json=as_json))


@pytest.mark.parametrize(
    "field",
    ["authorization", "authorization_token", "Authorization", "api_key", "api-key", "apiKey", "x-api-key", "password"],
)
async def test_fields_that_hold_a_credential_are_masked(field: str) -> None:
    body = json.dumps({"tools": [{"type": "mcp", field: 'se"cret\\'}], "messages": ["stays"]}).encode()
    request = (await told(Answer([b""]), body))["request"]
    assert "cret" not in request
    assert json.loads(request) == {"tools": [{"type": "mcp", field: "***"}], "messages": ["stays"]}


async def test_a_credential_that_is_cut_is_masked_as_well() -> None:
    body = b'{"messages":"' + b"x" * (MAX_BYTES - 40) + b'","api_key":"' + b"s3cret" * 100 + b'"}'
    assert "s3" not in (await told(Answer([b""]), body))["request"]


async def test_of_a_long_body_the_beginning_is_kept_and_its_size_is_said() -> None:
    fields = await told(Answer([b"a" * 1000] * 200), "ö".encode() * MAX_BYTES)
    assert fields["response"] == "a" * MAX_BYTES + "…"
    assert (fields["response_bytes"], fields["request_bytes"]) == (200_000, 2 * MAX_BYTES)
    assert fields["request"] == "ö" * (MAX_BYTES // 2) + "…"
    odd = await told(Answer([b"x", "ö".encode() * MAX_BYTES]))
    assert odd["response"] == "x" + "ö" * (MAX_BYTES // 2 - 1) + "…", "half a letter is left out"


@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("GZIP", gzip.compress)]
)
async def test_a_packed_answer_is_unpacked_for_the_log(encoding: str, pack: Any) -> None:
    compressed = pack(b'{"a":1}')
    assert (await told(Answer([compressed[:5], compressed[5:]], encoding)))["response"] == '{"a":1}'
    bomb = pack(b"x" * 10_000_000)
    assert (await told(Answer([bomb], encoding)))["response"] == "x" * MAX_BYTES + "…"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (Answer([b"\xff\xfe\x00"]), "(3 bytes that are not text)"),
        (Answer([b"abc"], "br"), "(3 bytes, compressed: br)"),
        (Answer([b"\x1f\x8b" + b"x" * 30], "gzip"), "(32 bytes, compressed: gzip)"),
        (Answer([]), ""),
    ],
)
async def test_what_cannot_be_shown_is_named(answer: Answer, text: str) -> None:
    assert (await told(answer))["response"] == text


async def test_a_provider_that_cannot_be_reached_has_no_answer() -> None:
    lines = list[str]()
    for as_json in (True, False):
        upstream = LoggedUpstream(Way(None), "openai", lines.append, as_json=as_json)
        with pytest.raises(UpstreamUnreachable):
            async with upstream.send(SENT):
                pass
    assert (json.loads(lines[0])["status"], json.loads(lines[0])["response"]) == (None, "")
    assert "no response 0 bytes" in lines[1]


async def test_it_closes_what_it_wraps() -> None:
    way = Way(None)
    await LoggedUpstream(way, "openai", print, as_json=True).aclose()
    assert way.is_closed


# --- a gateway ------------------------------------------------------------------------------------------------------------


def lines_in(gateway: GatewayProcess, event: str, number: int) -> list[Any]:
    """The lines of this event in its log, once there are so many: a call's and its bodies' come in any order."""

    def found() -> list[Any]:
        lines = [json.loads(line) for line in gateway.errors.read_text().splitlines() if line.startswith('{"event"')]
        return [line for line in lines if line["event"] == event]

    until(lambda: len(found()) >= number)
    return found()


def test_a_fallback_has_a_line_of_its_own_and_a_retry_has_none(
    gateway_process: StartProcess, mock_server: MockServer, mock: MockProvider
) -> None:
    nobody = {"base_url": f"http://127.0.0.1:{closed_port()}", "auth": "none", "retries": 1}
    models = [{"match": "main", "provider": "nobody", "fallback": ["upstream/spare"]}]
    flags = {"telemetry.log.format": "json", "telemetry.log.level": "info", "telemetry.log.bodies": True}
    gateway = gateway_process(mock_server.url, models=models, **flags, **{"providers.nobody": nobody})
    assert gateway.web.post(CHAT, {"model": "main", "messages": HI}).status == 200
    lines = lines_in(gateway, "bodies", 2)
    assert [(one["provider"], one["status"]) for one in lines] == [("nobody", None), ("upstream", 200)]
    assert len({one["call_id"] for one in lines}) == len(mock.calls) == 1
    assert json.loads(lines[1]["request"])["model"] == "spare"


def test_a_gateway_that_is_asked_to_logs_them_and_no_other_does(
    gateway_process: StartProcess, mock_server: MockServer
) -> None:
    flags = {"telemetry.log.format": "json", "telemetry.log.level": "info"}
    silent = gateway_process(mock_server.url, **flags)
    gateway = gateway_process(mock_server.url, **flags, **{"telemetry.log.bodies": True})
    body = {"model": "mock-small", "messages": [*HI, {"role": "user", "content": "a word of mine"}]}
    for one in (silent, gateway):
        assert one.web.post(CHAT, body, {"authorization": "Bearer of-the-caller"}).status == 200
        assert one.web.post(CHAT, {**body, "stream": True}).status == 200
        assert len(lines_in(one, "call", 2)) == 2
    whole, streamed = lines_in(gateway, "bodies", 2)
    assert lines_in(silent, "bodies", 0) == []
    assert "a word of mine" not in silent.errors.read_text()
    assert json.loads(whole["request"]) == body
    assert json.loads(whole["response"])["object"] == "chat.completion"
    assert streamed["response"].endswith("data: [DONE]\n\n")
    assert {one["call_id"] for one in (whole, streamed)} == {one["call_id"] for one in lines_in(gateway, "call", 2)}
    assert "of-the-caller" not in gateway.errors.read_text()
