"""A stream cut at shutdown ends with an error event, even if its content type is wrong."""

from __future__ import annotations

import signal
import threading

import pytest

from tests.conftest import StartProcess, StartUpstream
from tests.support.gateways import until
from tests.support.scripted import Connection, chunk
from tests.support.timing import LIMIT_S
from tests.support.web import CHAT, HI, Reply


@pytest.mark.parametrize("content_type", [b"application/json", b"text/plain", b"application/octet-stream", None])
def test_a_stream_with_a_wrong_content_type_is_ended_with_an_error_at_shutdown(
    content_type: bytes | None, byte_server: StartUpstream, gateway_process: StartProcess
) -> None:
    def speak(connection: Connection) -> None:
        line = b"content-type: " + content_type + b"\r\n" if content_type is not None else b""
        connection.send(b"HTTP/1.1 200 OK\r\n" + line + b"connection: close\r\n\r\n" + chunk("one"))
        connection.wait_until_left()

    upstream = byte_server(speak)
    gateway = gateway_process(upstream.url, **{"server.shutdown_grace_s": 1})
    answers: list[Reply] = []
    body = {"model": "m", "messages": HI, "stream": True}
    running = threading.Thread(target=lambda: answers.append(gateway.web.post(CHAT, body)), daemon=True)
    running.start()
    until(lambda: upstream.requests)
    gateway.signal(signal.SIGTERM)
    running.join(LIMIT_S)
    gateway.wait()
    [answer] = answers
    assert answer.status == 200
    assert answer.events[-1]["error"]["code"] == "shutting_down"
    assert not answer.clean
