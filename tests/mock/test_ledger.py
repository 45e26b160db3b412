from __future__ import annotations

import hashlib
import json
import threading
from typing import TYPE_CHECKING

from gateway.mock import Billed, MockProvider
from tests.support.timing import in_time

if TYPE_CHECKING:
    from tests.mock.conftest import Http

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


def test_usage_is_billed_in_total_and_by_session(web: Http, provider: MockProvider) -> None:
    for session in ("a", "b", "a"):
        web.send("POST", CHAT, BODY, {"x-session-id": session})
    web.send("POST", CHAT, BODY)
    web.send("POST", CHAT, {**BODY, "model": "missing"}, {"x-session-id": "a"})
    assert provider.billed() == Billed(20, 16, 36, 4)
    assert provider.billed("a") == Billed(10, 8, 18, 2)
    assert provider.billed("none") == Billed()
    assert provider.billed_by_session() == {"a": Billed(10, 8, 18, 2), "b": Billed(5, 4, 9, 1)}


def test_unreported_usage_is_billed(web: Http, provider: MockProvider) -> None:
    web.stream("usage=none")
    assert provider.billed() == Billed(5, 4, 9, 1)


def test_full_usage_is_billed_when_the_client_disconnects_in_a_stream(web: Http, provider: MockProvider) -> None:
    connection = web.connect()
    body = json.dumps({**BODY, "stream": True})
    connection.request("POST", CHAT, body, {"x-mock": "chunks=1000;interval=0.01", "x-session-id": "s"})
    answer = connection.getresponse()
    assert answer.read(10)
    connection.close()
    answer.close()
    assert provider.billed("s").calls == 1
    assert provider.billed("s").output_tokens == 1000


def test_a_stream_ends_when_the_client_leaves(web: Http) -> None:
    connection = web.connect()
    connection.request("POST", CHAT, json.dumps({**BODY, "stream": True}), {"x-mock": "chunks=100;interval=30"})
    answer = connection.getresponse()
    connection.close()
    answer.close()
    with in_time():
        assert web.chat().status == 200


def test_records_what_was_received(web: Http, provider: MockProvider) -> None:
    web.send("POST", f"{CHAT}?beta=1", BODY, {"X-Trace": "T"})
    (call,) = provider.calls
    assert (call.method, call.path, call.query, call.model, call.status) == ("POST", CHAT, "beta=1", "m", 200)
    assert json.loads(call.body) == BODY
    assert call.header("x-trace") == "T"
    assert call.header("absent") is None
    assert call.billed == Billed(5, 4, 9, 1)


def test_control_endpoints(web: Http, provider: MockProvider) -> None:
    web.chat()
    web.send("POST", CHAT, BODY, {"x-session-id": "s"})
    once = {"input_tokens": 5, "output_tokens": 4, "total_tokens": 9, "calls": 1}
    billed = web.get("/__mock/billed").json
    assert billed["total"]["total_tokens"] == 18
    assert billed["sessions"] == {"s": once}
    calls = web.get("/__mock/calls?limit=1").json["calls"]
    assert len(calls) == 1
    assert calls[0]["billed"] == once
    assert calls[0]["body_sha256"] == hashlib.sha256(json.dumps(BODY).encode()).hexdigest()
    assert calls[0]["body_bytes"] == len(json.dumps(BODY))
    assert ["x-session-id", "s"] in calls[0]["headers"]
    assert "body" not in calls[0]
    assert len(web.get("/__mock/calls").json["calls"]) == 2
    assert web.get("/__mock/calls?limit=0").json["calls"] == []
    assert web.get("/__mock/calls?limit=x").status == 400
    assert web.get("/__mock/other").status == 404
    assert web.send("POST", "/__mock/reset").json == {"reset": True}
    assert web.get("/__mock/billed").json == {"total": dict.fromkeys(once, 0), "sessions": {}}
    assert provider.calls == []


def test_nothing_is_lost_between_connections(web: Http, provider: MockProvider) -> None:
    def work() -> None:
        for _ in range(20):
            web.chat()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert provider.billed() == Billed(5 * 80, 4 * 80, 9 * 80, 80)
