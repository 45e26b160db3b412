"""No suffix and no other spelling of a model's path bypasses a budget, even if the provider accepts it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import Scripted, StartGateway, StartUpstream
from tests.support.scripted import Connection
from tests.support.web import Web, connect, parse, read_all

BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "completions": {"model": "m", "prompt": "hi"},
    "responses": {"model": "m", "input": "hi"},
    "messages": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10},
    "embeddings": {"model": "m", "input": "hi"},
}
#: spellings of a path that a lenient provider treats as the model's own path
SPELLINGS = (
    *("/v1/{}/", "/v1/{}//", "/v1//{}", "//v1/{}", "/v1/v1/{}", "/{}/", "/{}/x"),
    *("/v1/{}/x", "/v1/{}/x/", "/v1/{}/x/y", "/v1/{}/cancel", "/v1/{}/count_tokens/x", "/v1/{}/x/count_tokens"),
    *("/v1/{}/input_tokens/", "/v1/{}%2f", "/v1/{}%2Fx", "/v1/{}%252f", "/v1/{}%3Fx", "/v1/{}%23x", "/v1/{};x"),
    *("/v1/{}%20", "/v1/{}?x=1", "/v1/{}/x?y=1", "/v1/./{}", "/v1/{}/.", "/v1/{}/../{}", "/v1/x/../{}"),
)
#: a path of another API, whose responses bill nothing
COUNTING = {"responses": "/v1/{}/input_tokens/"}


def lenient(connection: Connection) -> None:
    """Respond to any request with usage."""
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "input_tokens": 10, "output_tokens": 5, "total_tokens": 15}
    connection.whole(json.dumps({"id": "1", "usage": usage}).encode())


def written(path: str) -> list[str]:
    letter = path[0]
    encoded = [path.replace(letter, f"%{ord(letter):02x}", 1), path.replace(letter, f"%{ord(letter):02X}")]
    found = [spelling.format(*[path] * spelling.count("{}")) for spelling in SPELLINGS]
    return [*found, *(f"/v1/{one}" for one in (*encoded, path.upper(), path.title()))]


def sent(web: Web, method: str, path: str, body: bytes, session: str) -> Any:
    """Send a path unchanged; client libraries would normalize it."""
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    head += f"x-session-id: {session}\r\ncontent-length: {len(body)}\r\n\r\n"
    with connect(web.url) as sock:
        sock.sendall(head.encode() + body)
        return parse(read_all(sock))


@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize("path", BODIES)
def test_each_spelling_is_metered_or_refused(path: str, method: str, scripted: Scripted, session: str) -> None:
    web, body = scripted.play(lenient), json.dumps(BODIES[path]).encode()
    for number, spelling in enumerate(written(path)):
        name, before = f"{session}-{number}", len(scripted.upstream.requests)
        answer = sent(web, method, spelling, body, name)
        if len(scripted.upstream.requests) == before:
            assert answer.status in (400, 404), spelling
        elif spelling != COUNTING.get(path, "").format(path):
            assert answer.status == 200, spelling
            assert answer.totals == (10, 5, 15), spelling


@pytest.mark.parametrize("path", BODIES)
def test_get_and_delete_with_a_body_on_a_model_path_are_refused(path: str, scripted: Scripted, session: str) -> None:
    web, body = scripted.play(lenient), json.dumps(BODIES[path]).encode()
    for method in ("GET", "DELETE"):
        for suffix in ("", "/", "/x"):
            assert sent(web, method, f"/v1/{path}{suffix}", body, session).status == 400
    assert scripted.upstream.requests == []


def test_a_budget_applies_to_paths_below_a_model_path(byte_server: StartUpstream, gateway_server: StartGateway) -> None:
    upstream = byte_server(lenient)
    web = gateway_server(upstream.url, **{"budget.calls": 2}).web
    answers = [web.post("/v1/chat/completions/x", BODIES["chat/completions"], {"x-session-id": "s"}) for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 400]
    assert answers[2].error["code"] == "budget_exhausted"
    assert len(upstream.requests) == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [("chat/completions/chatcmpl-1", b'{"metadata":{"a":"b"}}'), ("responses/resp_1/cancel", b""),
     ("responses/resp_1/cancel", b"{}")],
)  # fmt: skip
def test_requests_about_an_earlier_response_are_not_charged_again(
    path: str, body: bytes, scripted: Scripted, session: str
) -> None:
    web = scripted.play(lenient)
    assert sent(web, "POST", f"/v1/{path}", body, session).status == 200
    assert web.get(f"/api/sessions/{session}").status == 404
