"""Test that requests and responses of providers are logged, without credentials."""

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


class FakeReply:
    """A response in several chunks."""

    def __init__(self, pieces: Sequence[bytes], encoding: str = "") -> None:
        self.status = 200
        self.headers = [(b"content-encoding", encoding.encode())] if encoding else []
        self._pieces = pieces

    async def chunks(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


class FakeUpstream:
    """An upstream that returns this response; None: it cannot be reached."""

    def __init__(self, reply: FakeReply | None) -> None:
        self.reply = reply
        self.is_closed = False

    @asynccontextmanager
    async def send(self, request: Outgoing) -> AsyncIterator[UpstreamReply]:
        del request
        if self.reply is None:
            raise UpstreamUnreachable("nobody is there")
        yield self.reply

    async def aclose(self) -> None:
        self.is_closed = True


async def lines_of(reply: FakeReply | None, request: Outgoing = SENT, *, as_json: bool = True) -> list[str]:
    lines = list[str]()
    upstream = LoggedUpstream(FakeUpstream(reply), "openai", lines.append, as_json=as_json)
    async with upstream.send(request) as received:
        async for _ in received.chunks():
            assert not lines, "it is not over yet"
    return lines


async def logged(reply: FakeReply, body: bytes = b"{}") -> Any:
    (line,) = await lines_of(reply, Outgoing("POST", "https://host/v1/chat", [], body, call_id="c1"))
    return json.loads(line)


async def test_json_line_contains_request_and_response() -> None:
    (line,) = await lines_of(FakeReply([b'{"a":', b'"\xc3\xb6\\n"}']))
    fields = json.loads(line)
    assert fields.pop("time") > 1_000_000_000
    assert fields == {
        "event": "bodies", "call_id": "c1", "provider": "openai", "method": "POST", "path": "/v1/chat",
        "status": 200, "request_bytes": 2, "request": "{}", "response_bytes": 12, "response": '{"a":"ö\\n"}',
    }  # fmt: skip


async def test_text_line_contains_request_and_response() -> None:
    (line,) = await lines_of(FakeReply([b"one\ntwo"]), as_json=False)
    assert line == 'bodies c1 · openai POST /v1/chat · sent 2 bytes "{}" · 200 7 bytes "one\\ntwo"'


async def test_headers_and_query_are_not_logged() -> None:
    for as_json in (True, False):
        assert "secret" not in str(await lines_of(FakeReply([b"x"]), as_json=as_json))


@pytest.mark.parametrize(
    "field",
    ["authorization", "authorization_token", "Authorization", "api_key", "api-key", "apiKey", "x-api-key", "password"],
)
async def test_credential_fields_are_masked(field: str) -> None:
    body = json.dumps({"tools": [{"type": "mcp", field: 'se"cret\\'}], "messages": ["stays"]}).encode()
    request = (await logged(FakeReply([b""]), body))["request"]
    assert "cret" not in request
    assert json.loads(request) == {"tools": [{"type": "mcp", field: "***"}], "messages": ["stays"]}


async def test_truncated_credential_is_masked() -> None:
    body = b'{"messages":"' + b"x" * (MAX_BYTES - 40) + b'","api_key":"' + b"s3cret" * 100 + b'"}'
    assert "s3" not in (await logged(FakeReply([b""]), body))["request"]


async def test_long_body_is_truncated_and_its_size_is_logged() -> None:
    fields = await logged(FakeReply([b"a" * 1000] * 200), "ö".encode() * MAX_BYTES)
    assert fields["response"] == "a" * MAX_BYTES + "…"
    assert (fields["response_bytes"], fields["request_bytes"]) == (200_000, 2 * MAX_BYTES)
    assert fields["request"] == "ö" * (MAX_BYTES // 2) + "…"
    odd = await logged(FakeReply([b"x", "ö".encode() * MAX_BYTES]))
    assert odd["response"] == "x" + "ö" * (MAX_BYTES // 2 - 1) + "…", "half a letter is left out"


@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("GZIP", gzip.compress)]
)
async def test_compressed_response_is_decompressed_for_the_log(encoding: str, pack: Any) -> None:
    compressed = pack(b'{"a":1}')
    assert (await logged(FakeReply([compressed[:5], compressed[5:]], encoding)))["response"] == '{"a":1}'
    bomb = pack(b"x" * 10_000_000)
    assert (await logged(FakeReply([bomb], encoding)))["response"] == "x" * MAX_BYTES + "…"


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (FakeReply([b"\xff\xfe\x00"]), "(3 bytes that are not text)"),
        (FakeReply([b"abc"], "br"), "(3 bytes, compressed: br)"),
        (FakeReply([b"\x1f\x8b" + b"x" * 30], "gzip"), "(32 bytes, compressed: gzip)"),
        (FakeReply([]), ""),
    ],
)
async def test_body_that_is_not_text_is_replaced_by_a_note(reply: FakeReply, text: str) -> None:
    assert (await logged(reply))["response"] == text


async def test_unreachable_provider_is_logged_without_response() -> None:
    lines = list[str]()
    for as_json in (True, False):
        upstream = LoggedUpstream(FakeUpstream(None), "openai", lines.append, as_json=as_json)
        with pytest.raises(UpstreamUnreachable):
            async with upstream.send(SENT):
                pass
    assert (json.loads(lines[0])["status"], json.loads(lines[0])["response"]) == (None, "")
    assert "no response 0 bytes" in lines[1]


async def test_closing_closes_the_inner_upstream() -> None:
    way = FakeUpstream(None)
    await LoggedUpstream(way, "openai", print, as_json=True).aclose()
    assert way.is_closed


# --- a gateway ------------------------------------------------------------------------------------------------------------


def lines_in(gateway: GatewayProcess, event: str, number: int) -> list[Any]:
    """Wait for so many log lines of this event and return them. The lines of a call and of its bodies have no order."""

    def found() -> list[Any]:
        lines = [json.loads(line) for line in gateway.errors.read_text().splitlines() if line.startswith('{"event"')]
        return [line for line in lines if line["event"] == event]

    until(lambda: len(found()) >= number)
    return found()


def test_fallback_has_its_own_line_and_retry_has_none(
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


def test_gateway_logs_bodies_only_if_configured(gateway_process: StartProcess, mock_server: MockServer) -> None:
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
