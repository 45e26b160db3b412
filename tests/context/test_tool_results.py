"""Tool results in a mode: every handle has its text, texts stay within their limit, and bytes are stable."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gateway.context.tool_results import ToolResultRenderer
from gateway.core.conversation.message import text_of
from gateway.core.ledger.session_key import SessionKey
from gateway.core.modes import ResponseMode
from gateway.stores.memory import MemoryStore

KEY = SessionKey("alice", "s")
TEXTS = ["\n".join(f"Größe {name} of part {number} is {number * 37}" for number in range(90)) for name in "abc"]
SIZE = len(TEXTS[0].encode())
ROWS = json.dumps([{"id": number, "name": f"item {number}", "state": "open"} for number in range(80)])
HANDLE = "full text: GET /api/results/"
LOSSY: tuple[ResponseMode, ...] = ("summary", "handle_only")


class Counting(MemoryStore):
    """A store that records the texts it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = self.read = 0
        self.offered: list[str] = []

    async def missing_results(self, session: SessionKey, handles: Sequence[str]) -> Sequence[str]:
        self.asked += 1
        return await super().missing_results(session, handles)

    async def results(self, session: SessionKey, handles: Sequence[str]) -> Mapping[str, str]:
        self.read += 1
        return await super().results(session, handles)

    async def keep_results(self, session: SessionKey, texts: Mapping[str, str], most: int) -> Sequence[str]:
        self.offered += texts.values()
        return await super().keep_results(session, texts, most)


class Raced(MemoryStore):
    """A store that reports more room than it has when it stores something."""

    async def keep_results(self, session: SessionKey, texts: Mapping[str, str], most: int) -> Sequence[str]:
        return await super().keep_results(session, texts, SIZE)


def result(text: Any) -> bytes:
    return json.dumps({"role": "tool", "tool_call_id": "c", "content": text}).encode()


def is_short(raw: bytes) -> bool:
    return HANDLE in json.loads(raw)["content"]


async def shown(results: ToolResultRenderer, *texts: str, mode: ResponseMode = "handle_only") -> Sequence[bytes]:
    """Return the messages to send; those received if nothing changes."""
    messages = [result(text) for text in texts]
    showing = await results.show(messages, [mode] * len(messages), KEY)
    if showing is None:
        return messages
    if await results.keep(showing, KEY):
        return showing.messages
    instead = await results.show(messages, ["table"] * len(messages), KEY)
    return instead.messages if instead is not None else messages


async def full_texts(store: MemoryStore, messages: Sequence[bytes]) -> list[str | None]:
    """Return the stored texts of the handles in the messages."""
    ends = (json.loads(raw)["content"].partition(HANDLE)[2] for raw in messages)
    return [await store.result("alice", end.rstrip("]")) for end in ends if end]


@pytest.mark.parametrize("mode", LOSSY)
async def test_a_text_is_stored_up_to_exactly_the_remaining_bytes(mode: ResponseMode) -> None:
    for room, kept in ((SIZE, TEXTS[:1]), (SIZE - 1, [])):
        store = MemoryStore()
        sent = await shown(ToolResultRenderer(store, room), TEXTS[0], mode=mode)
        assert await full_texts(store, sent) == kept
        assert is_short(sent[0]) is bool(kept)


@pytest.mark.parametrize("mode", LOSSY)
async def test_a_result_without_room_is_sent_as_a_table(mode: ResponseMode) -> None:
    store = MemoryStore()
    results = ToolResultRenderer(store, SIZE)
    first, rows, second = await shown(results, TEXTS[0], ROWS, TEXTS[1], mode=mode)
    assert is_short(first)
    assert second == result(TEXTS[1]), "text is no table"
    [table] = await shown(results, ROWS, mode="table")
    assert rows == table != result(ROWS)


