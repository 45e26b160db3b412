"""Forward request bodies byte for byte to the provider, and response bodies byte for byte to the client."""

from __future__ import annotations

import hashlib
import itertools
import json

import pytest

from gateway.mock import MockProvider, MockServer
from tests.conftest import Scripted, StartGateway
from tests.support.scripted import DONE, SSE_HEAD, Connection, chunk, completion, usage_chunk
from tests.support.web import CHAT, Web

_models = itertools.count(1)

PLAIN = b'{"model":"mock-small","messages":[{"role":"user","content":"hi"}]}'
ODD_BODIES = {
    "plain": PLAIN,
    "whitespace": b' \r\n{ "model" :\t"mock-small" ,\n "messages" : [ { "role":"user" , "content":"hi" } ] }\n\n ',
    "unknown fields": PLAIN[:-1] + b',"x_unknown":{"b":1,"a":[null,1.0,1e5,-0]},"store":false}',
    "key order": b'{"messages":[{"content":"hi","role":"user"}],"temperature":0.10,"model":"mock-small"}',
    "escapes": b'{"model":"mock-small","messages":[{"role":"user","content":"\\u00e9\\u0041\\/ \\ud83d\\ude00 \\n"}]}',
    "escaped key": b'{"\\u006dodel":"mock-small","messages":[{"role":"user","content":"hi"}],"extra":1}',
    "unicode": '{"model":"mock-small","messages":[{"role":"user","content":"é 漢字 😀 \u2028"}]}'.encode(),
    "long numbers": PLAIN[:-1] + b',"seed":123456789012345678901234567890,"top_p":0.30000000000000004}',
    "explicit nulls": PLAIN[:-1] + b',"stream":null,"user":null,"tools":null}',
    "inner duplicates": b'{"model":"mock-small","messages":[{"role":"user","content":"a","content":"hi"}]}',
    "large": PLAIN[:-1] + b',"pad":"' + b"x" * 3_000_000 + b'"}',
}


@pytest.mark.parametrize("name", ODD_BODIES)
def test_a_body_reaches_the_provider_byte_for_byte(name: str, web: Web, mock: MockProvider, session: str) -> None:
    body = ODD_BODIES[name]
    answer = web.post(CHAT, body, {"x-session-id": session})
    assert answer.status == 200
    [call] = mock.calls
    assert call.body_sha256 == hashlib.sha256(body).hexdigest()
    assert call.body_bytes == len(body)


@pytest.mark.parametrize("name", ODD_BODIES)
def test_a_body_without_a_session_id_is_forwarded_unchanged(name: str, web: Web, mock: MockProvider) -> None:
    body = ODD_BODIES[name]
    answer = web.post(CHAT, body)
    assert answer.status == 200
    assert (answer.header("x-session-id") or "").startswith("auto-")
    assert mock.calls[0].body_sha256 == hashlib.sha256(body).hexdigest()


def test_a_stream_that_asks_for_usage_is_forwarded_byte_for_byte(web: Web, mock: MockProvider, session: str) -> None:
    body = PLAIN[:-1] + b', "stream" : true, "stream_options":{"include_usage" : true ,"x":1}}'
    answer = web.post(CHAT, body, {"x-session-id": session})
    assert mock.calls[0].body == body
    assert [event["usage"]["total_tokens"] for event in answer.events if event.get("usage")] == [answer.totals[2]]


@pytest.mark.parametrize(
    "options",
    [
        None,
        b"null",
        b'{"include_usage":false}',
        b'{"include_usage":null,"include_obfuscation":false}',
        b'{"include_obfuscation":false}',
    ],
)
def test_a_stream_request_gets_include_usage_and_keeps_all_other_bytes(
    options: bytes | None, web: Web, mock: MockProvider, session: str
) -> None:
    tail = b"" if options is None else b',"stream_options":' + options
    body = b'{"temperature":0.10,"model":"mock-small","messages":[ {"role":"user","content":"\\u0041" } ],"stream":true'
    body += b',"seed":123456789012345678901234567890' + tail + b',"x_last":[1.0]}'
    answer = web.post(CHAT, body, {"x-session-id": session})
    sent = mock.calls[0].body
    want = json.loads(body)
    want["stream_options"] = {**(want.get("stream_options") or {}), "include_usage": True}
    assert json.loads(sent) == want
    assert b'"temperature":0.10' in sent
    assert b'[ {"role":"user","content":"\\u0041" } ]' in sent
    assert b'"seed":123456789012345678901234567890' in sent
    assert list(json.loads(sent)) == list(dict.fromkeys([*json.loads(body), "stream_options"]))
    # The gateway requested the usage chunk for itself, so the client does not get it.
    assert answer.status == 200
    assert all(event["choices"] for event in answer.events)
    assert answer.totals[2] == mock.billed().total_tokens


