"""An upstream that controls every byte: a small server whose script writes to the socket."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


@dataclass(frozen=True)
class Received:
    """A request as it arrived."""

    head: bytes
    body: bytes

    @property
    def path(self) -> str:
        return self.head.split(b" ")[1].decode()

    @property
    def headers(self) -> list[tuple[str, str]]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines if line)]

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Connection:
    """A connection that a script writes to."""

    sock: socket.socket
    request: Received
    stopping: threading.Event
    sent: int = 0

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)
        self.sent += len(data)

    def whole(self, body: bytes, *headers: bytes, status: bytes = b"200 OK") -> None:
        """Send a whole JSON response, or another content type if `headers` name one."""
        lines = [b"HTTP/1.1 " + status, b"content-length: %d" % len(body), b"connection: close", *headers]
        if not any(line.lower().startswith(b"content-type:") for line in headers):
            lines.append(b"content-type: application/json")
        self.send(b"\r\n".join(lines) + b"\r\n\r\n" + body)

    def reset(self) -> None:
        """Close with RST instead of FIN."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def wait_until_left(self, seconds: float = 60) -> bool:
        """Stay silent until the client closes the connection; return True if it did."""
        deadline = time.monotonic() + seconds
        self.sock.settimeout(0.05)
        while time.monotonic() < deadline and not self.stopping.is_set():
            try:
                if not self.sock.recv(65536):
                    return True
            except TimeoutError:
                continue
            except OSError:
                return True
        return False


Script = Callable[[Connection], None]


@dataclass
class ByteServer:
    """Read one request per connection, pass the socket to `script`, then close it. `script` can be replaced.

    `tls`: use TLS with this certificate.
    """

    script: Script
    tls: ssl.SSLContext | None = None
    requests: list[Received] = field(default_factory=list)
    connections: int = 0

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http{'s' if self.tls else ''}://127.0.0.1:{self._listener.getsockname()[1]}"
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._acceptor.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            sock.settimeout(30)
            with self.tls.wrap_socket(sock, server_side=True) if self.tls else contextlib.nullcontext(sock) as plain:
                request = _read(plain)
                if request is None:
                    return
                self.requests.append(request)
                self.script(Connection(plain, request, self._stopping))


def _read(sock: socket.socket) -> Received | None:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = sock.recv(65536)
        if not piece:
            return None
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    request = Received(head, b"")
    length = int(request.header("content-length") or 0)
    while len(body) < length:
        piece = sock.recv(65536)
        if not piece:
            return None
        body += piece
    return Received(head, body)


def completion(**changes: object) -> bytes:
    """Return a whole chat response that bills 10 + 5 tokens."""
    message = {"role": "assistant", "content": "hello"}
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "scripted",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
    }
    return json.dumps({**body, **changes}).encode()


def chunk(text: str | None = None, **changes: object) -> bytes:
    """Return one event of a chat stream."""
    delta = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    body = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "scripted"}
    return b"data: " + json.dumps({**body, "choices": [choice], **changes}).encode() + b"\n\n"


def usage_chunk(prompt: int = 10, output: int = 5) -> bytes:
    """Return the event that carries the usage."""
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return chunk(choices=[], usage=usage)


DONE = b"data: [DONE]\n\n"


class Held:
    """A script whose calls run until they are released. A stream sends its first chunk before."""

    def __init__(self) -> None:
        self._released = threading.Event()

    def release(self) -> None:
        self._released.set()

    def __call__(self, connection: Connection) -> None:
        is_stream = connection.request.json.get("stream", False)
        if is_stream:
            connection.send(SSE_HEAD + chunk("hello"))
        while not self._released.wait(0.05):
            if connection.stopping.is_set():
                return
        if is_stream:
            connection.send(usage_chunk() + DONE)
        else:
            connection.whole(completion())
