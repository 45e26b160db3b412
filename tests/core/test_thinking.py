from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.conversation.message import Hashed, encode
from gateway.core.counting.measure import Wire
from gateway.core.session import SessionState
from gateway.core.thinking import MAX_SPANS, BoundConversation, SentPrefix, bare_message, merged


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def thought(number: int, *, alone: bool = False) -> dict[str, Any]:
    blocks = [{"type": "thinking", "thinking": f"thought {number}", "signature": f"sig{number}"}]
    text = [] if alone else [{"type": "text", "text": f"said {number}"}]
    return {"role": "assistant", "content": [*blocks, *text]}


def bound(messages: Sequence[dict[str, Any]], wire: Wire = "messages") -> BoundConversation:
    return BoundConversation(wire, Hashed(map(encode, messages)))


def raws(messages: Sequence[dict[str, Any]]) -> tuple[bytes, ...]:
    return tuple(map(encode, messages))


FOUR = [user("a"), thought(1), user("b"), thought(2), user("c"), thought(3), user("d")]

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("wire", "message", "bare", "blocks"),
    [
        ("messages", thought(1), {"role": "assistant", "content": [{"type": "text", "text": "said 1"}]}, 1),
        ("messages", thought(1, alone=True), None, 1),
        ("messages", user("thinking aloud"), user("thinking aloud"), 0),
        ("messages", {"role": "assistant", "content": "thinking"}, {"role": "assistant", "content": "thinking"}, 0),
        (
            "messages",
            {
                "role": "assistant",
                "content": [
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "t"},
                    {"type": "thinking", "thinking": "", "signature": "s"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"n": 1.10}},
                ],
            },
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "t"}, {"type": "tool_use", "id": "1", "name": "f", "input": {"n": 1.10}}],
            },
            2,
        ),
        (
            "chat",
            {"role": "assistant", "content": "t", "thinking_blocks": [{"type": "thinking"}], "reasoning_content": "r"},
            {"role": "assistant", "content": "t"},
            1,
        ),
        (
            "chat",
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_details": [{"signature": "s"}, {}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            2,
        ),
        ("chat", {"role": "assistant", "content": "", "reasoning_content": "r"}, None, 1),
        ("responses", {"type": "reasoning", "id": "rs", "encrypted_content": "x"}, None, 1),
        ("responses", user("reasoning"), user("reasoning"), 0),
    ],
)  # fmt: skip
def test_only_thinking_is_removed_from_a_message(
    wire: Wire, message: dict[str, Any], bare: dict[str, Any] | None, blocks: int
) -> None:
    found = bare_message(wire, encode(message))
    assert (json.loads(found.raw) if found.raw is not None else None, found.blocks) == (bare, blocks)


def test_the_spelling_of_what_stays_in_a_message_is_unchanged() -> None:
    raw = b'{"role": "assistant", "content": [{"type":"thinking","signature":"s"}, {"type": "text",  "text": "\\u00e9 1.10"}]}'
    assert (
        bare_message("messages", raw).raw
        == b'{"role":"assistant","content":[{"type": "text",  "text": "\\u00e9 1.10"}]}'
    )


def test_nothing_has_changed_in_what_was_sent_as_received() -> None:
    assert bound(FOUR).first_change(None, raws(FOUR), "") is None


def test_cache_marks_and_the_form_of_a_text_are_no_change() -> None:
    marked = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        *FOUR[1:],
    ]
    assert bound(FOUR).first_change(None, raws(marked), "") is None


@pytest.mark.parametrize("place", [0, 2, 4, 6])
def test_the_first_changed_message_is_found(place: int) -> None:
    changed = [*FOUR[:place], user("other"), *FOUR[place + 1 :]]
    assert bound(FOUR).first_change(None, raws(changed), "") == place


def test_dropped_message_is_a_change_at_its_position() -> None:
    assert bound(FOUR).first_change(None, raws([FOUR[0], *FOUR[2:]]), "") == 1
    assert bound(FOUR).first_change(None, raws(FOUR[:-2]), "") == 5


def test_thinking_left_out_is_no_change() -> None:
    conversation = bound([FOUR[0], thought(9, alone=True), *FOUR[1:]])
    assert conversation.first_change(None, conversation.without([(0, 7)]), "") is None
    assert conversation.size == len(FOUR)


def test_other_tools_are_a_change_of_everything() -> None:
    conversation = bound(FOUR)
    assert conversation.first_change(None, raws(FOUR), "tools") == 0
    known = conversation.remember(
        None, raws(FOUR), removed=(), modes=((0, "raw"),), tools="tools", provider_drops=False
    )
    assert bound(FOUR).first_change(known, raws(FOUR), "tools") is None
    assert bound(FOUR).first_change(known, raws(FOUR), "") == 0


