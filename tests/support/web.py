"""Plain HTTP clients: one on http.client for what SDKs hide, one on a bare socket for invalid requests."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

CHAT = "/v1/chat/completions"
#: seconds of silence after which a client gives up
CLIENT_TIMEOUT_S = 60.0
HI = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class Reply:
    """A response. `clean`: its body ended as HTTP requires; otherwise the connection broke."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    clean: bool = True

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def data_lines(self) -> list[str]:
        """Return the data of each event of a stream."""
        lines = self.body.decode(errors="replace").split("\n")
        return [line.removeprefix("data:").removeprefix(" ") for line in lines if line.startswith("data:")]

    @property
    def events(self) -> list[Any]:
        return [json.loads(line) for line in self.data_lines if line != "[DONE]"]

    @property
    def comments(self) -> dict[str, str]:
        """Return the totals in the last comment of a stream, by header name."""
        found = {}
        for line in self.body.decode(errors="replace").split("\n"):
            if line.startswith(": x-"):
                name, _, value = line[2:].partition(": ")
                found[name] = value
        return found

    @property
    def totals(self) -> tuple[int, int, int]:
        """Return input, output and total tokens of the session, from the comment of a stream or else the header."""
        return parse_usage(
            self.comments.get("x-session-cumulative-token-usage")
            or self.header("x-session-cumulative-token-usage")
            or ""
        )


def parse_usage(text: str) -> tuple[int, int, int]:
    value = json.loads(text)
    return value["promptTokens"], value["completionTokens"], value["totalTokens"]


@dataclass
class Web:
    """Send requests to one server, each on its own connection. `headers` are sent with every request."""

    url: str
    headers: dict[str, str] = field(default_factory=dict)
    timeout: float = CLIENT_TIMEOUT_S

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=self.timeout)

    @contextmanager
    def open(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Yield the response with its head read. Leaving closes the connection, even if the body is unread."""
        connection = self.connect()
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            all_headers = {"content-type": "application/json"} if data is not None else {}
            connection.request(method, path, data, {**all_headers, **self.headers, **(headers or {})})
            answer = connection.getresponse()
            try:
                yield answer
            finally:
                answer.close()
        finally:
            connection.close()

    def send(self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None) -> Reply:
        with self.open(method, path, body, headers) as answer:
            found = [(name.lower(), value) for name, value in answer.getheaders()]
            try:
                return Reply(answer.status, found, answer.read())
            except http.client.IncompleteRead as error:
                return Reply(answer.status, found, error.partial, clean=False)

    def get(self, path: str, headers: dict[str, str] | None = None) -> Reply:
        return self.send("GET", path, None, headers)

    def post(self, path: str, body: object = None, headers: dict[str, str] | None = None) -> Reply:
        return self.send("POST", path, body if body is not None else b"", headers)

    def chat(self, session: str | None = None, mock: str = "", **fields: object) -> Reply:
        """Send a chat call that says "hi", with an `x-mock` header for the built-in provider."""
        headers = {"x-mock": mock} if mock else {}
        if session is not None:
            headers["x-session-id"] = session
        return self.post(CHAT, {"model": "mock-small", "messages": HI, **fields}, headers)

    def process_pending_events(self) -> None:
        """Let the gateway process earlier events, such as requests and closed connections.

        Each of these responses takes some turns of the event loop, and the first turn handles all pending events.
        """
        for _ in range(3):
            assert self.get("/healthz").status == 200

    def stream(self, session: str | None = None, mock: str = "", **fields: object) -> Reply:
        return self.chat(session, mock, stream=True, **fields)


def connect(url: str, timeout: float = CLIENT_TIMEOUT_S) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=timeout)


def read_all(sock: socket.socket) -> bytes:
    """Read until the other side closes. Bytes before a reset are returned, too."""
    found = b""
    try:
        while piece := sock.recv(65536):
            found += piece
    except ConnectionError:
        pass
    return found


def read_until(sock: socket.socket, mark: bytes) -> bytes:
    """Read until `mark` has arrived."""
    found = b""
    while mark not in found:
        piece = sock.recv(65536)
        assert piece, f"it ended before {mark!r} came: {found!r}"
        found += piece
    return found


def talk(url: str, *parts: bytes, timeout: float = CLIENT_TIMEOUT_S) -> Reply:
    """Send bytes unchanged and read until the other side closes. A reset while sending ends the sending."""
    with connect(url, timeout) as sock:
        try:
            for part in parts:
                sock.sendall(part)
        except ConnectionError:
            pass
        return parse(read_all(sock))


def parse(data: bytes) -> Reply:
    """Return the first response in `data` after any 100 Continue; its status is 0 if there is none."""
    if data.startswith(b"HTTP/1.1 100"):
        data = data.partition(b"\r\n\r\n")[2]
    head, separator, body = data.partition(b"\r\n\r\n")
    if not separator:
        return Reply(0, [], data, clean=False)
    status_line, *lines = head.decode("latin-1").split("\r\n")
    headers = []
    for line in lines:
        name, _, value = line.partition(":")
        headers.append((name.lower(), value.strip()))
    status = int(status_line.split(" ")[1])
    fields = dict(headers)
    if "chunked" in fields.get("transfer-encoding", ""):
        body, clean = _dechunk(body)
    elif "content-length" in fields:
        length = int(fields["content-length"])
        body, clean = body[:length], len(body) >= length
    else:
        clean = True
    return Reply(status, headers, body, clean)


def _dechunk(data: bytes) -> tuple[bytes, bool]:
    found = b""
    while True:
        line, separator, rest = data.partition(b"\r\n")
        if not separator:
            return found, False
        size = int(line, 16)
        if size == 0:
            return found, True
        if len(rest) < size:
            return found + rest, False
        found, data = found + rest[:size], rest[size + 2 :]


def chat_bytes(body: bytes, *headers: bytes, path: bytes = b"/v1/chat/completions") -> bytes:
    """Return a whole chat request as bytes; it asks to close the connection."""
    lines = [
        b"POST " + path + b" HTTP/1.1",
        b"host: gateway",
        b"connection: close",
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        *headers,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body
