"""A client of HTTP/2 on one connection that does what no ordinary one would: keep silent, reset, send too much."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import h2.config
import h2.connection
import h2.events
import h2.settings

from tests.support.web import CHAT, connect

#: bytes of the head of a frame, of which the first three say how many follow
_HEAD = 9


@dataclass
class Answer:
    """What has come on one stream. `reset`: with this code."""

    statuses: list[int] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    trailers: dict[str, str] = field(default_factory=dict)
    ended: bool = False
    reset: int | None = None

    @property
    def is_over(self) -> bool:
        return self.ended or self.reset is not None


class Talk:
    """One connection, from its preface on. `window`: how much of an answer may come unasked."""

    def __init__(self, url: str, *, window: int = 65_535) -> None:
        self.sock = connect(url)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.answers: dict[int, Answer] = {}
        self.goaway: int | None = None
        self.closed = False
        self.pongs = 0
        self._unread = b""
        self._gives = window == 65_535
        self.h2.initiate_connection()
        self.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.sock.close()

    def flush(self) -> None:
        self.sock.sendall(self.h2.data_to_send())

    def ask(
        self, method: str, path: str, *headers: tuple[str, str], body: bytes | None = None, ends: bool = True
    ) -> int:
        """Send a request; its stream. A body has to fit the window."""
        stream = self.h2.get_next_available_stream_id()
        head = [(":method", method), (":scheme", "http"), (":authority", "localhost"), (":path", path), *headers]
        self.answers[stream] = Answer()
        self.h2.send_headers(stream, head, end_stream=ends and body is None)
        if body is not None:
            self.h2.send_data(stream, body, end_stream=ends)
        self.flush()
        return stream

    def chat(self, body: bytes, *headers: tuple[str, str]) -> int:
        return self.ask("POST", CHAT, ("content-type", "application/json"), *headers, body=body)

    def reset(self, stream: int) -> None:
        self.h2.reset_stream(stream, 8)
        self.flush()

    def read(self) -> None:
        """Take what comes next."""
        try:
            data = self.sock.recv(65_536)
        except ConnectionError:
            data = b""
        self.closed = not data
        self._unread += data
        # Frame by frame: h2 takes nothing behind a GOAWAY, though streams under way go on (RFC 9113, section 6.8).
        while len(self._unread) >= _HEAD and len(self._unread) >= (size := _HEAD + int.from_bytes(self._unread[:3])):
            for event in self.h2.receive_data(self._unread[:size]):
                self._note(event)
            self._unread = self._unread[size:]
        with contextlib.suppress(ConnectionError):
            self.flush()

    def _note(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.ConnectionTerminated):
            self.goaway = int(event.error_code or 0)
            self.h2.state_machine.state = h2.connection.ConnectionState.CLIENT_OPEN
        self.pongs += isinstance(event, h2.events.PingAckReceived)
        stream = getattr(event, "stream_id", None)
        answer = self.answers.get(stream or 0)
        if answer is None:
            return
        if isinstance(event, h2.events.InformationalResponseReceived | h2.events.ResponseReceived):
            answer.headers = dict(_texts(event.headers))
            answer.statuses.append(int(answer.headers.pop(":status")))
        elif isinstance(event, h2.events.DataReceived):
            answer.body += event.data or b""
            if self._gives:
                self.h2.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id or 0)
        elif isinstance(event, h2.events.TrailersReceived):
            answer.trailers = dict(_texts(event.headers))
        elif isinstance(event, h2.events.StreamEnded):
            answer.ended = True
        elif isinstance(event, h2.events.StreamReset):
            answer.reset = int(event.error_code or 0)

    def end(self, stream: int) -> Answer:
        """The answer once it is over, or the connection."""
        answer = self.answers[stream]
        while not answer.is_over and not self.closed:
            self.read()
        return answer

    def until_closed(self) -> None:
        while not self.closed:
            self.read()


def _texts(headers: object) -> list[tuple[str, str]]:
    return [(str(name), str(value)) for name, value in headers]  # type: ignore[attr-defined]
