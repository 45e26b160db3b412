from __future__ import annotations

import json
import random
from threading import Lock
from typing import Any

import pytest

from gateway.core.conversation.message import keys_of
from gateway.core.counting.measure import Wire
from gateway.core.counting.prefix_cache import CachedPrefix, PrefixCache
from gateway.core.counting.sums import MessageSums
from gateway.dialects.base import Call
from gateway.dialects.contents import Contents, contents_of
from gateway.dialects.fields import read_fields
from gateway.steps.last_user_message import NewestMessages
from tests.support.formats import Format

Json = dict[str, Any]
WIRES: tuple[Wire, ...] = ("chat", "responses", "messages")
ITEMS = {"chat": "messages", "responses": "input", "messages": "messages"}


def contents(wire: Wire, elements: Any, known: PrefixCache | None = None) -> Contents:
    body = json.dumps({"model": "m", ITEMS[wire]: elements}).encode()
    found = contents_of(Call("chat", "m", stream=False, body=body, fields=read_fields(body)), wire, known)
    assert found is not None
    return found


def newest(wire: Wire, elements: Any) -> str | None:
    return NewestMessages().of(contents(wire, elements))


@pytest.mark.parametrize(
    ("wire", "elements", "text"),
    [
        ("chat", [], None),
        ("chat", [5, None, "user", {"role": "assistant", "content": "user"}], None),
        ("chat", [{"role": "user"}], ""),
        ("chat", [{"role": "user", "content": 7}], ""),
        ("chat", [{"role": "user", "content": "old"}, {"role": "user", "content": "new"}], "new"),
        ("chat", [{"role": "user", "content": "new"}, {"role": "tool", "content": "user"}], "new"),
        ("chat", [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}], "a"),
        ("responses", "hello", "hello"),
        ("responses", 5, None),
        ("responses", [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}], "a"),
        ("messages", [{"role": "user", "content": "a"},
                      {"role": "user", "content": [{"type": "tool_result", "content": "b"}]}], "a"),
        ("messages", [{"role": "user", "content": "a"},
                      {"role": "user", "content": [{"type": "tool_result", "content": "b"},
                                                   {"type": "text", "text": "c"}]}], "c"),
        ("messages", [{"role": "user", "content": "a"},
                      {"role": "user", "content": [{"type": "tool_result", "content": "b"},
                                                   {"type": "text", "text": "<system-reminder>c</system-reminder>"}]}],
         "a"),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": "<system-reminder>c</system-reminder>"},
                                                   {"type": "text", "text": "a"}]}], "a"),
        ("messages", [{"role": "user", "content": []}], ""),
    ],
)  # fmt: skip
def test_the_text_of_the_last_user_message(wire: Wire, elements: Any, text: str | None) -> None:
    assert newest(wire, elements) == text


def test_only_the_end_of_a_long_message_is_returned() -> None:
    assert newest("chat", [{"role": "user", "content": "x" * 50_000 + "end"}]) == "x" * (16 * 1024 - 3) + "end"


@pytest.mark.parametrize("wire", WIRES)
def test_a_cached_prefix_does_not_change_the_text(wire: Wire) -> None:
    """Growing conversations; some prefixes are cached, some were removed from the cache, some were never read."""
    draw = random.Random(7)
    form, finder, known = Format(wire), NewestMessages(), PrefixCache(2**24, Lock())
    for conversation in range(6):
        grown: list[Json] = [{"role": "system", "content": "s" * 5000}]
        for turn in range(60):
            if draw.random() < 0.2 or turn == 0:
                grown.append({"role": "user", "content": f"task {conversation} {turn} " + "x" * 300})
            else:
                call = {"id": f"c{turn}", "type": "function", "function": {"name": "f", "arguments": '{"role":"user"}'}}
                grown.append({"role": "assistant", "content": None, "tool_calls": [call]})
                grown.append({"role": "tool", "tool_call_id": f"c{turn}", "content": "user " * draw.randrange(90)})
            elements = form.body(grown)[form.array]
            found = contents(wire, elements, known)
            if draw.random() < 0.8:
                assert finder.of(found) == newest(wire, elements), (conversation, turn)
            # Like the planner after counting a request: all messages but the last are a known prefix from now on.
            if draw.random() < 0.8 and found.new_messages:
                begun = found.cached_prefix.keys if found.cached_prefix is not None else ()
                keys = begun + keys_of(found.new_messages[:-1])
                known.keep(
                    wire,
                    CachedPrefix(found.text_before_last, found.bounds, keys, "kind", MessageSums()),
                    instead_of=found.cached_prefix,
                )
    assert len(finder._known) > 20


def test_the_cache_is_bounded() -> None:
    finder = NewestMessages()
    for number in range(1000):
        elements = [{"role": "user", "content": f"{number} " + "x" * 5000}, {"role": "assistant", "content": "a"}]
        assert finder.of(contents("chat", elements)) == elements[0]["content"]
    assert len(finder._known) == 256


@pytest.mark.parametrize("wire", WIRES)
async def test_long_messages_are_read_in_a_thread_and_short_ones_on_demand(wire: Wire) -> None:
    known, long = NewestMessages(), "word " * 40_000
    small = await known.ahead_of(contents(wire, [{"role": "user", "content": "short"}]))
    assert callable(small)
    assert small() == "short"
    found = await known.ahead_of(contents(wire, [{"role": "user", "content": long}]))
    assert found == long[-16 * 1024 :]


async def test_a_long_text_is_read_in_a_thread() -> None:
    assert await NewestMessages().ahead_of(contents("responses", "word " * 40_000)) == ("word " * 40_000)[-16 * 1024 :]


async def test_a_long_known_prefix_needs_no_thread() -> None:
    finder, known = NewestMessages(), PrefixCache(2**24, Lock())
    said = [
        {"role": "user", "content": "do it"},
        *({"role": "assistant", "content": "word " * 2_000} for _ in range(20)),
    ]
    first = contents("chat", said, known)
    assert await finder.ahead_of(first) == "do it"
    begun = CachedPrefix(first.text_before_last, first.bounds, keys_of(first.new_messages[:-1]), "kind", MessageSums())
    known.keep("chat", begun, instead_of=None)
    next_one = contents("chat", [*said, {"role": "assistant", "content": "more"}], known)
    found = await finder.ahead_of(next_one)
    assert callable(found)
    assert found() == "do it"
    assert await NewestMessages().ahead_of(next_one) == "do it", "who does not know it reads all of it"