def test_after_a_change_what_was_sent_then_is_compared_and_not_what_was_received() -> None:
    sent = [user("short"), *FOUR[1:]]
    known = bound(FOUR).remember(
        None, raws(sent), removed=((0, 7),), modes=((0, "raw"),), tools="", provider_drops=False
    )
    more = [*FOUR, thought(4), user("e")]
    conversation = bound(more)
    assert conversation.find([known.to_json()]) == known
    assert conversation.first_change(known, raws([*sent, *more[7:]]), "") is None
    # The received messages were not sent then: later replies were created after other messages.
    assert conversation.first_change(known, raws(more), "") == 7
    assert conversation.first_change(known, raws([*sent, thought(4), user("other")]), "") == 8
    assert (conversation.stale(0, known.removed), conversation.stale(0, ())) == (1, 4)


def test_a_later_change_is_compared_with_the_last_one_that_still_holds() -> None:
    first = bound(FOUR).remember(
        None, raws([user("short"), *FOUR[1:]]), removed=((0, 7),), modes=((0, "raw"),), tools="", provider_drops=False
    )
    more = [*FOUR, thought(4), user("e"), thought(5), user("f")]
    sent = [user("short"), *FOUR[1:], thought(4), user("cut"), thought(5), user("f")]
    second = bound(more).remember(
        first, raws(sent), removed=((0, 7), (8, 11)), modes=((0, "raw"),), tools="", provider_drops=False
    )
    assert [one.size for one in second.checkpoints] == [7, 11]
    longer = [*more, thought(6), user("g")]
    assert bound(longer).first_change(second, raws([*sent, *longer[11:]]), "") is None
    # The second change is undone, the first one is not: replies between the two stay valid.
    undone = [user("short"), *longer[1:]]
    assert bound(longer).first_change(second, raws(undone), "") == 11
    other = [user("short"), *FOUR[1:], thought(4), user("third"), *longer[9:]]
    assert bound(longer).first_change(second, raws(other), "") == 8


def test_a_prefix_is_found_by_what_was_received_with_or_without_its_thinking() -> None:
    known = bound(FOUR).remember(None, raws(FOUR[2:]), removed=(), modes=(), tools="", provider_drops=False)
    stored = json.loads(json.dumps(known.to_json()))
    bare = [json.loads(raw) for raw in bound(FOUR).without([(0, 7)])]
    assert bound([*bare, thought(4)]).find([stored]) == known
    assert bound([user("x"), *FOUR[1:]]).find([stored]) is None
    assert bound(FOUR[:3]).find([stored]) is None


@pytest.mark.parametrize("value", [None, {}, {"v": 1}, {"v": 1, "received": "x", "size": "x"}, {"v": 2}, [], {"v": 1, "received": "", "size": 1, "removed": [[1]], "checkpoints": [], "modes": [], "tools": ""}])  # fmt: skip
def test_a_damaged_prefix_is_ignored(value: Any) -> None:
    assert SentPrefix.from_json(value) is None


def test_results_after_last_reply_are_unread() -> None:
    assert bound(FOUR).after_last_reply == 6
    assert bound([*FOUR, thought(4)]).after_last_reply == 8
    assert bound([user("a")]).after_last_reply == 0


def test_the_open_turn_begins_after_the_users_last_words() -> None:
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "r"}]}
    assert bound([*FOUR, thought(4), result, thought(5), result]).open_turn == 7
    overhead = {"role": "user", "content": [*result["content"], {"type": "text", "text": "Be careful."}]}
    assert bound([*FOUR, thought(4), overhead]).open_turn == 7
    assert bound(FOUR).open_turn == 7


def test_spans_are_merged() -> None:
    assert merged([(4, 6), (0, 2), (2, 3), (5, 9), (7, 7)]) == ((0, 3), (4, 9))


def test_many_spans_are_bounded_by_removing_more_of_the_oldest_thinking() -> None:
    spans = [(4 * number, 4 * number + 2) for number in range(100)]
    known = bound(FOUR).remember(None, raws(FOUR), removed=spans, modes=(), tools="", provider_drops=False)
    assert len(known.removed) == MAX_SPANS
    assert known.removed[0][0] == 0
    assert known.removed[-1] == spans[-1]
    assert all(any(a <= start and stop <= b for a, b in known.removed) for start, stop in spans)


def test_a_session_keeps_the_newest_prefixes() -> None:
    state = SessionState()
    for number in range(40):
        state = state.with_sent_prefix({"received": str(number)}, instead_of=str(number - 1) if number % 2 else None)
    assert len(state.sent_prefixes) == 20
    assert list(state.sent_prefixes)[-1] == "39"


# --- against a model of the provider ------------------------------------------------------------------------------------


