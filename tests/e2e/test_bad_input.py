"""Invalid input gets a clear 4xx in OpenAI's error format, in bounded time, and does not harm the gateway."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator

import openai
import pytest

from gateway.mock import MockProvider, MockServer
from tests.conftest import Scripted
from tests.support.gateways import GatewayThread
from tests.support.nesting import DEEP
from tests.support.timing import in_time
from tests.support.web import CHAT, HI, Reply, Web, chat_bytes, connect, parse, read_all, read_until, talk

MESSAGES = b'"messages":[{"role":"user","content":"hi"}]'
PLAIN = b'{"model":"mock-small",' + MESSAGES + b"}"


def assert_refused(answer: Reply, status: int | None = None) -> None:
    assert_error_format(answer, status)
    assert answer.header("x-gateway-request-id"), "refusals carry a request id"


def assert_error_format(answer: Reply, status: int | None = None) -> None:
    assert 400 <= answer.status < 500, answer
    if status is not None:
        assert answer.status == status
    assert answer.header("content-type") == "application/json"
    assert set(answer.error) >= {"message", "type", "param", "code"}
    assert answer.error["message"]
    assert answer.error["code"]
    assert answer.header("x-should-retry") == "false"


BAD_BODIES = {
    "empty": b"",
    "space": b" \n",
    "no json": b"not json",
    "half json": PLAIN[:-1],
    "two values": PLAIN + PLAIN,
    "array": b"[]",
    "number": b"12",
    "null": b"null",
    "string": b'"x"',
    "messages is text": b'{"model":"m","messages":"x"}',
    "messages is null": b'{"model":"m","messages":null}',
    "messages is an object": b'{"model":"m","messages":{}}',
    "messages missing": b'{"model":"m"}',
    "model missing": b"{" + MESSAGES + b"}",
    "model empty": b'{"model":"",' + MESSAGES + b"}",
    "model null": b'{"model":null,' + MESSAGES + b"}",
    "model is a number": b'{"model":1,' + MESSAGES + b"}",
    "model is a list": b'{"model":["a"],' + MESSAGES + b"}",
    "stream is text": b'{"model":"m","stream":"yes",' + MESSAGES + b"}",
    "stream is 1": b'{"model":"m","stream":1,' + MESSAGES + b"}",
    "invalid utf-8": b'{"model":"m","messages":[{"role":"user","content":"\xff\xfe"}]}',
    "utf-8 surrogates": b'{"model":"m","messages":[{"role":"user","content":"\xed\xa0\x80"}]}',
    "utf-16": json.dumps({"model": "m", "messages": HI}).encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf" + PLAIN,
    "duplicate key": b'{"model":"a","model":"mock-small",' + MESSAGES + b"}",
    "duplicate escaped key": b'{"model":"a","\\u006dodel":"mock-small",' + MESSAGES + b"}",
    "deep list": b'{"model":"m","messages":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep list, open": b'{"model":"m","messages":' + b"[" * DEEP,
    "deep object": b'{"model":"m","messages":[],"x":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
    "control character": b'{"model":"m","messages":[{"role":"user","content":"\x00"}]}',
    "comment": b'{"model":"m",/* c */"messages":[]}',
    "trailing comma": b'{"model":"m","messages":[],}',
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_an_invalid_body_is_refused_and_later_calls_work(name: str, web: Web, mock: MockProvider, session: str) -> None:
    before = web.chat(session).totals
    with in_time():
        answer = web.post(CHAT, BAD_BODIES[name], {"x-session-id": session})
    assert_refused(answer, 400)
    assert answer.error["type"] == "invalid_request_error"
    assert answer.header("x-session-id") == session
    assert answer.totals == before
    assert len(mock.calls) == 1, "a refused call is not sent"
    after = web.chat(session)
    assert after.status == 200
    assert after.totals[2] == mock.billed().total_tokens


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model":"m","messages":"x"}', "messages"),
        (b"{" + MESSAGES + b"}", "model"),
        (b'{"model":"m","stream":1,' + MESSAGES + b"}", "stream"),
        (b'{"model":"a","model":"b",' + MESSAGES + b"}", "model"),
    ],
)
def test_a_refusal_names_the_field(body: bytes, param: str, web: Web) -> None:
    assert web.post(CHAT, body).error["param"] == param


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
def test_a_lone_surrogate_is_refused_with_its_position(path: str, web: Web) -> None:
    hello = b'[{"role":"user","content":"Hello \\ud83d"}]'
    body = b'{"model":"mock-small","max_tokens":9,"messages":' + hello + b',"input":' + hello + b"}"
    answer = web.post(path, body)
    assert answer.status == 400
    assert "\\ud83d at byte" in answer.error["message"]
    assert "lone surrogate" in answer.error["message"]


def nested(begin: bytes, end: bytes, times: int) -> bytes:
    """Return a request with a message that nests content parts `times` deep."""
    content = begin * times + b'"x"' + end * times
    return b'{"model":"mock-small","messages":[{"role":"user","content":' + content + b"}]}"


ODD_BODIES = {
    "lone surrogate": b'{"model":"mock-small","messages":[{"role":"user","content":"\\ud800"}]}',
    "lone surrogate in a key": b'{"model":"mock-small","messages":[],"\\udfff":1}',
    "lone surrogate as model": b'{"model":"\\ud800","messages":[]}',
    "lone surrogate as session": b'{"model":"mock-small","messages":[],"session_id":"\\ud800","metadata":"\\ud800"}',
    "nan": PLAIN[:-1] + b',"temperature":NaN}',
    "long number": PLAIN[:-1] + b',"seed":' + b"9" * 1_000_000 + b"}",
    "many keys": PLAIN[:-1] + b"".join(b',"k%d":1' % number for number in range(50_000)) + b"}",
    "messages of any kind": b'{"model":"mock-small","messages":[1,null,[],"x",{},{"role":7,"content":{"a":[]}}]}',
    "metadata of any kind": PLAIN[:-1]
    + b',"metadata":[1],"conversation":{"id":5},"prompt_cache_key":{},"session_id":[]}',
    "odd output limits": PLAIN[:-1] + b',"max_tokens":-5,"n":-1,"stop":1e400}',
    "moderately deep": b'{"model":"mock-small","messages":[' + b"[" * 900 + b"]" * 900 + b"]}",
    # Python 3.11 parses a thousand nested levels, later versions 10,000 and more. Function calls can nest less deeply.
    "results in results": nested(b'[{"type":"tool_result","content":', b"}]", 350),
    "results in results, deep": nested(b'[{"type":"tool_result","content":', b"}]", 3_000),
    "documents in documents": nested(b'[{"type":"document","source":{"type":"content","content":', b"}}]", 2_000),
    "files in files": nested(b'{"type":"file","file_id":"f","content":', b"}", 5_000),
    "control characters as model": b'{"model":"a\\r\\nx-evil: 1",' + MESSAGES + b"}",
    "long model": b'{"model":"' + b"m" * 100_000 + b'",' + MESSAGES + b"}",
    "odd stream options": b'{"model":"mock-small","stream":true,"stream_options":[1],' + MESSAGES + b"}",
    "stream options in text": b'{"model":"mock-small","stream":true,"stream_options":"yes",' + MESSAGES + b"}",
}


@pytest.mark.parametrize(("streamed", "named"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("name", ODD_BODIES)
def test_an_unusual_body_gets_a_response_or_a_4xx(
    name: str, streamed: bool, named: bool, *, web: Web, session: str
) -> None:
    body = ODD_BODIES[name]
    if streamed and b'"stream"' not in body:
        body = body.rstrip()[:-1] + b',"stream":true}'
    with in_time():
        answer = web.post(CHAT, body, {"x-session-id": session} if named else None)
    assert answer.status == 200 or 400 <= answer.status < 500, answer.body[:300]
    assert answer.header("x-evil") is None
    assert web.chat(session).status == 200


def test_a_hundred_thousand_messages_are_answered_in_time(web: Web, mock: MockProvider, session: str) -> None:
    body = json.dumps({"model": "mock-small", "messages": HI * 100_000}).encode()
    with in_time():
        assert web.post(CHAT, body).status == 200
    assert web.get("/healthz").status == 200


# --- size ---------------------------------------------------------------------------------------------------------


def test_a_body_of_65_mib_is_refused_with_413(web: Web, mock: MockProvider, session: str) -> None:
    answer = web.post(CHAT, PLAIN + b" " * (65 << 20), {"x-session-id": session})
    assert_refused(answer, 413)
    assert answer.error["code"] == "request_too_large"
    assert "64" in answer.error["message"]
    assert mock.calls == []


def test_expect_100_continue_with_a_too_large_body_is_refused_at_once(
    web: Web, mock: MockProvider, session: str
) -> None:
    head = chat_bytes(b"", b"expect: 100-continue").replace(b"length: 0", b"length: %d" % (65 << 20))
    with in_time(), connect(web.url) as sock:
        sock.sendall(head)
        data = read_all(sock)
    assert_refused(parse(data), 413)
    assert not data.startswith(b"HTTP/1.1 100"), "it must not get 100 Continue and then a refusal"


def test_a_chunked_body_of_65_mib_is_refused(web: Web, mock: MockProvider, session: str) -> None:
    head = chat_bytes(b"", b"transfer-encoding: chunked").replace(b"content-length: 0\r\n", b"")
    block = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
    assert_refused(talk(web.url, head, *[block] * 65, b"0\r\n\r\n"), 413)
    assert mock.calls == []
    assert web.chat(session).status == 200


def test_the_sdk_receives_413_for_a_too_large_body(client: openai.OpenAI, mock: MockProvider) -> None:
    with pytest.raises(openai.APIStatusError) as error:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * (65 << 20)}])
    assert error.value.status_code == 413
    assert mock.calls == []


@pytest.mark.parametrize("size", [65 << 20, 300 << 20])
def test_a_gzip_bomb_is_refused(size: int, web: Web, mock: MockProvider, session: str) -> None:
    import zlib

    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    block = b" " * (1 << 20)
    body = b"".join([packer.compress(block) for _ in range(size >> 20)]) + packer.flush()
    with in_time():
        answer = web.post(CHAT, body, {"content-encoding": "gzip"})
    assert_refused(answer, 413)
    assert mock.calls == []


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", b"no gzip"),
        ("gzip", gzip.compress(PLAIN, mtime=0)[:-12]),
        ("gzip", PLAIN),
        ("deflate", b"no deflate"),
        ("br", PLAIN),
        ("zstd", PLAIN),
        ("gzip, gzip", gzip.compress(gzip.compress(PLAIN, mtime=0), mtime=0)),
        ("\x80", PLAIN),
    ],
)
def test_a_body_with_unreadable_compression_is_refused(
    encoding: str, body: bytes, web: Web, mock: MockProvider
) -> None:
    assert_refused(web.post(CHAT, body, {"content-encoding": encoding}), 400)
    assert mock.calls == []


def test_an_empty_compressed_body_is_refused(web: Web) -> None:
    assert_refused(web.post(CHAT, b"", {"content-encoding": "gzip"}), 400)


# --- heads --------------------------------------------------------------------------------------------------------

BAD_HEADS = {
    "length and chunked": chat_bytes(PLAIN, b"transfer-encoding: chunked"),
    "two lengths": chat_bytes(PLAIN, b"content-length: 3"),
    "negative length": chat_bytes(PLAIN).replace(b"length: ", b"length: -"),
    "length is text": chat_bytes(PLAIN).replace(b"length: ", b"length: x"),
    "huge length": chat_bytes(PLAIN).replace(b"length: ", b"length: 99999999999999999999"),
    "bare cr in a value": chat_bytes(PLAIN, b"x-session-id: a\rx-evil: 1"),
    "nul in a value": chat_bytes(PLAIN, b"x-session-id: a\x00b"),
    "space before the colon": chat_bytes(PLAIN, b"x-session-id : a"),
    "no colon": chat_bytes(PLAIN, b"x-session-id"),
    "no name": chat_bytes(PLAIN, b": a"),
    "no http": b"hello there\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "unknown method": chat_bytes(PLAIN).replace(b"POST", b"FROB"),
    "bad chunk": chat_bytes(b"zz\r\nhi\r\n", b"transfer-encoding: chunked").replace(b"content-length: 8\r\n", b""),
    "space in the path": b"GET /v1/mo dels HTTP/1.1\r\nhost: a\r\n\r\n",
}


@pytest.mark.parametrize("name", BAD_HEADS)
def test_an_invalid_http_head_is_refused_and_the_connection_closed(name: str, web: Web, mock: MockProvider) -> None:
    with in_time():
        answer = talk(web.url, BAD_HEADS[name])
    assert answer.header("x-evil") is None
    assert_error_format(answer)
    assert mock.calls == []
    assert web.get("/healthz").status == 200


def test_a_refused_head_gets_a_request_id(web: Web) -> None:
    assert_refused(talk(web.url, BAD_HEADS["no http"]), 400)
    assert_refused(talk(web.url, chat_bytes(PLAIN, b"x-big: " + b"a" * 70_000)), 431)


def test_a_folded_header_adds_no_header(web: Web, mock: MockProvider) -> None:
    answer = talk(web.url, chat_bytes(PLAIN, b"x-session-id: a\r\n x-evil: 1"))
    assert answer.header("x-evil") is None
    assert all(call.header("x-evil") is None for call in mock.calls)
    assert answer.status < 500


@pytest.mark.parametrize(
    "path",
    ["/s/a%0d%0ax-evil:%201/v1/chat/completions", "/s/a%00/v1/models", "/s/%C3%A9/v1/models", "/s/a%2Fb/v1/models"],
)
def test_a_session_in_the_path_injects_no_header(path: str, web: Web, mock: MockProvider) -> None:
    answer = web.post(path, PLAIN)
    assert_refused(answer, 400)
    assert answer.header("x-evil") is None
    assert mock.calls == []


def test_a_non_ascii_header_is_forwarded_unchanged(scripted: Scripted, session: str) -> None:
    raw = "héadér-漢".encode()
    answer = talk(scripted.web.url, chat_bytes(PLAIN, b"x-title: " + raw, b"x-session-id: " + session.encode()))
    assert answer.status == 200
    [received] = scripted.upstream.requests
    assert (received.header("x-title") or "").encode("latin-1") == raw


def test_a_non_ascii_session_id_is_ignored(web: Web, mock: MockProvider) -> None:
    answer = talk(web.url, chat_bytes(PLAIN, "x-session-id: sitzung-ü".encode()))
    assert answer.status == 200
    assert (answer.header("x-session-id") or "").startswith("auto-")


@pytest.mark.parametrize("request_id", [b"a b", b"\xff", b"x" * 129, b"", b"a\tb"])
def test_a_request_id_that_cannot_be_echoed_is_replaced(request_id: bytes, web: Web, mock: MockProvider) -> None:
    answer = talk(web.url, chat_bytes(PLAIN, b"x-request-id: " + request_id))
    shown = answer.header("x-gateway-request-id") or ""
    assert shown.encode("latin-1") != request_id
    assert web.get(f"/api/calls/{shown}").json["request_id"] == shown


@pytest.mark.parametrize(
    "name", ["x-context-budget", "x-session-budget-tokens", "x-session-budget-usd", "x-response-mode"]
)
def test_a_number_with_thousands_of_digits_is_refused_and_its_body_memory_freed(name: str, web: Web) -> None:
    # A worker holds 16 bodies of the largest size at the same time.
    body = json.dumps({"model": "mock-small", "messages": HI, "pad": "x" * 2**20}).encode()
    for _ in range(3):
        assert_refused(talk(web.url, chat_bytes(body, f"{name}: {'0' * 5_000}1".encode())), 400)
    assert talk(web.url, chat_bytes(PLAIN)).status == 200


def test_a_content_length_with_thousands_of_leading_zeros_is_accepted(web: Web) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {'0' * 5_000}{len(PLAIN)}\r\n\r\n"
    assert talk(web.url, head.encode() + PLAIN).status == 200


@pytest.mark.parametrize("size", [70_000, 1 << 20, 20 << 20])
def test_a_header_that_is_too_large_is_refused(size: int, web: Web, mock: MockProvider) -> None:
    with in_time():
        answer = talk(web.url, chat_bytes(PLAIN, b"x-big: " + b"a" * size))
    if size < 1 << 20 or answer.status:
        assert_error_format(answer, 431)
    assert mock.calls == []


@pytest.mark.parametrize("number", [300, 50_000])
def test_too_many_headers_are_refused(number: int, web: Web, mock: MockProvider) -> None:
    headers = [b"x-%d: 1" % index for index in range(number)]
    answer = talk(web.url, chat_bytes(PLAIN, *headers))
    if number == 300 or answer.status:
        assert_error_format(answer, 431)
    assert mock.calls == []


def test_a_long_request_line_is_refused(web: Web, mock: MockProvider) -> None:
    assert_error_format(talk(web.url, b"GET /v1/" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n"), 431)


def test_headers_just_below_the_limits_are_accepted(web: Web, mock: MockProvider) -> None:
    headers = [b"x-%d: %s" % (index, b"a" * 200) for index in range(200)]
    assert talk(web.url, chat_bytes(PLAIN, *headers)).status == 200


@pytest.fixture(scope="module")
def hasty_server(mock_server: MockServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayThread]:
    flags = {"server.header_timeout_s": 0.6, "server.body_timeout_s": 0.6, "server.max_body_mb": 0.01}
    gateway = GatewayThread(tmp_path_factory.mktemp("hasty"), mock_server.url, flags)
    yield gateway
    gateway.stop()


@pytest.fixture
def hasty(hasty_server: GatewayThread, mock: MockProvider) -> Web:
    return hasty_server.web


@pytest.mark.parametrize("head", [b"POST /v1/chat/comp", b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nx-a: b"])
def test_an_incomplete_head_times_out(head: bytes, hasty: Web) -> None:
    with in_time(at_least=0.5):
        answer = talk(hasty.url, head)
    assert_error_format(answer, 400)
    assert answer.error["code"] == "header_timeout"


def test_a_head_sent_byte_by_byte_times_out(hasty: Web) -> None:
    with in_time(), connect(hasty.url) as sock:
        sock.settimeout(0.05)
        got = b""
        for byte in b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 200:
            try:
                sock.sendall(bytes([byte]))
                got = sock.recv(65536)
            except TimeoutError:
                continue
            except ConnectionError:
                break
            break
    assert b"header_timeout" in got


def test_a_silent_connection_is_closed(hasty: Web) -> None:
    with in_time(at_least=0.5), connect(hasty.url) as sock:
        assert read_all(sock) == b""


def test_an_incomplete_head_on_a_reused_connection_times_out(hasty: Web) -> None:
    with connect(hasty.url) as sock:
        sock.sendall(chat_bytes(PLAIN).replace(b"connection: close\r\n", b""))
        assert b"200 OK" in sock.recv(65536)
        sock.sendall(b"POST /v1/chat")
        with in_time():
            rest = read_all(sock)
    assert b"header_timeout" in rest


@pytest.mark.parametrize("chunked", [False, True])
def test_an_incomplete_body_times_out(chunked: bool, hasty: Web, mock: MockProvider) -> None:
    data = chat_bytes(PLAIN + b" " * 50)[:-50]
    if chunked:
        data = chat_bytes(b"", b"transfer-encoding: chunked").replace(b"content-length: 0\r\n", b"") + b"5\r\nabc"
    with in_time(at_least=0.5):
        answer = talk(hasty.url, data)
    assert_refused(answer, 400)
    assert answer.error["code"] == "body_timeout"
    assert mock.calls == []


def test_a_slow_body_without_pauses_is_accepted(hasty: Web, mock: MockProvider) -> None:
    with connect(hasty.url) as sock:
        data = chat_bytes(PLAIN)
        sock.sendall(data[:-20])
        for byte in data[-20:]:
            time.sleep(0.04)
            sock.sendall(bytes([byte]))
        assert parse(read_all(sock)).status == 200


def test_a_call_may_take_longer_than_the_header_timeout(hasty: Web, mock: MockProvider, session: str) -> None:
    assert hasty.chat(session, "delay=0.8").status == 200


def test_the_configured_body_size_limit_applies(hasty: Web, mock: MockProvider) -> None:
    assert_refused(hasty.post(CHAT, PLAIN + b" " * 20_000), 413)
    assert hasty.post(CHAT, PLAIN + b" " * 5_000).status == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/sessions", "/healthz"])
@pytest.mark.parametrize(
    "twice",
    [
        (b"authorization: Bearer a", b"Authorization: Bearer b"),
        (b"x-api-key: a", b"x-api-key: a"),
        (b"api-key: a", b"Api-Key: b"),
        (b"host: b",),
    ],
)
def test_a_credential_or_host_that_is_sent_twice_is_refused(
    path: str, twice: tuple[bytes, ...], web: Web, mock: MockProvider
) -> None:
    lines = [b"POST " + path.encode() + b" HTTP/1.1", b"host: localhost", b"connection: close", *twice]
    body = b'{"model":"m","messages":[]}'
    answer = talk(web.url, b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", body]))
    assert answer.status == 400
    assert answer.error["message"].endswith("Send only one.")
    if path == "/v1/messages":
        assert answer.json["type"] == "error"
    assert mock.calls == []


# --- paths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../x",
        "/v1/../api/sessions",
        "/v1/files/../../admin",
        "/v1/%2e%2e/x",
        "/v1/%2E%2e/%2e./x",
        "/v1/files/%2e%2e%2f%2e%2e%2fadmin",
        "/v1/files/..%2f..%2fadmin",
        "/v1/files/..%5c..%5cadmin",
        "/v1/files/..\\..\\admin",
        "/v1/./x",
        "/s/a/v1/../../x",
        "/v1/a%00b",
        "/v1/a%0d%0ab",
        "/v1/a%20",
        "/v1//../x",
    ],
)
def test_a_path_traversal_is_refused(path: str, web: Web, mock: MockProvider) -> None:
    answer = talk(web.url, b"GET " + path.encode() + b" HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
    assert_refused(answer)
    assert mock.calls == []


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/", "/v2/models", "/nope", "/s/a", "/s/a/x", "/V1/models", "/admin", "/v1x/models"]
)
def test_an_unknown_path_returns_404(path: str, web: Web, mock: MockProvider) -> None:
    assert_refused(web.get(path), 404)
    assert mock.calls == []


def test_an_unknown_path_under_v1_is_forwarded_to_the_provider(web: Web, mock: MockProvider) -> None:
    answer = web.get("/v1/nothing/here?x=%20y&x=1")
    assert answer.status == 404
    assert answer.header("x-gateway-upstream-error") == "true"
    [call] = mock.calls
    assert (call.path, call.query) == ("/v1/nothing/here", "x=%20y&x=1")


def test_an_encoded_path_stays_encoded(scripted: Scripted) -> None:
    scripted.web.get("/v1/models/org%2Fmodel%3Av1?after=a%2Bb")
    assert scripted.upstream.requests[0].path == "/v1/models/org%2Fmodel%3Av1?after=a%2Bb"


def test_a_client_does_not_choose_the_upstream(scripted: Scripted) -> None:
    """Ignore absolute addresses and Host when choosing the upstream."""
    body = (
        chat_bytes(PLAIN)
        .replace(b"POST /v1", b"POST http://192.0.2.1/v1")
        .replace(b"host: gateway", b"host: 192.0.2.1")
    )
    answer = talk(scripted.web.url, body)
    assert answer.status == 200
    assert len(scripted.upstream.requests) == 1
    assert scripted.upstream.requests[0].path == CHAT


@pytest.mark.parametrize("method", ["CONNECT", "TRACE", "OPTIONS", "HEAD", "PUT", "DELETE", "PATCH"])
def test_other_http_methods_get_a_response(method: str, web: Web, mock: MockProvider) -> None:
    target = "example.org:443" if method == "CONNECT" else CHAT
    request = f"{method} {target} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".encode()
    answer = talk(web.url, request)
    assert 200 <= answer.status < 500
    assert web.get("/healthz").status == 200


def test_an_unsupported_upgrade_keeps_the_body(web: Web, mock: MockProvider) -> None:
    request = chat_bytes(PLAIN, b"upgrade: h2c", b"http2-settings: AAMAAABk").replace(
        b": close", b": Upgrade, HTTP2-Settings"
    )
    with connect(web.url) as sock:
        sock.sendall(request)
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")
    assert mock.calls[0].body == PLAIN


def test_an_upgrade_header_sent_in_two_parts_keeps_the_body(web: Web, mock: MockProvider) -> None:
    request = chat_bytes(PLAIN, b"upgrade: h2c").replace(b": close", b": Upgrade")
    at = request.index(b"upgrade: h2c") + 3
    with connect(web.url) as sock:
        sock.sendall(request[:at])
        time.sleep(0.05)
        sock.sendall(request[at:])
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")
    assert mock.calls[0].body == PLAIN


def test_an_upgrade_on_a_reused_connection_keeps_the_body(web: Web, mock: MockProvider) -> None:
    first = chat_bytes(PLAIN).replace(b"connection: close\r\n", b"")
    second = chat_bytes(PLAIN, b"upgrade: h2c").replace(b": close", b": Upgrade")
    with connect(web.url) as sock:
        for request in (first, second):
            sock.sendall(request)
            # Read the whole first response, or its rest would be treated as the second one.
            answer = read_until(sock, b"}}}")
            assert answer.startswith(b"HTTP/1.1 200")
            assert answer.endswith(b"}}}")
    assert [call.body for call in mock.calls] == [PLAIN, PLAIN]


@pytest.mark.parametrize("path", ["/v1/realtime?model=any", "/s/mine/v1/realtime"])
def test_a_websocket_of_another_api_is_refused_by_the_gateway(path: str, web: Web, mock: MockProvider) -> None:
    handshake = (
        f"GET {path} HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
        "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    answer = talk(web.url, handshake.encode())
    assert answer.status == 426
    assert answer.json["error"]["code"] == "websocket_unsupported"
    assert not mock.calls


def test_pipelined_requests_are_answered_in_order(web: Web, mock: MockProvider) -> None:
    first = chat_bytes(PLAIN, b"x-request-id: first", b"x-mock: delay=0.1").replace(b"connection: close\r\n", b"")
    second = chat_bytes(PLAIN, b"x-request-id: second")
    with connect(web.url) as sock:
        sock.sendall(first + second)
        data = read_all(sock)
    assert 0 < data.index(b"x-gateway-request-id: first") < data.index(b"x-gateway-request-id: second")
    assert data.count(b"HTTP/1.1 200") == 2


def test_expect_100_continue_is_supported_and_not_forwarded(web: Web, mock: MockProvider) -> None:
    data = chat_bytes(PLAIN, b"expect: 100-continue")
    head, body = data[: -len(PLAIN)], data[-len(PLAIN) :]
    with connect(web.url) as sock:
        sock.sendall(head)
        assert sock.recv(65536).startswith(b"HTTP/1.1 100")
        sock.sendall(body)
        assert parse(read_all(sock)).status == 200
    assert mock.calls[0].header("expect") is None


# --- refusals -----------------------------------------------------------------------------------------------------


def test_a_refusal_before_the_body_is_read_still_reports_the_totals(web: Web, mock: MockProvider, session: str) -> None:
    totals = web.chat(session).totals
    head = chat_bytes(b"", b"x-session-id: " + session.encode(), b"x-request-id: mine", b"expect: 100-continue")
    answer = talk(web.url, head.replace(b"length: 0", b"length: %d" % (65 << 20)))
    assert_refused(answer, 413)
    assert answer.header("x-gateway-request-id") == "mine"
    assert answer.header("x-session-id") == session
    assert answer.totals == totals


def test_the_session_of_a_path_is_named_in_a_refusal(web: Web, mock: MockProvider, session: str) -> None:
    totals = web.post(f"/s/{session}/v1/chat/completions", PLAIN).totals
    answer = web.post(f"/s/{session}/v1/chat/completions", b"nonsense")
    assert_refused(answer, 400)
    assert answer.header("x-session-id") == session
    assert answer.totals == totals


def test_a_refusal_in_the_anthropic_api_has_its_error_format(web: Web) -> None:
    answer = web.post("/v1/messages", b"x" * 10, {"content-encoding": "br"})
    assert answer.status == 400
    assert answer.json["type"] == "error"
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert answer.json["request_id"] == answer.header("x-gateway-request-id")
