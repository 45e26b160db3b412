from __future__ import annotations

import gzip
import http.client
import json
from typing import TYPE_CHECKING

import pytest

from gateway.mock import Behaviour, MockServer, Turn
from gateway.mock.turns import BadBehaviourError, with_header
from tests.support.gateways import until
from tests.support.timing import in_time

if TYPE_CHECKING:
    from gateway.mock import MockProvider
    from tests.mock.conftest import Http

ASKED = {"stream_options": {"include_usage": True}}


def test_every_field_is_a_key_of_the_header() -> None:
    header = (
        "delay=0.5; interval=0.1, chunks=3; status=500; retry_after=7; usage=groq; tokens=3/4; window=5; die=2; pad=9; html=0;"
        "refuse_stream_options=1; refuse_allowed_tools=1; gzip=1; hang=1; no_done=1; malformed=1; cookie=1; echo_headers=1;"
    )
    assert with_header(Behaviour(html=True), header) == Behaviour(
        delay=0.5,
        interval=0.1,
        chunks=3,
        status=500,
        retry_after="7",
        usage="groq",
        tokens=(3, 4),
        window=5,
        refuse_stream_options=True,
        refuse_allowed_tools=True,
        gzip=True,
        die=2,
        hang=True,
        no_done=True,
        malformed=True,
        html=False,
        cookie=True,
        echo_headers=True,
        pad=9,
    )


@pytest.mark.parametrize("header", ["nonsense", "delay=x", "usage=maybe", "tokens=3", "gzip=yes", "unknown=1"])
def test_a_header_that_cannot_be_read(header: str, web: Http) -> None:
    with pytest.raises(BadBehaviourError):
        with_header(Behaviour(), header)
    answer = web.chat(header)
    assert (answer.status, answer.json["error"]["param"]) == (400, "x-mock")


def test_a_turn_and_the_provider_have_behaviours_too(web: Http, provider: MockProvider) -> None:
    provider.behaviour = Behaviour(tokens=(1, 1))
    provider.push(Turn(behaviour=Behaviour(status=503)), Turn(text="x"))
    assert web.chat().status == 503
    assert web.chat().json["usage"]["total_tokens"] == 2
    assert web.chat("tokens=2/3").json["usage"]["total_tokens"] == 5


def test_delay_and_interval(web: Http) -> None:
    # each timer may be up to a millisecond early
    with in_time(at_least=0.099):
        assert web.chat("delay=0.1").status == 200
    with in_time(at_least=0.147):
        web.stream("chunks=4;interval=0.05")


def test_chunks_and_pad(web: Http) -> None:
    def contents(mock: str) -> list[str]:
        deltas = [event["choices"][0]["delta"] for event in web.stream(mock).events[1:-1]]
        return [delta["content"] for delta in deltas]

    assert len(contents("chunks=100")) == 100
    assert len(contents("chunks=1")) == 1
    padded = contents("chunks=10;pad=100000")
    assert len(padded) == 10
    assert len("".join(padded)) >= 100_000
    assert "".join(contents("chunks=50")) == web.chat("chunks=50").json["choices"][0]["message"]["content"]
    plain, more = (web.chat(mock).json["choices"][0]["message"]["content"] for mock in ("", "pad=1000"))
    assert len(more) == len(plain) + 1000


def test_status_with_retry_after(web: Http, provider: MockProvider) -> None:
    answer = web.chat("status=429;retry_after=2")
    assert (answer.status, answer.headers["retry-after"]) == (429, "2")
    assert answer.json["error"]["type"] == "rate_limit_error"
    assert web.stream("status=500").json["error"]["type"] == "server_error"
    assert provider.billed().calls == 0


def test_usage_in_a_whole_answer(web: Http) -> None:
    none, groq, both = (web.chat(f"usage={placement}").json for placement in ("none", "groq", "groq_both"))
    assert "usage" not in none
    assert "usage" not in groq
    assert groq["x_groq"]["usage"] == both["x_groq"]["usage"] == both["usage"]


def test_usage_placements_of_a_stream(web: Http) -> None:
    total = web.chat().json["usage"]

    def usages(placement: str, **fields: object) -> list[object]:
        return [event.get("usage") for event in web.stream(f"usage={placement};chunks=4", **fields).events]

    plain = web.stream("usage=none;chunks=4", **ASKED).events
    assert not any("usage" in event for event in plain)
    assert usages("finish") == [None] * 5 + [total]
    assert usages("twice", **ASKED) == [None] * 5 + [total, total]
    running = [usage["completion_tokens"] for usage in usages("running", **ASKED)]  # type: ignore[index]
    assert running == [0, 1, 2, 3, 4, 4, 4]
    groq = web.stream("usage=groq").events
    assert groq[-1]["x_groq"]["usage"] == total
    assert not any("usage" in event for event in groq)
    both = web.stream("usage=groq_both").events[-1]
    assert both["usage"] == both["x_groq"]["usage"] == total