class Signer:
    """A provider that remembers what each thinking block was created after: messages, and the blocks before it."""

    def __init__(self) -> None:
        self.made: dict[str, tuple[list[str], list[str]]] = {}

    def problems(self, sent: Sequence[bytes]) -> list[str]:
        """Return the signatures of blocks that are not valid where they are."""
        bad, texts, chain = [], list[str](), list[str]()
        for raw in sent:
            message = json.loads(raw)
            content = (
                message["content"]
                if isinstance(message["content"], list)
                else [{"type": "text", "text": message["content"]}]
            )
            for block in content:
                if block["type"] == "thinking":
                    before, blocks = self.made[block["signature"]]
                    if before != texts or (chain and blocks[-len(chain) :] != chain):
                        bad.append(block["signature"])
                    chain.append(block["signature"])
            texts.append(json.dumps([block for block in content if block["type"] != "thinking"]))
            texts = [text for text in texts if text != "[]"]
        return bad

    def answer(self, sent: Sequence[bytes], number: int) -> dict[str, Any]:
        """Return a new message of the model after these."""
        texts, chain = list[str](), list[str]()
        for raw in sent:
            message = json.loads(raw)
            content = (
                message["content"]
                if isinstance(message["content"], list)
                else [{"type": "text", "text": message["content"]}]
            )
            chain += [block["signature"] for block in content if block["type"] == "thinking"]
            texts.append(json.dumps([block for block in content if block["type"] != "thinking"]))
        self.made[f"sig{number}"] = [text for text in texts if text != "[]"], chain
        return thought(number)


#: how a message is changed from some turn on: unchanged, another text, left out
EDIT = st.sampled_from(["keep", "keep", "keep", "short", "drop"])


@given(st.lists(st.tuples(st.booleans(), st.lists(EDIT, min_size=24, max_size=24)), min_size=2, max_size=10))
def test_after_any_changes_the_thinking_that_is_left_is_valid(turns: list[tuple[bool, list[str]]]) -> None:
    """Each turn can change how user messages are sent; a change applies until the next one."""
    provider, state = Signer(), SessionState()
    messages = [user("0")]
    edits: list[str] = []
    for number, (is_new, wanted) in enumerate(turns, 1):
        edits = [*wanted[: len(messages)]] if is_new else [*edits, *["keep"] * (len(messages) - len(edits))]
        edits[-1] = "keep"
        conversation = bound(messages)
        known = conversation.find(state.sent_prefixes.values())
        removed = known.removed if known is not None else ()
        for _ in range(20):
            kept = conversation.without(removed)
            sent = tuple(
                encode({**json.loads(raw), "content": "short"}) if edit == "short" else raw
                for raw, edit in zip(kept, edits, strict=True)
                if json.loads(raw)["role"] == "assistant" or edit != "drop"
            )
            change = conversation.first_change(known, sent, "")
            if change is None or not conversation.stale(change, removed):
                break
            removed = merged((*removed, (change, conversation.size)))
        assert provider.problems(sent) == []
        after = conversation.remember(known, sent, removed=removed, modes=(), tools="", provider_drops=False)
        if sent != raws(messages):
            state = state.with_sent_prefix(after.to_json(), instead_of=known.received if known else None)
        messages = [*messages, provider.answer(sent, number), user(str(number))]


BLOCK = {"type": "compaction", "content": "All lists were read."}


@pytest.mark.parametrize(
    ("first", "is_compacted"),
    [
        ({"role": "assistant", "content": [BLOCK]}, True),
        ({"role": "user", "content": [{**BLOCK, "signature": "s"}, {"type": "text", "text": "go on"}]}, True),
        ({"role": "assistant", "content": [{"type": "compaction", "content": None}]}, False),
        ({"role": "user", "content": "compaction"}, False),
        ({"role": "user", "content": ["compaction"]}, False),
        ({"role": "user", "compaction": [BLOCK]}, False),
        (["compaction", BLOCK], False),
        ("compaction", False),
        (user("a"), False),
    ],
)
def test_a_conversation_that_begins_with_a_compaction(first: Any, is_compacted: bool) -> None:
    assert bound([first, *FOUR]).is_compacted is is_compacted


def test_an_empty_conversation_begins_with_no_compaction() -> None:
    assert not bound([]).is_compacted


def test_all_thinking_of_an_unknown_conversation_is_removed_and_later_thinking_is_sent() -> None:
    conversation = bound(FOUR)
    unknown = conversation.as_unknown()
    assert conversation.thinking
    assert conversation.blocks_in(conversation.without(unknown.removed)) == 0
    later = bound([*FOUR, thought(4), user("e")])
    assert later.find([unknown.to_json()]) == unknown
    assert later.blocks_in(later.without(unknown.removed)) == 1
