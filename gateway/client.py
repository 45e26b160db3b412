"""Read the gateway's token counts in an agent, and pass them on to its tools.

Needs the standard library only and imports nothing else of this package: the file may be copied beside an agent.
docs/guides/token-counts.md shows it at work.
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

#: what stands around a tool's result in a request, in tokens
_FRAME: Final = 16
#: the part of what is left that tools may fill at once: weights are estimates, and there are turns to come
_FILLED: Final = 0.75
#: one part in so many of what is left of a session's budget is kept for the next answer
_ANSWER_SHARE: Final = 4
#: pieces of a text that are about a token each
_PIECES: Final = re.compile(r"[A-Za-z]{1,5}|\d{1,2}|[!-/:-@\[-`{-~]|\n")
#: bytes of letters beyond ASCII: two or three make a letter, and a token is mostly more than one
_FOREIGN: Final = re.compile(rb"[\x80-\xff]+")
#: the end of a base URL, as SDKs are given it
_BASE: Final = re.compile(r"(?:/s/(?P<session>[^/]+))?(?:/v1)?/?$")


@dataclass(frozen=True, slots=True)
class Counts:
    """What the gateway says of one call.

    Attributes:
        conversation_tokens: of what was sent, texts, calls and thinking; no tool results or definitions of tools.
        tool_tokens: the tool results in it, each counted once by its id and by its content.
        budget: input tokens that a call may take; None where nothing limits it.
        remaining: what is left of that beside what was sent.
        room: what tool results may add before the next call: three quarters of `remaining` less the answer, so that
            later turns have some too, or less where the session's own budget is nearly spent; None where nothing limits
            it.
        session_tokens: of all calls of the session; None where they are not known.
        cut: what had been left out of the conversation; empty where it was sent whole.
        mode: how tool results were shown, `raw` where they were sent as they are.
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
        """From the headers of an answer; httpx, requests, LangChain and plain dicts have them.

        `answer_tokens`: of an answer whose headers came before it (a stream): output tokens of its usage.
        """
        found = {name.lower(): value for name, value in headers.items()}
        remaining = _number(found, "x-context-remaining-tokens")
        if answer_tokens is None:
            answer_tokens = json.loads(found.get("x-token-usage", "{}")).get("completionTokens", 0)
        left = _number(found, "x-session-budget-remaining-tokens")
        if left is not None:
            left -= left // _ANSWER_SHARE + (_number(found, "x-context-tokens") or 0)
        limits = [limit for limit in (remaining, left) if limit is not None]
        rules = found.get("x-context-trimmed", "none").split(",")
        return cls(
            conversation_tokens=_number(found, "x-context-conversation-tokens") or 0,
            tool_tokens=_number(found, "x-context-tool-tokens") or 0,
            budget=_number(found, "x-context-budget-tokens"),
            remaining=remaining,
            room=_room(min(limits) - answer_tokens) if limits else None,
            session_tokens=_number(found, "x-session-cumulative-total-tokens"),
            # What is recalled changes from turn to turn while nothing more is left out.
            cut=",".join(rule for rule in rules if "=" in rule and not rule.startswith("recall=")),
            mode=found.get("x-response-mode", "raw"),
        )

    @classmethod
    def from_json(cls, answer: Mapping[str, Any]) -> Self:
        """From the answer of `POST /api/context`."""
        remaining = answer["remaining"]
        tool_tokens = answer["accumulated_tool_tokens"]
        room = _room(remaining) if remaining is not None else None
        return cls(answer["conversation_tokens"], tool_tokens, answer["budget"], remaining, room)

    def share(self, calls: int) -> int | None:
        """The room of each of so many tools that one answer calls."""
        return None if self.room is None else max(0, self.room // max(1, calls) - _FRAME)


def fetch_counts(
    base_url: str,
    body: Mapping[str, Any],
    *,
    session: str | None = None,
    api_key: str | None = None,
    timeout: float = 10.0,
) -> Counts:
    """Ask `POST /api/context` what a request weighs before it is sent. `base_url`: as an SDK is given it.

    Raises:
        OSError: the gateway cannot be reached, or refuses (`urllib.error.HTTPError`).
    """
    base = _BASE.search(base_url)
    named = session or (unquote(base["session"]) if base and base["session"] else None)
    query = f"?{urlencode({'session': named})}" if named else ""
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {api_key}"} if api_key else {})}
    request = urllib.request.Request(  # noqa: S310 - the address is the agent's own
        f"{_BASE.sub('', base_url, count=1)}/api/context{query}", json.dumps(body).encode(), headers
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310
            return Counts.from_json(json.load(answer))
    except HTTPError as refused:
        # As it is raised it holds the connection open until somebody closes it, which hardly anybody does.
        with refused:
            said = io.BytesIO(refused.read())
        raise HTTPError(refused.url, refused.code, refused.reason, refused.headers, said) from None


async def afetch_counts(base_url: str, body: Mapping[str, Any], **options: Any) -> Counts:
    """`fetch_counts` beside the event loop."""
    return await asyncio.to_thread(fetch_counts, base_url, body, **options)


def estimate(text: str) -> int:
    """Tokens of a text without a tokenizer, mostly more than there are: for documents that are not counted yet."""
    foreign = sum(map(len, _FOREIGN.findall(text.encode("utf-8", "replace"))))
    return len(_PIECES.findall(text)) + ceil(foreign / 3)


class Handed:
    """The documents that a conversation's model was handed, by their ids.

    One for each conversation, kept by its agent; `state()` goes where the agent keeps its own, and comes back as
    `Handed(**state)`. Tools that run side by side may share it.
    """

    def __init__(self, ids: Iterable[str] = (), cut: str = "") -> None:
        self._ids = set(ids)
        self._cut = cut
        self._lock = Lock()

    def turn(self, counts: Counts) -> Self:
        """Take note of a call: what was cut of the conversation since, the model may need to be handed again."""
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
        """The documents that fit into so many tokens as JSON, the first ones first, for the model to be handed.

        Those that it was handed before are only named, by a last item that also says how many did not fit:
        `{"given_before": ["7"], "left_out": 3}`.
        """
        given: list[dict[str, Any]] = []
        rest: dict[str, Any] = {"given_before": [], "left_out": 0}
        with self._lock:
            left = None if tokens is None else tokens - _weight(rest, count_tokens)
            for document in documents:
                is_known = str(document["id"]) in self._ids
                if left is not None:
                    weight = _weight(document["id"] if is_known else document, count_tokens)
                    if weight > left:
                        rest["left_out"] += 1
                        continue
                    left -= weight
                if is_known:
                    rest["given_before"].append(document["id"])
                else:
                    self._ids.add(str(document["id"]))
                    given.append(dict(document))
        said = {name: value for name, value in rest.items() if value}
        return [*given, said] if said else given

    def state(self) -> dict[str, Any]:
        """Plain values, to be kept."""
        with self._lock:
            return {"ids": sorted(self._ids), "cut": self._cut}


def configurable(counts: Counts, handed: Handed, calls: int = 1) -> dict[str, Any]:
    """The numbers for each of so many tools, to be added to a LangGraph `config["configurable"]`."""
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


def _weight(item: object, count_tokens: Callable[[str], int]) -> int:
    """With the comma behind it."""
    return count_tokens(json.dumps(item, ensure_ascii=False)) + 1
