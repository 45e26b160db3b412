"""HTTP/2 by real clients on a real port: what it says beyond HTTP/1.1, and what one connection may cost."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.mock import MockServer, Provider
from gateway.server import serving
from gateway.server.protocol import ServerConfig
from tests.conftest import StartGateway
from tests.support.asgi import Application, alive
from tests.support.gateways import GatewayThread, until
from tests.support.http2 import Answer, Talk
from tests.support.timing import LIMIT_S
from tests.support.web import CHAT, HI, connect, parse, read_all

pytest.importorskip("zttp", reason="the extra [http2] is not installed")

CANCEL, REFUSED, CALM = 8, 7, 11
TEXT = (b"content-type", b"text/plain")


def chat(**fields: object) -> bytes:
    return json.dumps({"model": "mock-small", "messages": HI, **fields}).encode()


@pytest.fixture(scope="module")
def server(mock_server: MockServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayThread]:
    gateway = GatewayThread(tmp_path_factory.mktemp("http2"), mock_server.url, {"server.http2": True})
    yield gateway
    gateway.stop()


@pytest.fixture
def talk(server: GatewayThread, mock: Provider) -> Iterator[Talk]:
    with Talk(server.url) as client:
        yield client


def options(app: Application) -> ServerConfig:
    return serving.make_config(
        alive(app), max_head_bytes=65_536, max_body=2**24, head_timeout_s=5, grace_s=1, http2=True
    )


async def says_ok(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [TEXT]})
    await send({"type": "http.response.body", "body": b"ok"})


# --- totals ----------------------------------------------------------------------------------------------------


def comments(answer: Answer) -> dict[str, str]:
    lines = [line[2:] for line in answer.body.decode().split("\n") if line.startswith(": x-")]
    return dict(line.split(": ", 1) for line in lines)


def test_a_stream_has_its_totals_as_trailers(talk: Talk, session: str) -> None:
    for calls in (1, 2):
        answer = talk.end(talk.chat(chat(stream=True), ("x-session-id", session)))
        assert answer.ended
        assert answer.headers["x-session-usage-final"] == "false"
        assert answer.trailers["x-session-usage-final"] == "true"
        assert answer.trailers["x-session-cumulative-calls"] == str(calls)
        assert {name: answer.trailers[name] for name in comments(answer)} == comments(answer)
        assert {"x-token-usage", "x-session-cumulative-token-usage"} <= set(answer.trailers)
        assert set(answer.trailers) <= set(answer.headers["trailer"].split(", "))


def test_they_say_what_is_left_of_a_budget_and_come_without_the_comment(
    mock_server: MockServer, mock: Provider, gateway_server: StartGateway
) -> None:
    flags = {"server.http2": True, "sessions.stream_totals": "off", "budget.tokens": 100_000}
    with Talk(gateway_server(mock_server.url, **flags).url) as client:
        answer = client.end(client.chat(chat(stream=True, max_tokens=9), ("x-session-id", "s")))
    assert comments(answer) == {}
    used = json.loads(answer.trailers["x-session-cumulative-token-usage"])["totalTokens"]
    assert answer.trailers["x-session-budget-remaining-tokens"] == str(100_000 - used)


def test_json_in_place_of_a_stream_has_them_as_well(
    mock: Provider, byte_server: Any, gateway_server: StartGateway
) -> None:
    body = (
        b'{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[],'
        b'"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}}'
    )
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(body)
    upstream = byte_server(lambda connection: connection.send(head + body))
    with Talk(gateway_server(upstream.url, **{"server.http2": True}).url) as client:
        answer = client.end(client.chat(chat(stream=True), ("x-session-id", "s")))
    assert answer.body == body
    assert answer.trailers["x-session-cumulative-total-tokens"] == "7"


def test_a_stream_that_breaks_off_has_none_and_no_end(talk: Talk, session: str) -> None:
    answer = talk.end(talk.chat(chat(stream=True), ("x-session-id", session), ("x-mock", "die=2")))
    assert (answer.ended, answer.trailers) == (False, {})
    assert answer.reset is not None
    # The connection goes on.
    assert talk.end(talk.chat(chat())).statuses == [200]


def test_no_other_answer_has_any(talk: Talk, session: str) -> None:
    answer = talk.end(talk.chat(chat(), ("x-session-id", session)))
    assert (answer.ended, answer.trailers, "trailer" in answer.headers) == (True, {}, False)
    assert answer.headers["x-session-usage-final"] == "true"


def test_a_client_of_http_1_on_the_same_port_has_the_comment_alone(server: GatewayThread, session: str) -> None:
    answer = server.web.stream(session)
    assert answer.clean
    assert answer.header("trailer") is None
    assert answer.totals[2] > 0


# --- ordinary clients ------------------------------------------------------------------------------------------


def test_the_sdk_of_openai(server: GatewayThread, mock: Provider) -> None:
    hi: Any = HI
    with openai.DefaultHttpxClient(http1=False, http2=True) as transport:
        with openai.OpenAI(base_url=server.base_url, api_key="k", http_client=transport, max_retries=0) as client:
            raw = client.chat.completions.with_raw_response.create(model="mock-small", messages=hi)
            assert raw.http_response.http_version == "HTTP/2"
            assert raw.parse().choices[0].message.content
            chunks = list(client.chat.completions.create(model="mock-small", messages=hi, stream=True))
            assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
            with pytest.raises(openai.NotFoundError):
                client.get("/nothing/here", cast_to=object)


def test_curl(server: GatewayThread, mock: Provider, session: str) -> None:
    url = f"{server.url}/s/{session}{CHAT}"
    command = ["curl", "-si", "-m", "20", "--http2-prior-knowledge", url, "-d", chat(stream=True).decode()]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith("HTTP/2 200")
    assert "x-session-usage-final: true" in said.partition("data: [DONE]")[2]


def test_large_bodies_go_both_ways(server: GatewayThread, mock: Provider) -> None:
    with httpx.Client(http1=False, http2=True, timeout=LIMIT_S) as client:
        large = [{"role": "user", "content": "word " * 200_000}]
        answer = client.post(
            server.url + CHAT,
            json={"model": "mock-small", "messages": large},
            headers={"x-mock": "pad=3000000", "x-context-trim": "off"},
        )
    assert answer.status_code == 200
    assert len(answer.content) > 3_000_000


def test_many_streams_at_once_on_one_connection(talk: Talk) -> None:
    streams = [talk.chat(chat(stream=True), ("x-session-id", f"many-{number}")) for number in range(100)]
    answers = [talk.end(stream) for stream in streams]
    assert all(answer.ended and answer.trailers["x-session-cumulative-calls"] == "1" for answer in answers)


def test_a_refusal_is_in_the_callers_format_and_leaves_the_connection_open(talk: Talk) -> None:
    refused = talk.end(talk.ask("POST", "/v1/messages", ("anthropic-version", "2023-06-01"), body=b"{nonsense"))
    assert refused.statuses == [400]
    assert json.loads(refused.body)["type"] == "error"
    assert not {"connection", "transfer-encoding", "keep-alive"} & set(refused.headers)
    assert talk.end(talk.chat(chat())).statuses == [200]


@pytest.mark.parametrize("expected", ["100-continue", "100-Continue"])
def test_a_client_that_waits_is_told_to_send_its_body(talk: Talk, expected: str) -> None:
    stream = talk.ask("POST", CHAT, ("expect", expected), ends=False)
    while not talk.answers[stream].statuses:
        talk.read()
    talk.h2.send_data(stream, chat(), end_stream=True)
    talk.flush()
    assert talk.end(stream).statuses == [100, 200]


def test_an_answer_to_head_has_no_body(talk: Talk) -> None:
    answer = talk.end(talk.ask("HEAD", "/healthz"))
    assert (answer.statuses, answer.body, answer.ended) == ([200], b"", True)


# --- who leaves ------------------------------------------------------------------------------------------------


def call_of(gateway: GatewayThread, session: str) -> Any:
    def calls() -> Any:
        found = gateway.web.get(f"/api/sessions/{session}/calls")
        return found.status == 200 and found.json["calls"]

    [found] = until(calls, what="the call is settled")
    return found


def reset_in_the_middle(url: str, session: str) -> None:
    with Talk(url) as client:
        mock = ("x-mock", "chunks=30;interval=0.02;tokens=50/30")
        stream = client.chat(chat(stream=True, max_tokens=999), ("x-session-id", session), mock)
        while b"data: " not in client.answers[stream].body:
            client.read()
        client.reset(stream)
        # Only the stream was given up.
        assert client.end(client.chat(chat())).statuses == [200]


def test_who_resets_a_stream_has_left_and_its_answer_is_read_to_its_end(
    server: GatewayThread, mock: Provider, session: str
) -> None:
    reset_in_the_middle(server.url, session)
    found = call_of(server, session)
    assert (found["usage"]["output_tokens"], found["usage_source"]) == (30, "provider")


def test_or_is_stopped(mock_server: MockServer, mock: Provider, gateway_server: StartGateway, session: str) -> None:
    gateway = gateway_server(mock_server.url, **{"server.http2": True, "sessions.on_disconnect": "cancel"})
    reset_in_the_middle(gateway.url, session)
    assert call_of(gateway, session)["usage_source"] == "estimated"


# --- bounds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", [[("x-pad", "a" * 3_000)], [("a", "b")] * 300])
def test_a_head_over_the_limit_is_refused_alone(
    pad: list[tuple[str, str]], mock_server: MockServer, mock: Provider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"server.http2": True, "server.max_header_kb": 2})
    with Talk(gateway.url) as client:
        answer = client.end(client.ask("POST", CHAT, *pad, body=chat()))
        assert (answer.statuses, answer.headers["x-should-retry"]) == ([431], "false")
        assert json.loads(answer.body)["error"]["code"] == "headers_too_large"
        assert client.end(client.chat(chat())).statuses == [200]


def test_a_head_that_is_far_too_large_ends_the_connection(talk: Talk) -> None:
    talk.ask("POST", CHAT, *[(f"x-{number}", "a" * 4_000) for number in range(60)])
    talk.until_closed()
    assert talk.goaway == CALM


#: GET http://localhost/, as HPACK has it, and a header of 3,900 bytes that both sides keep under the number 62 then
HEAD = b"\x82\x86\x84\x41\x09localhost"
LONG = b"\x40\x01a\x7f\xbd\x1d" + b"b" * 3_900


def frame(kind: int, flags: int, stream: int, data: bytes) -> bytes:
    return len(data).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + data


@pytest.mark.parametrize(
    "sent",
    [
        frame(1, 1, 1, HEAD) + frame(9, 0, 1, b"") * 1_000,
        frame(1, 5, 1, HEAD + LONG) + frame(1, 5, 3, HEAD + b"\xbe" * 8_000),
    ],
    ids=["in a thousand frames", "of 8 KB that unpack to 31 MB"],
)
def test_neither_is_one_taken_that_costs_far_more_than_was_sent(sent: bytes, talk: Talk) -> None:
    talk.sock.sendall(sent)
    talk.until_closed()
    assert talk.goaway == CALM


@pytest.mark.parametrize(
    ("method", "path"), [("OPTIONS", "*"), ("GET", "v1/models"), ("GET", "http://localhost/v1/models"), ("GET", "/é")]
)
def test_what_is_no_path_is_refused(method: str, path: str, talk: Talk) -> None:
    answer = talk.end(talk.ask(method, path))
    assert (answer.statuses, json.loads(answer.body)["error"]["code"]) == ([400], "invalid_request")


def test_by_a_name_that_is_not_this_machines_nobody_reads(talk: Talk) -> None:
    stream = talk.h2.get_next_available_stream_id()
    talk.answers[stream] = Answer()
    head = [(":method", "GET"), (":scheme", "http"), (":authority", "pointed.example"), (":path", "/api/sessions")]
    talk.h2.send_headers(stream, head, end_stream=True)
    talk.flush()
    assert talk.end(stream).statuses == [401]
    assert talk.end(talk.ask("GET", "/api/sessions")).statuses == [200]


def test_a_web_socket_is_none_here(talk: Talk) -> None:
    stream = talk.h2.get_next_available_stream_id()
    talk.answers[stream] = Answer()
    path = (":path", "/v1/responses")
    head = [(":method", "CONNECT"), (":protocol", "websocket"), (":scheme", "http"), (":authority", "localhost"), path]
    talk.h2.send_headers(stream, head)
    talk.flush()
    assert talk.end(stream).statuses == [400]


def test_no_more_of_an_answer_is_taken_than_its_client_takes() -> None:
    taken = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [TEXT]})
        for _ in range(100):
            await send({"type": "http.response.body", "body": bytes(10_000), "more_body": True})
            taken.append(10_000)
        await send({"type": "http.response.body", "body": b""})

    with serving.ServerThread(options(app)) as server, Talk(server.url, window=25_000) as client:
        stream = client.ask("GET", "/")
        while len(client.answers[stream].body) < 25_000:
            client.read()
        client.h2.ping(b"12345678")
        client.flush()
        client.read()
        assert sum(taken) == 20_000
        client.h2.increment_flow_control_window(10_000, stream)
        client.flush()
        until(lambda: sum(taken) == 30_000)
        client.h2.increment_flow_control_window(10**6, stream)
        client.h2.increment_flow_control_window(10**6)
        client.flush()
        assert len(client.end(stream).body) == 10**6


def test_who_takes_nothing_of_a_whole_answer_is_given_up() -> None:
    ended = threading.Event()

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [TEXT]})
        await send({"type": "http.response.body", "body": bytes(100_000)})
        assert (await receive())["type"] == "http.disconnect"
        ended.set()

    made = options(app)
    made.timeout_keep_alive = 1
    with serving.ServerThread(made) as server, Talk(server.url, window=1_000) as client:
        assert client.end(client.ask("GET", "/")).reset == CANCEL
        assert ended.wait(LIMIT_S)


def test_pings_do_not_keep_a_connection_open() -> None:
    made = options(says_ok)
    made.timeout_keep_alive = 1
    with serving.ServerThread(made) as server, Talk(server.url) as client:
        assert client.end(client.ask("GET", "/")).body == b"ok"
        begun = time.monotonic()
        while not client.closed and time.monotonic() < begun + LIMIT_S:
            client.h2.ping(b"12345678")
            client.read()
            time.sleep(0.02)
        assert (client.closed, client.goaway) == (True, 0)


class Slow:
    """Answers "/slow" once it is let go on, and all else at once."""

    def __init__(self) -> None:
        self.running = 0
        self.go_on = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            self.running += 1
            leaving = asyncio.ensure_future(self._left(receive))
            while not self.go_on.is_set() and not leaving.done():
                await asyncio.sleep(0.01)
            leaving.cancel()
            self.running -= 1
        await says_ok(scope, receive, send)

    @staticmethod
    async def _left(receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


def test_a_connection_ends_after_many_requests_once_nothing_is_under_way() -> None:
    app = Slow()
    with serving.ServerThread(options(app)) as server, Talk(server.url) as client:
        slow = client.ask("GET", "/slow")
        for _ in range(1_100):
            assert client.end(client.ask("GET", "/")).body == b"ok"
        assert client.goaway is None
        app.go_on.set()
        assert client.end(slow).body == b"ok"
        client.until_closed()
        assert client.goaway == 0


def test_where_something_always_is_it_takes_no_more_in_the_end() -> None:
    app = Slow()
    with serving.ServerThread(options(app)) as server, Talk(server.url) as client:
        slow = client.ask("GET", "/slow")
        while client.goaway is None:
            client.reset(client.ask("GET", "/slow"))
            client.h2.ping(b"12345678")
            client.flush()
            client.read()
        assert client.goaway == 0
        assert client.end(client.ask("GET", "/")).reset == REFUSED
        app.go_on.set()
        assert client.end(slow).body == b"ok"
        client.until_closed()


def test_one_that_resets_stream_after_stream_ends() -> None:
    app = Slow()
    with serving.ServerThread(options(app)) as server, Talk(server.url) as client:
        for _ in range(64):
            client.reset(client.ask("GET", "/slow"))
        client.until_closed()
        assert client.goaway == 0
        until(lambda: app.running == 0)


def send_without_reading(client: Talk, data: bytes, times: int) -> bool:
    """Whether the server hung up."""
    client.sock.settimeout(1)
    try:
        for _ in range(times):
            client.sock.sendall(data)
    except TimeoutError:
        return False
    except OSError:
        return True
    return False


PING, SETTINGS = frame(6, 0, 0, b"12345678"), frame(4, 0, 0, b"")


@pytest.mark.parametrize("asks", [PING, SETTINGS], ids=["pings", "settings"])
def test_who_asks_without_reading_the_answers_is_hung_up_on(asks: bytes, server: GatewayThread) -> None:
    with Talk(server.url) as client:
        assert send_without_reading(client, asks * 10_000, 200)
    assert server.web.get("/healthz").status == 200


def test_thousands_of_frames_at_once_are_all_read(talk: Talk) -> None:
    sender = threading.Thread(target=talk.sock.sendall, args=(PING * 50_000,))
    sender.start()
    while talk.pongs < 50_000:
        talk.read()
    sender.join()
    assert talk.end(talk.chat(chat())).statuses == [200]


def test_a_stream_that_its_client_takes_nothing_of_is_given_up(
    mock_server: MockServer, mock: Provider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"server.http2": True, "server.write_timeout_s": 0.5})
    with Talk(gateway.url, window=100) as client:
        mock_says = ("x-mock", "chunks=50")
        answer = client.end(client.chat(chat(stream=True), ("x-session-id", "s"), mock_says))
        assert (len(answer.body), answer.ended, answer.reset is None) == (100, False, False)
        assert call_of(gateway, "s")["outcome"] == "client_stalled"


def test_a_preface_may_come_in_parts_but_not_for_ever(mock_server: MockServer, gateway_server: StartGateway) -> None:
    gateway = gateway_server(mock_server.url, **{"server.http2": True, "server.header_timeout_s": 0.5})
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"
    with connect(gateway.url) as sock:
        for byte in preface:
            sock.sendall(bytes([byte]))
        assert sock.recv(9)[3] == 4  # its settings
    with connect(gateway.url) as sock:
        sock.sendall(preface[:10])
        assert parse(read_all(sock)).error["code"] == "header_timeout"


def test_rubbish_ends_the_connection_and_no_other(talk: Talk, server: GatewayThread) -> None:
    talk.sock.sendall(b"\0\0\x04\x08\0\0\0\0\0\0\0\0\0")
    talk.until_closed()
    assert talk.goaway
    with Talk(server.url) as other:
        assert other.end(other.ask("GET", "/healthz")).statuses == [200]


# --- stopping --------------------------------------------------------------------------------------------------


def test_a_server_that_stops_ends_its_streams_and_takes_no_more() -> None:
    begun, go_on = threading.Event(), threading.Event()

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [TEXT]})
        begun.set()
        while not go_on.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b"ok"})

    made = options(app)
    made.timeout_graceful_shutdown = 30
    server = serving.ServerThread(made)
    server.__enter__()
    with Talk(server.url) as client:
        stream = client.ask("GET", "/")
        assert begun.wait(LIMIT_S)
        stopping = threading.Thread(target=server.__exit__)
        stopping.start()
        while client.goaway is None:
            client.read()
        # It may have been on its way.
        assert client.end(client.ask("GET", "/")).reset == REFUSED
        go_on.set()
        assert client.end(stream).body == b"ok"
        client.until_closed()
        stopping.join(LIMIT_S)
        assert not stopping.is_alive()


# --- off -------------------------------------------------------------------------------------------------------


def test_where_it_is_off_nothing_of_it_is_loaded_or_spoken(gateway: GatewayThread) -> None:
    with connect(gateway.url) as sock:
        sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert parse(read_all(sock)).status == 400
    code = (
        "import sys; from gateway.server import serving; "
        "serving.make_config(None, max_head_bytes=1, max_body=1, head_timeout_s=1, grace_s=1); "
        "assert not {'zttp', 'gateway.server.http2'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
