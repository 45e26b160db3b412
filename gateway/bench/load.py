"""Make the calls of `gateway bench`: request bodies, clients, and a check of each response.

The built-in provider answers a request in the same way each time. So every answer through the gateway is held against
the one that the same request got without it: its text, the events of a stream, its end, its usage.
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
#: words of a message, which make about 900 characters
_MESSAGE_WORDS: Final = 150


@dataclass(frozen=True, slots=True)
class Workload:
    """`clients` sessions side by side, in each of which `calls` calls are made one after the other.

    Attributes:
        name: as it is shown.
        warm_up: calls of each client that are made before, and checked but not measured.
        chunks: of each answer, which is streamed; 0: it is not.
        interval_s: between two chunks.
        history: messages, an even number, that a session holds before its first call; 0: each call is a question alone.
        headers: what the gateway is asked for beside.
        is_cut: the gateway sends less than what came.
    """

    name: str
    clients: int
    calls: int
    warm_up: int = 3
    chunks: int = 0
    interval_s: float = 0.0
    history: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    is_cut: bool = False

    def body(self, client: int, call: int) -> bytes:
        """The request of one call."""
        last = self.history + 2 * call
        said = [_message(client, number) for number in range(last if self.history else 0)]
        messages = [{"role": "system", "content": _SYSTEM}, *said, _message(client, last)]
        more: dict[str, Any] = {}
        if self.chunks:
            more = {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps({"model": MODEL, "messages": messages, **more}).encode()


@lru_cache(1_000)
def _message(client: int, number: int) -> dict[str, str]:
    """A message of the conversation of a client: the same one each time, and no two alike."""
    words = random.Random(f"{client} {number}").choices(_WORDS, k=_MESSAGE_WORDS)  # noqa: S311  # no secret
    return {"role": "assistant" if number % 2 else "user", "content": f"{client}-{number}: {' '.join(words)}"}


@dataclass(frozen=True, slots=True)
class BenchResponse:
    """What an answer says. `told`: the usage that the gateway says it is, (input, output)."""

    text: str
    events: int
    is_ended: bool
    usage: tuple[int, int] | None
    told: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class TimedResponse:
    """One answer as it arrived."""

    status: int
    head: Mapping[str, str]
    content: bytes
    seconds: float

    def read(self) -> BenchResponse:
        """What it says.

        Raises:
            ValueError: it is no answer.
        """
        if self.status != http.HTTPStatus.OK:
            raise ValueError(f"status {self.status}: {self.content[:200].decode(errors='replace')}")
        is_stream = self.head.get("content-type", "").startswith("text/event-stream")
        try:
            return _streamed(self.content) if is_stream else _whole(self.content, self.head)
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"no chat answer: {self.content[:200].decode(errors='replace')}") from error


def _whole(content: bytes, head: Mapping[str, str]) -> BenchResponse:
    body = json.loads(content)
    [choice] = body["choices"]
    told = head.get("x-token-usage")
    is_ended = choice["finish_reason"] is not None
    return BenchResponse(
        choice["message"]["content"], 1, is_ended, _usage(body["usage"]), _told(told) if told else None
    )


def _streamed(content: bytes) -> BenchResponse:
    text, events, usage, told, last = "", 0, None, None, ""
    for line in content.decode().splitlines():
        if line.startswith(": x-token-usage: "):
            told = _told(line.removeprefix(": x-token-usage: "))
        if not line.startswith("data: "):
            continue
        events, last = events + 1, line.removeprefix("data: ")
        if last == "[DONE]":
            continue
        event = json.loads(last)
        text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        usage = _usage(event["usage"]) if event.get("usage") else usage
    return BenchResponse(text, events, last == "[DONE]", usage, told)


def _usage(value: Mapping[str, int]) -> tuple[int, int]:
    return value["prompt_tokens"], value["completion_tokens"]


def _told(text: str) -> tuple[int, int]:
    value = json.loads(text)
    return value["promptTokens"], value["completionTokens"]


def problem(seen: TimedResponse, direct: TimedResponse, *, is_cut: bool) -> str | None:
    """What is wrong with an answer through the gateway; `direct`: the one that the provider gave without it."""
    try:
        answer, wanted = seen.read(), direct.read()
    except ValueError as error:
        return str(error)
    if not answer.is_ended or answer.usage is None or wanted.usage is None:
        return "its end or its usage is missing"
    if answer.told != answer.usage:
        return f"the gateway says its usage is {answer.told}, the provider said {answer.usage}"
    if not is_cut:
        usage = wanted.usage
    elif answer.usage[0] < wanted.usage[0]:
        usage = (answer.usage[0], wanted.usage[1])
    else:
        return "it was to be cut, and was not"
    return None if answer == replace(wanted, usage=usage, told=usage) else f"{answer} instead of {wanted}"


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
        """The next calls; fewer where all is to end, or the connection broke."""
        found = []
        for _ in range(calls):
            if self._stop.is_set():
                break
            seen = self._call(next(self._bodies))
            found.append(seen)
            if not seen.status:
                break
        return found

    def _call(self, body: bytes) -> TimedResponse:
        started = time.perf_counter()
        try:
            self._connection.request("POST", _PATH, body, self._head)
            response = self._connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            return TimedResponse(0, {}, f"no answer: {error!r}".encode(), time.perf_counter() - started)
        seconds = time.perf_counter() - started
        return TimedResponse(
            response.status, {name.lower(): value for name, value in response.getheaders()}, content, seconds
        )

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class Load:
    """All clients of a workload at one place. `name`: which its sessions begin with."""

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
        """The calls that are made before; the answers of each client."""
        return self._make(self._workload.warm_up)

    def run(self) -> Sequence[Sequence[TimedResponse]]:
        """The calls that are measured; the answers of each client."""
        return self._make(self._workload.calls)

    def _make(self, calls: int) -> Sequence[Sequence[TimedResponse]]:
        return list(self._pool.map(lambda client: client.make(calls), self._clients))
