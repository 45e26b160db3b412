from __future__ import annotations

from typing import Any

import pytest

from gateway.core.conversation import Conversation
from gateway.core.fitting.draft import DROP, EARLIER, Draft, numbers_of, spans_of
from gateway.core.fitting.reader import Reader, weigher

LINES = "".join(f"line {n} {'x' * 40}\n" for n in range(4))
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": LINES},
    {"role": "assistant", "content": "said"},
    {"role": "user", "content": [{"type": "text", "text": "now"}]},
]
WEIGH = weigher(len)


def draft() -> Draft:
    return Draft.untouched(Conversation.of(MESSAGES), Reader(WEIGH))


def test_what_is_kept_is_the_very_message_and_what_is_dropped_weighs_nothing() -> None:
    done = draft().having({1: DROP})
    assert done.messages() == [MESSAGES[0], MESSAGES[2]]
    assert done.message(0) is MESSAGES[0]
    assert done.total() == WEIGH(MESSAGES[0]) + WEIGH(MESSAGES[2])


def test_recalled_lines_stand_at_the_end_and_are_weighed() -> None:
    from dataclasses import replace

    done = replace(draft().having({0: (0,)}), recalls={2: ((0, (1, 3)),), 1: ((0, (2,)),)})
    parts, said = done.messages()[2]["content"], done.messages()[1]["content"]
    assert parts[0] == {"type": "text", "text": "now"}
    assert parts[1]["text"] == f"{EARLIER}\nuser: line 1 {'x' * 40}\nline 3 {'x' * 40}"
    assert said == f"said\n\n{EARLIER}\nuser: line 2 {'x' * 40}"
    assert done.total() == sum(map(WEIGH, done.messages()))
    assert done.reopened(2).recalls.keys() == {1}


@pytest.mark.parametrize(("numbers", "spans"), [((), ""), ((0,), "0"), ((0, 1, 2, 5, 7, 8), "0-2,5,7-8")])
def test_spans_come_back_as_the_numbers_they_were(numbers: tuple[int, ...], spans: str) -> None:
    assert spans_of(numbers) == spans
    assert numbers_of(spans) == numbers