def test_a_stream_is_unchanged_except_for_the_usage_that_the_client_did_not_request(
    scripted: Scripted, session: str
) -> None:
    odd = b"event: ping\r\nid: 7\r\ndata: {}\r\n\r\n" + b": keep-alive\n\n" + b"data:no json\n\n" + b"retry: 5\n\n"
    first = chunk("one") + odd + chunk("two")

    def script(connection: Connection) -> None:
        connection.send(SSE_HEAD + first + usage_chunk() + DONE)

    answer = scripted.play(script).stream(session)
    assert answer.body.startswith(first)
    rest = answer.body[len(first) :]
    assert rest.startswith(b": x-session-cumulative-total-tokens: 15\n")
    assert b"\n: x-session-usage-source: provider\n" in rest
    assert rest.endswith(b"\n\n" + DONE)
    assert b"prompt_tokens" not in answer.body
    assert answer.totals == (10, 5, 15)


def test_a_stream_with_requested_usage_is_unchanged_plus_a_comment(scripted: Scripted, session: str) -> None:
    stream = chunk("one") + chunk("two") + usage_chunk() + b"event: done\n" + DONE

    def script(connection: Connection) -> None:
        connection.send(SSE_HEAD + stream)

    answer = scripted.play(script).stream(session, stream_options={"include_usage": True})
    kept = [block for block in answer.body.split(b"\n\n") if not block.startswith(b": x-session")]
    assert b"\n\n".join(kept) == stream


def test_an_event_sent_byte_by_byte_arrives_whole(scripted: Scripted, session: str) -> None:
    stream = chunk("zwölf 漢字") + usage_chunk(3, 4) + DONE

    def script(connection: Connection) -> None:
        connection.send(SSE_HEAD)
        for index in range(len(stream)):
            connection.send(stream[index : index + 1])

    answer = scripted.play(script).stream(session)
    assert answer.totals == (3, 4, 7)
    assert answer.body.startswith(chunk("zwölf 漢字"))


def test_a_response_reaches_the_client_byte_for_byte(scripted: Scripted, session: str) -> None:
    body = b' {"choices" : [ ] , "usage":{"prompt_tokens":10 ,"completion_tokens": 5.0},"x":"\\u00e9"}\n'
    web = scripted.play(lambda connection: connection.whole(body, b"x-ratelimit-remaining-tokens: 7"))
    answer = web.chat(session)
    assert answer.body == body
    assert answer.totals == (10, 5, 15)
    assert answer.header("x-ratelimit-remaining-tokens") == "7"


def test_a_refusal_of_stream_options_is_remembered_per_model(web: Web, mock: MockProvider, session: str) -> None:
    model = f"old-server-{next(_models)}"
    first = web.stream(session, "refuse_stream_options=1;chunks=30", model=model)
    assert first.status == 200
    assert first.data_lines[-1] == "[DONE]"
    assert [call.status for call in mock.calls] == [400, 200]
    second = web.stream(session, "refuse_stream_options=1;chunks=30", model=model)
    assert second.status == 200
    assert [call.status for call in mock.calls] == [400, 200, 200]
    assert "stream_options" not in json.loads(mock.calls[-1].body)
    assert second.comments["x-session-usage-source"] == "estimated"
    assert second.totals[2] == 2 * first.totals[2] > 0
    # Another model of the same provider still gets stream options.
    other = web.stream(session, model=f"new-server-{next(_models)}")
    assert other.comments["x-session-usage-source"] == "mixed"
    [*_, newest] = mock.calls
    assert json.loads(newest.body)["stream_options"] == {"include_usage": True}


def test_a_client_that_sent_stream_options_receives_their_refusal(web: Web, mock: MockProvider, session: str) -> None:
    options = {"include_usage": True}
    answer = web.stream(session, "refuse_stream_options=1", model=f"old-server-{next(_models)}", stream_options=options)
    assert answer.status == 400
    assert answer.header("x-gateway-upstream-error") == "true"
    assert len(mock.calls) == 1


def test_other_refusals_of_a_stream_are_forwarded_without_a_retry(web: Web, mock: MockProvider, session: str) -> None:
    answer = web.stream(session, "status=400")
    assert answer.status == 400
    assert answer.error["code"] == "mock_error"
    assert len(mock.calls) == 1
    assert answer.header("x-session-cumulative-calls") == "0"


def test_an_alias_changes_the_model_and_nothing_else(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, models=[{"match": "fast", "provider": "upstream", "name": "mock-small"}])
    body = b'{"messages":[ {"role":"user","content":"\\u0041"} ],"model":"fast","top_p":1.00}'
    assert gateway.web.post(CHAT, body).status == 200
    assert (
        mock.calls[0].body == b'{"messages":[ {"role":"user","content":"\\u0041"} ],"model":"mock-small","top_p":1.00}'
    )
    assert gateway.web.chat(model="upstream/mock-large").json["model"] == "mock-large"


def test_a_compressed_body_is_decompressed(web: Web, mock: MockProvider, session: str) -> None:
    import gzip
    import zlib

    for encoding, data in (("gzip", gzip.compress(PLAIN)), ("deflate", zlib.compress(PLAIN))):
        answer = web.post(CHAT, data, {"x-session-id": session, "content-encoding": encoding})
        assert answer.status == 200
        assert mock.calls[-1].body == PLAIN
        assert mock.calls[-1].header("content-encoding") is None


def test_a_response_without_a_content_type_is_metered(scripted: Scripted, session: str) -> None:
    body = completion()

    def script(connection: Connection) -> None:
        connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    assert scripted.play(script).chat(session).totals == (10, 5, 15)
