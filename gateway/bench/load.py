"""Make the calls of `gateway bench`: request bodies, clients, and a check of each response.

The built-in provider sends the same response to the same request. So every response through the gateway is compared
with the direct response to the same request: its text, the events of a stream, its end, its usage.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, Self
from urllib.parse import urlsplit

MODEL: Final = "gpt-4o-mini"
_PATH: Final = "/v1/chat/completions"
_ANSWER_WITHIN_S: Final = 60.0
_SYSTEM: Final = "You are an assistant that answers briefly and says where it is not sure."
_WORDS: Final = (
    *("token", "session", "budget", "window", "answer", "tool", "result", "of", "the", "and", "is", "in", "reads"),
    *("file", "order", "customer", "open", "paid", "error", "line", "value", "number", "why", "where", "next"),
)
#: words of a message, about 900 characters
_MESSAGE_WORDS: Final = 150


@dataclass(frozen=True, slots=True)
class Workload:
    """`clients` concurrent sessions, each of which makes `calls` calls one after the other.

    Attributes:
        name: as shown.
        warm_up: calls of each client that are made first, and are checked but not measured.
        chunks: chunks of each streamed response; 0: no streaming.
        interval_s: seconds between two chunks.
        history: messages, an even number, in a session before its first call; 0: each call is a single question.
        headers: additional request headers for the gateway.
        is_trimmed: the gateway trims the requests.
    """

    name: str
    clients: int
    calls: int
    warm_up: int = 3
    chunks: int = 0
    interval_s: float = 0.0
    history: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    is_trimmed: bool = False

    def body(self, client: int, call: int) -> bytes:
        """Return the request body of one call."""
        last = self.history + 2 * call
        history = [_message(client, number) for number in range(last if self.history else 0)]
        messages = [{"role": "system", "content": _SYSTEM}, *history, _message(client, last)]
        more: dict[str, Any] = {}
        if self.chunks:
            more = {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps({"model": MODEL, "messages": messages, **more}).encode()


@lru_cache(1_000)
def _message(client: int, number: int) -> dict[str, str]:
    """Return a message of a conversation: always the same one for the same arguments, and no two are equal."""
    words = random.Random(f"{client} {number}").choices(_WORDS, k=_MESSAGE_WORDS)  # noqa: S311  # no secret
    return {"role": "assistant" if number % 2 else "user", "content": f"{client}-{number}: {' '.join(words)}"}


@dataclass(frozen=True, slots=True)
class BenchResponse:
    """The content of a response. `usage` is from the provider, `reported` from the gateway: (input, output) tokens."""

    text: str
    events: int
    is_ended: bool
    usage: tuple[int, int] | None
    reported: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class TimedResponse:
    """A response as it arrived, with its duration."""

    status: int
    head: Mapping[str, str]
    content: bytes
    seconds: float

    def read(self) -> BenchResponse:
        """Parse the response.

        Raises:
            ValueError: it is not a chat response.
        """
        if self.status != http.HTTPStatus.OK:
            raise ValueError(f"status {self.status}: {self.content[:200].decode(errors='replace')}")
        is_stream = self.head.get("content-type", "").startswith("text/event-stream")
        try:
            return _streamed(self.content) if is_stream else _whole(self.content, self.head)
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"not a chat response: {self.content[:200].decode(errors='replace')}") from error


def _whole(content: bytes, head: Mapping[str, str]) -> BenchResponse:
    body = json.loads(content)
    [choice] = body["choices"]
    reported = head.get("x-token-usage")
    is_ended = choice["finish_reason"] is not None
    return BenchResponse(
        choice["message"]["content"], 1, is_ended, _usage(body["usage"]), _reported(reported) if reported else None
    )


def _streamed(content: bytes) -> BenchResponse:
    text, events, usage, reported, last = "", 0, None, None, ""
    for line in content.decode().splitlines():
        if line.startswith(": x-token-usage: "):
            reported = _reported(line.removeprefix(": x-token-usage: "))
        if not line.startswith("data: "):
            continue
        events, last = events + 1, line.removeprefix("data: ")
        if last == "[DONE]":
            continue
        event = json.loads(last)
        text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        usage = _usage(event["usage"]) if event.get("usage") else usage
    return BenchResponse(text, events, last == "[DONE]", usage, reported)


def _usage(value: Mapping[str, int]) -> tuple[int, int]:
    return value["prompt_tokens"], value["completion_tokens"]


def _reported(text: str) -> tuple[int, int]:
    value = json.loads(text)
    return value["promptTokens"], value["completionTokens"]


def problem(seen: TimedResponse, direct: TimedResponse, *, is_trimmed: bool) -> str | None:
    """Return what is wrong with a response through the gateway, or None. `direct`: the response without it."""
    try:
        response, expected = seen.read(), direct.read()
    except ValueError as error:
        return str(error)
    if not response.is_ended or response.usage is None or expected.usage is None:
        return "its end or its usage is missing"
    if response.reported != response.usage:
        return f"the gateway reported the usage {response.reported}, the provider {response.usage}"
    if not is_trimmed:
        usage = expected.usage
    elif response.usage[0] < expected.usage[0]:
        usage = (response.usage[0], expected.usage[1])
    else:
        return "the request was not trimmed"
    return None if response == replace(expected, usage=usage, reported=usage) else f"{response} instead of {expected}"


class LoadClient:
    """One connection that makes the calls of one session, one after the other."""

    def __init__(self, url: str, session: str, workload: Workload, number: int, stop: threading.Event) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_ANSWER_WITHIN_S)
        paced = f";interval={workload.interval_s}" if workload.interval_s else ""
        self._head = {
            "content-type": "application/json",
            "x-session-id": session,
            **({"x-mock": f"chunks={workload.chunks}{paced}"} if workload.chunks else {}),
            **workload.headers,
        }
        self._bodies = iter([workload.body(number, call) for call in range(workload.warm_up + workload.calls)])
        self._stop = stop

    def make(self, calls: int) -> Sequence[TimedResponse]:
        """Make the next calls; fewer if the load is stopped or the connection breaks."""
        responses = []
        for _ in range(calls):
            if self._stop.is_set():
                break
            seen = self._call(next(self._bodies))
            responses.append(seen)
            if not seen.status:
                break
        return responses

    def _call(self, body: bytes) -> TimedResponse:
        started = time.perf_counter()
        try:
            self._connection.request("POST", _PATH, body, self._head)
            response = self._connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            return TimedResponse(0, {}, f"no response: {error!r}".encode(), time.perf_counter() - started)
        seconds = time.perf_counter() - started
        return TimedResponse(
            response.status, {name.lower(): value for name, value in response.getheaders()}, content, seconds
        )

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class Load:
    """All clients of a workload at one URL. `name`: the prefix of its sessions."""

    def __init__(self, url: str, name: str, workload: Workload) -> None:
        self._workload = workload
        self._stop = threading.Event()
        self.sessions = [f"{name}-{number}" for number in range(workload.clients)]
        self._clients = [
            LoadClient(url, session, workload, number, self._stop) for number, session in enumerate(self.sessions)
        ]
        self._pool = ThreadPoolExecutor(workload.clients)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        for client in self._clients:
            client.close()

    def warm_up(self) -> Sequence[Sequence[TimedResponse]]:
        """Make the calls that are not measured, and return the responses of each client."""
        return self._make(self._workload.warm_up)

    def run(self) -> Sequence[Sequence[TimedResponse]]:
        """Make the measured calls, and return the responses of each client."""
        return self._make(self._workload.calls)

    def _make(self, calls: int) -> Sequence[Sequence[TimedResponse]]:
        return list(self._pool.map(lambda client: client.make(calls), self._clients))