async def test_every_handle_has_a_stored_text() -> None:
    for room in range(0, 4 * SIZE, SIZE // 2):
        store = MemoryStore()
        results = ToolResultRenderer(store, room)
        for turn in range(1, 4):
            sent = await shown(results, *TEXTS[:turn], ROWS)
            assert await full_texts(store, sent) == [
                text for text, raw in zip([*TEXTS[:turn], ROWS], sent, strict=True) if is_short(raw)
            ]
        assert await store.results_size(KEY) <= room


async def test_a_full_session_sends_the_same_bytes_and_keeps_its_handles_valid() -> None:
    store = MemoryStore()
    results = ToolResultRenderer(store, 2 * SIZE)
    before: list[bytes] = []
    for turn in range(1, 4):
        sent = await shown(results, *TEXTS[:turn])
        assert list(sent[: len(before)]) == before
        before = list(sent)
    assert [is_short(raw) for raw in before] == [True, True, False]
    assert list(await shown(ToolResultRenderer(store, 2 * SIZE), *TEXTS)) == before, (
        "nor does another worker, or a restart, change it"
    )
    assert await full_texts(store, before) == TEXTS[:2]


@pytest.mark.parametrize("mode", LOSSY)
async def test_a_result_requested_by_handle_is_sent_complete_from_then_on(mode: ResponseMode) -> None:
    def calling(**calls: str) -> bytes:
        made = [{"id": one, "type": "function", "function": {"name": "f", "arguments": calls[one]}} for one in calls]
        return json.dumps({"role": "assistant", "content": None, "tool_calls": made}).encode()

    def found(call: str, text: str) -> bytes:
        return json.dumps({"role": "tool", "tool_call_id": call, "content": text}).encode()

    results, text, rows = ToolResultRenderer(MemoryStore(), 10 * SIZE), TEXTS[0], ROWS
    messages = [calling(a="{}", b="{}"), found("a", text), found("b", rows)]
    first = await results.show(messages, [mode] * len(messages), KEY)
    assert first is not None
    handle, other = (json.loads(raw)["content"].rpartition(HANDLE)[2].rstrip("]") for raw in first.messages[1:])
    asked = calling(a=json.dumps({"handle": handle}), b="{}", c=f'{{"path": "/api/results/{other}"}}')
    messages += [asked, found("a", text), found("b", text), found("c", rows)]
    # Tool call ids may repeat in another turn, for calls that request no handle.
    messages += [calling(a="{}"), found("a", text), b'{"role": "user", "content": "go on"}']
    for _ in range(2):
        again = await results.show(messages, [mode] * len(messages), KEY)
        assert again is not None
        assert again.messages[:3] == first.messages
        whole, short, table = again.messages[4:7]
        assert (whole, is_short(short), is_short(again.messages[8])) == (messages[4], True, True)
        assert len(json.loads(table)["content"].splitlines()) == 82, "a table, with nothing left out"
        assert set(again.texts) == set(first.texts)


async def test_a_smaller_text_is_stored_after_one_without_room() -> None:
    sent = await shown(ToolResultRenderer(MemoryStore(), 2 * SIZE), TEXTS[0], TEXTS[1] * 2, TEXTS[2])
    assert [is_short(raw) for raw in sent] == [True, False, True]


async def test_a_text_without_room_is_never_sent_to_the_store() -> None:
    store = Counting()
    results = ToolResultRenderer(store, SIZE)
    for _ in range(3):
        await shown(results, *TEXTS)
    assert store.offered == TEXTS[:1]


async def test_a_repeated_text_counts_once() -> None:
    store = MemoryStore()
    sent = await shown(ToolResultRenderer(store, SIZE), TEXTS[0], TEXTS[0])
    assert [is_short(raw) for raw in sent] == [True, True]
    sent = await shown(ToolResultRenderer(MemoryStore(), SIZE - 1), TEXTS[0], TEXTS[0])
    assert [is_short(raw) for raw in sent] == [False, False]


async def test_no_handle_is_sent_if_another_call_used_the_room() -> None:
    store = Raced()
    sent = await shown(ToolResultRenderer(store, 9 * SIZE), *TEXTS)
    assert not any(is_short(raw) for raw in sent)
    assert await full_texts(store, sent) == []


async def test_a_refused_call_stores_no_text() -> None:
    store = Counting()
    results = ToolResultRenderer(store, SIZE)
    showing = await results.show([result(TEXTS[0])], ["handle_only"], KEY)
    assert showing is not None
    assert (store.offered, await full_texts(store, showing.messages)) == ([], [None])
    assert await results.keep(showing, KEY)
    assert await full_texts(store, showing.messages) == TEXTS[:1]


@pytest.mark.parametrize("mode", LOSSY)
async def test_without_room_there_are_no_handles_and_no_store_requests(mode: ResponseMode) -> None:
    store = Counting()
    results = ToolResultRenderer(store, 0)
    assert await shown(results, TEXTS[0], ROWS, mode=mode) == await shown(results, TEXTS[0], ROWS, mode="table")
    assert store.asked == 0


async def test_a_smaller_limit_keeps_stored_texts_and_stores_no_more() -> None:
    store = MemoryStore()
    results = ToolResultRenderer(store, 2 * SIZE)
    before = await shown(results, *TEXTS[:2])
    results.max_bytes = 1
    sent = await shown(results, *TEXTS)
    assert sent[:2] == before
    assert not is_short(sent[2])


async def test_a_deleted_session_has_its_room_again() -> None:
    store = MemoryStore()
    results = ToolResultRenderer(store, SIZE)
    await shown(results, *TEXTS[:2])
    await store.delete(KEY)
    sent = await shown(results, *TEXTS[1:])
    assert [is_short(raw) for raw in sent] == [True, False]


# --- messages of several parts --------------------------------------------------------------------------------------

LONG = ["\n".join(f"Part {number} of {name} weighs {number * 37} g" for number in range(300)) for name in "abc"]
PLENTY = 2**20
PICTURE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo" + "A" * 60_000},
}
FOUND = {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": TEXTS[1]}]}
MIXED = [{"type": "text", "text": TEXTS[0]}, PICTURE, FOUND]


@pytest.mark.parametrize(("mode", "gone"), [("summary", [MIXED[0], FOUND]), ("handle_only", MIXED)])
async def test_texts_of_several_parts_are_stored_before_the_handle_is_sent(mode: ResponseMode, gone: list[Any]) -> None:
    store = MemoryStore()
    results = ToolResultRenderer(store, PLENTY)
    showing = await results.show([result(MIXED)], [mode], KEY)
    assert showing is not None
    assert await results.keep(showing, KEY)
    parts = json.loads(showing.messages[0])["content"]
    assert [part for part in parts if part["type"] != "text"] == [part for part in MIXED if part not in gone][:1]
    handle = next(part["text"] for part in parts if part["type"] == "text").rpartition(HANDLE)[2].rstrip("]")
    text = await store.result("alice", handle)
    assert json.loads(text or "") == gone
    assert await store.results_size(KEY) == len((text or "").encode())


async def test_an_image_without_room_stays_and_its_text_becomes_a_table() -> None:
    parts = [{"type": "text", "text": ROWS}, PICTURE]
    showing = await ToolResultRenderer(MemoryStore(), 60_000).show([result(parts)], ["handle_only"], KEY)
    assert showing is not None
    assert showing.texts == {}
    [table, picture] = json.loads(showing.messages[0])["content"]
    assert picture == PICTURE
    assert "id|name|state" in table["text"]


async def test_a_summary_replaces_the_texts_and_keeps_the_image() -> None:
    store = MemoryStore()
    results = ToolResultRenderer(store, PLENTY)
    message = result([{"type": "text", "text": LONG[0]}, PICTURE])
    showing = await results.show([message], ["summary"], KEY, is_summarized=True)
    assert showing is not None
    [one] = showing.pending
    assert await results.keep(showing, KEY)
    assert await results.decide({one.handle: "Light parts."}, KEY)
    showing = await results.show([message], ["summary"], KEY, is_summarized=True)
    assert showing is not None
    [said, picture] = json.loads(showing.messages[0])["content"]
    assert picture == PICTURE
    assert said["text"].startswith(f"Light parts.\n[summary of {len(LONG[0]):,} characters; {HANDLE}{one.handle}]")
    assert await store.result("alice", one.handle) == LONG[0]


# --- with a summary model -------------------------------------------------------------------------------------------


async def summed(results: ToolResultRenderer, *texts: str) -> tuple[list[str], list[str]]:
    """Return each text as it is shown, and the handles of pending results."""
    showing = await results.show([result(text) for text in texts], ["summary"] * len(texts), KEY, is_summarized=True)
    assert showing is not None
    assert await results.keep(showing, KEY)
    return [json.loads(raw)["content"] for raw in showing.messages], [one.handle for one in showing.pending]


async def test_large_results_are_pending_until_their_summary_is_decided() -> None:
    store = MemoryStore()
    results = ToolResultRenderer(store, PLENTY)
    extracts, handles = await summed(results, *LONG, TEXTS[0])
    assert len(handles) == 3
    assert extracts == [text_of(raw) for raw in await shown(results, *LONG, TEXTS[0], mode="summary")]
    assert await results.decide({handles[0]: "Light parts.", handles[1]: ""}, KEY)
    for worker in (results, ToolResultRenderer(store, PLENTY)):
        texts, still_open = await summed(worker, *LONG, TEXTS[0])
        assert texts[0] == f"Light parts.\n{extracts[0].splitlines()[-1]}"
        assert texts[1:] == extracts[1:]
        assert still_open == handles[2:]


async def test_the_extra_tokens_are_those_of_the_requested_summaries() -> None:
    results = ToolResultRenderer(MemoryStore(), PLENTY)
    more = []
    for count in (1, 4, 6):
        texts = [f"{number}\n{LONG[0]}" for number in range(count)]
        showing = await results.show(
            [result(text) for text in texts], ["summary"] * len(texts), KEY, is_summarized=True
        )
        assert showing is not None
        more.append(showing.extra_tokens)
    assert 0 < more[0] < more[1] == more[2]


async def test_the_same_result_in_two_messages_is_summarized_once() -> None:
    results = ToolResultRenderer(MemoryStore(), PLENTY)
    _, [handle] = await summed(results, LONG[0], LONG[0])
    await results.decide({handle: "Light parts."}, KEY)
    texts, _ = await summed(results, LONG[0], LONG[0])
    assert texts[0] == texts[1]
    assert texts[0].startswith("Light parts.\n")


async def test_without_room_for_summaries_none_are_requested() -> None:
    results = ToolResultRenderer(MemoryStore(), len(LONG[0]) + 1_000)
    for _ in range(2):
        texts, handles = await summed(results, LONG[0])
        assert handles == []
        assert HANDLE in texts[0]


async def test_a_result_without_a_handle_is_not_pending() -> None:
    results = ToolResultRenderer(MemoryStore(), PLENTY)
    results.max_bytes = len(LONG[0]) - 1
    showing = await results.show([result(LONG[0]), result(ROWS)], ["summary"] * 2, KEY, is_summarized=True)
    assert showing is not None
    assert not showing.pending


async def test_a_deleted_session_is_decided_again() -> None:
    store = MemoryStore()
    results = ToolResultRenderer(store, PLENTY)
    _, [handle] = await summed(results, LONG[0])
    await results.decide({handle: "Light parts."}, KEY)
    assert (await summed(results, LONG[0]))[1] == []
    await store.delete(KEY)
    texts, handles = await summed(results, LONG[0])
    assert handles == [handle]
    assert "Light parts." not in texts[0]


async def test_a_turn_without_new_results_sends_one_store_request() -> None:
    store = Counting()
    results = ToolResultRenderer(store, PLENTY)
    _, handles = await summed(results, *LONG)
    await results.decide(dict.fromkeys(handles, "Light parts."), KEY)
    store.asked = store.read = 0
    await summed(results, *LONG)
    assert (store.asked, store.read) == (1, 0)


async def test_nothing_is_pending_in_a_stricter_mode_or_without_a_model() -> None:
    results = ToolResultRenderer(MemoryStore(), PLENTY)
    for mode, is_summed in (("handle_only", True), ("summary", False), ("table", True)):
        showing = await results.show([result(LONG[0]), result(ROWS)], [mode] * 2, KEY, is_summarized=is_summed)  # type: ignore[list-item]
        assert showing is not None
        assert showing.pending == ()
        assert showing.extra_tokens == 0
