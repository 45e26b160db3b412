"""Read the gateway's token counts in an agent, and pass them on to its tools.

This module only needs the standard library and no other module of this package, so it can be copied into an agent.
docs/guides/token-counts.md has examples.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from threading import Lock
from typing import Any, Final, Self
from urllib.error import HTTPError
from urllib.parse import unquote, urlencode

#: tokens of the overhead around a tool result in a request
_FRAME: Final = 16
#: The share of the remaining tokens that tools may fill at once. Counts are estimates, and later turns need room too.
_FILLED: Final = 0.75
#: a quarter of the remaining session budget is kept for the next response
_ANSWER_SHARE: Final = 4
#: parts of a text that are about one token each
_PIECES: Final = re.compile(r"[A-Za-z]{1,5}|\d{1,2}|[!-/:-@\[-`{-~]|\n")
#: bytes of non-ASCII letters: two or three bytes per letter, and usually more than one letter per token
_FOREIGN: Final = re.compile(rb"[\x80-\xff]+")
#: the end of a base URL as SDKs use it
_BASE: Final = re.compile(r"(?:/s/(?P<session>[^/]+))?(?:/v1)?/?$")


@dataclass(frozen=True, slots=True)
class Counts:
    """The token counts that the gateway reports for one call.

    Attributes:
        conversation_tokens: texts, tool calls and thinking in the sent request; no tool results or tool definitions.
        tool_tokens: tool results in the sent request, each counted once by its id and by its content.
        budget: the most input tokens of a call; None if nothing limits them.
        remaining: input tokens that the sent request leaves of the budget.
        room: tokens that tool results may add before the next call. It is three quarters of `remaining` minus the
            output, so that later turns have room too. It is less if the budget of the session is nearly spent. None if
            nothing limits it.
        session_tokens: tokens of all calls of the session; None if unknown.
        cut: the rules that left something out of the conversation; empty if it was sent whole.
        mode: how tool results were shown; `raw` if they were sent unchanged.
    """

    conversation_tokens: int
    tool_tokens: int
    budget: int | None
    remaining: int | None
    room: int | None
    session_tokens: int | None = None
    cut: str = ""
    mode: str = "raw"

    @classmethod
    def of(cls, headers: Mapping[str, str], answer_tokens: int | None = None) -> Self:
        """Read the counts from response headers, as in httpx, requests, LangChain or a plain dict.

        `answer_tokens`: the output tokens in the usage of a stream, whose headers arrive before its output.
        """
        lower = {name.lower(): value for name, value in headers.items()}
        remaining = _number(lower, "x-context-remaining-tokens")
        if answer_tokens is None:
            answer_tokens = json.loads(lower.get("x-token-usage", "{}")).get("completionTokens", 0)
        left = _number(lower, "x-session-budget-remaining-tokens")
        if left is not None:
            left -= left // _ANSWER_SHARE + (_number(lower, "x-context-tokens") or 0)
        limits = [limit for limit in (remaining, left) if limit is not None]
        rules = lower.get("x-context-trimmed", "none").split(",")
        return cls(
            conversation_tokens=_number(lower, "x-context-conversation-tokens") or 0,
            tool_tokens=_number(lower, "x-context-tool-tokens") or 0,
            budget=_number(lower, "x-context-budget-tokens"),
            remaining=remaining,
            room=_room(min(limits) - answer_tokens) if limits else None,
            session_tokens=_number(lower, "x-session-cumulative-total-tokens"),
            # Recalled lines change from turn to turn even if nothing more is left out.
            cut=",".join(rule for rule in rules if "=" in rule and not rule.startswith("recall=")),
            mode=lower.get("x-response-mode", "raw"),
        )

    @classmethod
    def from_json(cls, answer: Mapping[str, Any]) -> Self:
        """Read the counts from the response of `POST /api/context`."""
        remaining = answer["remaining"]
        tool_tokens = answer["accumulated_tool_tokens"]
        room = _room(remaining) if remaining is not None else None
        return cls(answer["conversation_tokens"], tool_tokens, answer["budget"], remaining, room)

    def share(self, calls: int) -> int | None:
        """Return the room for each tool if one response calls this many tools."""
        return None if self.room is None else max(0, self.room // max(1, calls) - _FRAME)


def fetch_counts(
    base_url: str,
    body: Mapping[str, Any],
    *,
    session: str | None = None,
    api_key: str | None = None,
    timeout: float = 10.0,
) -> Counts:
    """Ask `POST /api/context` for the token counts of a request before it is sent. `base_url`: as for an SDK.

    Raises:
        OSError: the gateway cannot be reached, or refuses the request (`urllib.error.HTTPError`).
    """
    base = _BASE.search(base_url)
    named = session or (unquote(base["session"]) if base and base["session"] else None)
    query = f"?{urlencode({'session': named})}" if named else ""
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {api_key}"} if api_key else {})}
    request = urllib.request.Request(  # noqa: S310 - the agent chooses the URL
        f"{_BASE.sub('', base_url, count=1)}/api/context{query}", json.dumps(body).encode(), headers
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310
            return Counts.from_json(json.load(answer))
    except HTTPError as refused:
        # urllib's error keeps the connection open until the caller closes it, which few callers do.
        with refused:
            body_read = io.BytesIO(refused.read())
        raise HTTPError(refused.url, refused.code, refused.reason, refused.headers, body_read) from None


async def afetch_counts(base_url: str, body: Mapping[str, Any], **options: Any) -> Counts:
    """Run `fetch_counts` in a thread."""
    return await asyncio.to_thread(fetch_counts, base_url, body, **options)


def estimate(text: str) -> int:
    """Estimate the tokens of a text without a tokenizer, usually too high: for documents without a token count."""
    foreign = sum(map(len, _FOREIGN.findall(text.encode("utf-8", "replace"))))
    return len(_PIECES.findall(text)) + ceil(foreign / 3)


class Handed:
    """The documents that the model of a conversation has received, by id.

    An agent keeps one for each conversation. It saves `state()` with its own state and restores it by
    `Handed(**state)`. Concurrent tools can share it.
    """

    def __init__(self, ids: Iterable[str] = (), cut: str = "") -> None:
        self._ids = set(ids)
        self._cut = cut
        self._lock = Lock()

    def turn(self, counts: Counts) -> Self:
        """Note a call. If more was trimmed from the conversation, all documents count as not received again."""
        with self._lock:
            if counts.cut != self._cut or counts.mode != "raw":
                self._ids.clear()
            self._cut = counts.cut
        return self

    def take(
        self,
        documents: Iterable[Mapping[str, Any]],
        tokens: int | None,
        count_tokens: Callable[[str], int] = estimate,
    ) -> list[dict[str, Any]]:
        """Return the documents that fit into `tokens` as JSON, in order, and note them as received.

        Documents that the model has received before are only named. A last item contains their ids and the number of
        documents that did not fit: `{"given_before": ["7"], "left_out": 3}`.
        """
        given: list[dict[str, Any]] = []
        rest: dict[str, Any] = {"given_before": [], "left_out": 0}
        with self._lock:
            left = None if tokens is None else tokens - _json_tokens(rest, count_tokens)
            for document in documents:
                is_known = str(document["id"]) in self._ids
                if left is not None:
                    needed = _json_tokens(document["id"] if is_known else document, count_tokens)
                    if needed > left:
                        rest["left_out"] += 1
                        continue
                    left -= needed
                if is_known:
                    rest["given_before"].append(document["id"])
                else:
                    self._ids.add(str(document["id"]))
                    given.append(dict(document))
        summary = {name: value for name, value in rest.items() if value}
        return [*given, summary] if summary else given

    def state(self) -> dict[str, Any]:
        """Return plain values to save."""
        with self._lock:
            return {"ids": sorted(self._ids), "cut": self._cut}


def configurable(counts: Counts, handed: Handed, calls: int = 1) -> dict[str, Any]:
    """Return the numbers for each of `calls` tools, to add to a LangGraph `config["configurable"]`."""
    return {
        "conversation_tokens": counts.conversation_tokens,
        "tool_tokens": counts.tool_tokens,
        "budget_tokens": counts.budget,
        "remaining_tokens": counts.share(calls),
        "handed": handed,
    }


def _room(left: int) -> int:
    return max(0, int(left * _FILLED))


def _number(headers: Mapping[str, str], name: str) -> int | None:
    return int(headers[name]) if name in headers else None


def _json_tokens(item: object, count_tokens: Callable[[str], int]) -> int:
    """Return the tokens of an item as JSON, with the comma after it."""
    return count_tokens(json.dumps(item, ensure_ascii=False)) + 1
