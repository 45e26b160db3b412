from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.conversation import Conversation, Message
from gateway.core.fitting.draft import DROP, KEEP, Draft, Same
from gateway.core.fitting.epochs import Epoch, FitPolicy, Fitted, find, fit
from gateway.core.fitting.reader import Reader, weigher
from gateway.core.fitting.strategies import Dedupe, Drop

COUNT = weigher(lambda text: len(text) // 4)
MARK = {"cache_control": {"type": "ephemeral"}}


def step(number: int, size: int = 12) -> list[dict[str, Any]]:
    call = {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": f'{{"page": {number}}}'}}
    lines = "".join(f"entry A{number}0{n} of page {number} is worth {n * 7}{number}.\n" for n in range(size))
    return [
        {"role": "assistant", "content": f"Now page {number}.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": lines},
    ]


START: list[dict[str, Any]] = [{"role": "system", "content": "be good"}, {"role": "user", "content": "Read the pages."}]


def session(steps: int) -> list[dict[str, Any]]:
    return [*START, *(message for number in range(steps) for message in step(number))]


def run(messages: Any, limit: int, epoch: Epoch | None = None, **policy: Any) -> Fitted:
    return fit(Conversation.of(messages), limit, Reader(COUNT), epoch=epoch, policy=FitPolicy(**policy))


def written(messages: Any) -> list[str]:
    return [json.dumps(message) for message in messages]


def test_a_cut_goes_down_to_the_low_water_mark_and_the_next_turns_append() -> None:
    limit = sum(map(COUNT, session(8))) - 1
    first = run(session(8), limit, low_water=0.6)
    assert first.tokens <= 0.6 * limit + 10
    assert first.applied == ("condense",)
    second = run(session(9), limit, first.epoch, low_water=0.6)
    assert second.applied == ()
    assert written(second.messages) == written([*first.messages, *step(8)])


def test_the_beginning_of_what_was_sent_survives_the_next_cut() -> None:
    limit, epoch, sent = 1200, None, list[str]()
    shared = cuts = 0
    for steps in range(2, 30):
        done = run(session(steps), limit, epoch, stale=0.3)
        now = written(done.messages)
        if done.applied and sent:
            cuts += 1
            shared += next((n for n, (a, b) in enumerate(zip(sent, now, strict=False)) if a != b), len(sent)) > 2
        epoch, sent = done.epoch, now
    assert cuts >= 3
    assert shared >= cuts / 2


def test_an_epoch_of_another_conversation_is_not_used() -> None:
    other = [{"role": "system", "content": "be bad"}, *session(8)[1:]]
    epoch = run(session(8), 600).epoch
    assert written(run(other, 600, epoch).messages) == written(run(other, 600).messages)


def test_a_longer_limit_keeps_what_was_sent_and_a_shorter_one_cuts_again() -> None:
    first = run(session(8), 700)
    assert written(run(session(8), 800, first.epoch).messages) == written(first.messages)
    shorter = run(session(8), 300, first.epoch)
    assert shorter.tokens <= 300
    assert shorter.applied


def test_the_newest_epoch_is_found_by_the_hash_of_the_messages() -> None:
    conversation = Conversation.of(session(5))
    hashes = conversation.prefix_hashes("s")
    kept = {hashes[n]: Epoch(hashes[n], (KEEP,) * (n + 1), {}) for n in (3, 7)}
    assert find(kept, conversation, "s") == kept[hashes[7]]
    assert find(kept, conversation, "t") is None


def test_an_epoch_survives_json() -> None:
    epoch = Epoch("ab", (KEEP, DROP, (0, 1, 2, 7), (), Same(3)), {3: ((2, (0, 4)),)})
    assert Epoch.from_json(json.loads(json.dumps(epoch.to_json()))) == epoch


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        [],
        {},
        {"v": 2},
        {"v": 1},
        {"v": 1, "prefix": "x", "decisions": ["a-b"], "recalls": {}},
        {"v": 1, "prefix": "x", "decisions": [[]], "recalls": {}},
    ],
)
def test_what_is_no_epoch_is_none(value: Any) -> None:
    assert Epoch.from_json(value) is None


def test_an_epoch_holds_no_text_of_the_conversation() -> None:
    epoch = run(session(8), 500, recall="all").epoch
    assert epoch is not None
    kept = json.dumps(epoch.to_json())
    assert "page" not in kept
    assert "entry" not in kept


def test_what_the_client_had_cached_stays_while_it_fits() -> None:
    messages = session(8)
    messages[3] = {**messages[3], "content": [{"type": "text", "text": messages[3]["content"], **MARK}]}
    done = run(messages, 700)
    assert list(done.messages[:4]) == messages[:4]
    tight = run(messages, 250)
    assert tight.tokens <= 250
    assert messages[3] not in tight.messages


def test_recall_brings_back_what_is_asked_for_and_stays_on_later_turns() -> None:
    ask = {"role": "user", "content": "What is entry A003 worth?"}
    limit = 500
    first = run([*session(9), ask], limit, recall="all", strategies=(Drop(),))
    assert "A003 of page 0 is worth 210" in str(first.messages[-1]["content"])
    assert first.recalled > 0
    answer = {"role": "assistant", "content": "210."}
    second = run([*session(9), ask, answer, {"role": "user", "content": "Thanks."}], limit, first.epoch, recall="off")
    assert written(second.messages)[: len(first.messages)] == written(first.messages)
    assert "A003" not in str(run([*session(9), ask], limit, strategies=(Drop(),)).messages[:-1])


def test_strategies_are_tried_in_order_until_it_fits() -> None:
    twice = [
        *session(4),
        *({**m, "content": step(1)[1]["content"]} if m["role"] == "tool" else m for m in step(7)),
        *step(8),
    ]
    limit = sum(map(COUNT, twice)) - 20
    assert run(twice, limit, strategies=(Dedupe(), Drop()), low_water=1.0).applied == ("dedupe",)
    assert run(twice, limit - 300, strategies=(Dedupe(), Drop()), low_water=1.0).applied == ("dedupe", "drop")


class Careless:
    """A strategy that loses half of a unit."""

    name = "careless"
    is_last_word = True

    def apply(self, draft: Draft, limit: int) -> Draft:
        return draft.having({3: DROP, **dict.fromkeys(range(4, 12), DROP)})


def test_a_broken_result_is_never_sent_units_are_dropped_instead() -> None:
    done = run(session(8), 700, strategies=(Careless(),))
    assert done.applied == ("drop",)
    sent = {str(message.get("tool_call_id")) for message in done.messages if message["role"] == "tool"}
    assert sent == {call["id"] for message in done.messages for call in message.get("tool_calls", ())}
    assert done.tokens <= 700


def test_pinned_by_the_client_stays() -> None:
    messages: list[Message] = [*session(8)]
    done = fit(Conversation.of(messages, pinned=[5]), 500, Reader(COUNT))
    assert all(messages[index] in done.messages for index in (4, 5))


def test_the_counts_of_a_trim_are_told() -> None:
    done = run(session(8), 500)
    assert done.tokens_before == sum(map(COUNT, session(8)))
    assert done.dropped == len(session(8)) - len(done.messages)
    assert done.cut > 0
    assert done.changed