def test_forced_tokens(web: Http, provider: MockProvider) -> None:
    usage = web.stream("tokens=1000/50", **ASKED).events[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (1000, 50, 1050)
    assert provider.billed().total_tokens == 1050


def test_refuses_stream_options(web: Http) -> None:
    answer = web.stream("refuse_stream_options=1", **ASKED)
    assert answer.status == 400
    assert "stream_options" in answer.json["error"]["message"]
    assert web.stream("refuse_stream_options=1", stream_options=None).status == 400
    assert web.stream("refuse_stream_options=1").status == 200


def test_gzip(web: Http) -> None:
    whole = web.chat("gzip=1")
    assert whole.headers["content-encoding"] == "gzip"
    assert json.loads(gzip.decompress(whole.body))["object"] == "chat.completion"
    assert web.stream("gzip=1").data_lines[-1] == "[DONE]"


def test_dies_before_any_byte(web: Http, provider: MockProvider) -> None:
    for stream in (False, True):
        with pytest.raises(http.client.RemoteDisconnected):
            web.chat("die=0", stream=stream)
    assert [call.status for call in provider.calls] == [0, 0]
    assert provider.billed().calls == 0


def test_dies_in_the_middle(web: Http, provider: MockProvider) -> None:
    with pytest.raises(http.client.IncompleteRead) as whole:
        web.chat("die=1")
    assert whole.value.partial
    with pytest.raises(http.client.IncompleteRead) as stream:
        web.stream("die=3;chunks=10")
    assert stream.value.partial.count(b"data: ") == 1 + 3
    assert provider.billed().calls == 2


def test_hangs_until_the_client_leaves(web: Http, provider: MockProvider) -> None:
    connection = web.connect()
    connection.request("POST", "/v1/chat/completions", b'{"model":"m","messages":[]}', {"x-mock": "hang=1"})
    until(lambda: provider.calls)
    connection.sock.settimeout(0.2)
    with pytest.raises(TimeoutError):
        connection.getresponse()
    connection.close()
    assert web.chat().status == 200
    assert [call.status for call in provider.calls] == [0, 200]
    assert provider.billed().calls == 1


def test_stop_does_not_wait_for_a_hanging_response() -> None:
    with MockServer() as server:
        connections = []
        for mock in ("hang=1", "chunks=5;interval=60", "delay=60"):
            connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
            body = b'{"model":"m","messages":[],"stream":true}'
            connection.request("POST", "/v1/chat/completions", body, {"x-mock": mock})
            connections.append(connection)
        until(lambda: len(server.provider.calls) == 3)
        with in_time():
            server.stop()
    for connection in connections:
        connection.close()


def test_leaves_out_the_end(web: Http) -> None:
    assert "[DONE]" not in web.stream("no_done=1").data_lines


def test_a_broken_event_in_the_middle(web: Http) -> None:
    lines = web.stream("malformed=1;chunks=4").data_lines
    broken = [line for line in lines if line != "[DONE]" and not line.endswith("}")]
    assert len(broken) == 1
    assert 1 < lines.index(broken[0]) < len(lines) - 2
    with pytest.raises(json.JSONDecodeError):
        json.loads(broken[0])
    with pytest.raises(json.JSONDecodeError):
        json.loads(web.chat("malformed=1").body)


def test_html_cookie_and_echoed_headers(web: Http, provider: MockProvider) -> None:
    page = web.chat("html=1")
    assert page.status == 502
    assert page.headers["content-type"].startswith("text/html")
    assert page.body.startswith(b"<html>")
    assert web.chat("cookie=1").headers["set-cookie"].startswith("mock_session=")
    body = {"model": "m", "messages": []}
    echo = web.send("POST", "/v1/chat/completions", body, {"x-mock": "echo_headers=1", "X-Extra": "Some Value"})
    assert echo.json["received_headers"]["x-extra"] == "Some Value"
    assert provider.billed().calls == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": -1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": -1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 2**63}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 0}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": -1}),
        ("/v1/completions", {"prompt": "hi", "n": 2**31}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": -1}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": -1}),
        ("/v1/embeddings", {"input": "hi", "dimensions": 2**40}),
        ("/v1/embeddings", {"input": "hi", "dimensions": -1}),
        ("/v1/images/generations", {"prompt": "hi", "n": 2**31}),
    ],
)
def test_a_number_that_no_api_takes_is_refused(web: Http, path: str, body: dict[str, object]) -> None:
    """Without this check, the text would be truncated from its end, or the call would use up all memory."""
    answer = web.send("POST", path, {"model": "any-name", **body})
    assert answer.status == 400
    assert answer.json["error"]["type"] == "invalid_request_error"
