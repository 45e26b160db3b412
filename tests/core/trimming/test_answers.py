from __future__ import annotations

from typing import Any

import pytest

from gateway.core.conversation.units import Conversation
from gateway.core.trimming.answers import WordRoots, rank_answers
from gateway.core.trimming.draft import Draft
from gateway.core.trimming.policy import TrimPolicy
from gateway.core.trimming.reader import Reader, counter_of
from gateway.core.trimming.trim_conversation import trim_conversation

TALK = [
    "Hi, good to see you again!",
    "What do you do when work is hard?",
    "Dancing, mostly, at the small hall by the river.",
    "Since when is that?",
    "It began in May, with two friends.",
    *(f"The weather of day {number} was fine and we talked about it for a while." for number in range(40)),
]


def talk(question: str, role: str = "user") -> list[dict[str, Any]]:
    said = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(TALK)]
    return [*said, {"role": role, "content": question}]


def rank(messages: list[dict[str, Any]], **options: Any) -> list[int]:
    conversation = Conversation.of_messages(messages, **options)
    return list(rank_answers(Draft.untouched(conversation, Reader(counter_of(len)))))


def test_another_form_of_a_word_is_found_and_its_neighbours_follow() -> None:
    assert rank(talk("When did the dances start?"))[:1] == [2]
    assert {1, 3} <= {*rank(talk("When did the dances start?"))[:3]}


@pytest.mark.parametrize(
    ("question", "role"), [("When did the dances start?", "assistant"), ("And you?", "user"), ("dance " * 500, "user")]
)
def test_without_a_question_nothing_is_ranked(question: str, role: str) -> None:
    assert rank(talk(question, role)) == []


def test_a_message_of_priority_0_is_no_answer() -> None:
    assert 2 not in rank(talk("When did the dances start?"), priorities={2: 0.0})


def test_words_that_every_second_message_has_find_nothing() -> None:
    assert rank([*talk("")[:-1], {"role": "user", "content": "And the weather?"}]) == []


def test_scripts_without_spaces_have_roots() -> None:
    assert WordRoots.of("舞蹈室").counts.keys() & WordRoots.of("我的舞蹈").counts.keys()


@pytest.mark.parametrize("recall", ["off", "said"])
def test_a_trim_keeps_the_answer_whole(recall: Any) -> None:
    reader = Reader(counter_of(lambda text: len(text) // 4))
    conversation = Conversation.of_messages(talk("When did the dances start?"), reader)
    fitted = trim_conversation(conversation, 300, reader, policy=TrimPolicy(recall=recall))
    sent = b" ".join(fitted.messages).decode()
    assert TALK[2] in sent
    assert TALK[3] in sent
