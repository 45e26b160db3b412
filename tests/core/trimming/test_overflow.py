from __future__ import annotations

import pytest

from gateway.core.conversation.units import Conversation
from gateway.core.errors import RequestFault
from gateway.core.trimming.overflow import ContextOverflow
from gateway.core.trimming.reader import Reader, counter_of
from gateway.core.trimming.trim_conversation import trim_conversation


def test_an_overflow_names_the_largest_message() -> None:
    messages = [
        {"role": "system", "content": "s" * 300},
        {"role": "user", "content": "task " * 500},
        {"role": "assistant", "content": "said"},
        {"role": "user", "content": "u" * 900},
    ]
    with pytest.raises(ContextOverflow) as caught:
        trim_conversation(Conversation.of_messages(messages), 1000, Reader(counter_of(len)))
    assert isinstance(caught.value, RequestFault)
    assert (caught.value.index, caught.value.tokens, caught.value.limit, caught.value.param) == (
        3,
        909,
        1000,
        "messages[3]",
    )
    assert caught.value.needed == 311 + 909 + 14
    assert "messages[3] (user) with 909 tokens: shorten it, raise the context budget (" in caught.value.message
