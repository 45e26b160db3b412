from __future__ import annotations

import json
from typing import Any

from gateway.core.conversation.units import Conversation
from gateway.core.trimming.dedupe import dedupe
from gateway.core.trimming.draft import DROP, KEEP, Draft, DuplicateResult
from gateway.core.trimming.reader import Reader, counter_of

LONG = "result " * 60


def session(*contents: Any) -> Draft:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for number, content in enumerate(contents):
        call = {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": content})
    messages.append({"role": "user", "content": "on"})
    return Draft.untouched(Conversation.of_messages(messages), Reader(counter_of(len)))


def test_a_repeated_result_becomes_a_reference_to_the_first() -> None:
    draft = dedupe(session(LONG, "other", LONG, LONG))
    assert {i: d for i, d in enumerate(draft.decisions) if d != KEEP} == {6: DuplicateResult(2), 8: DuplicateResult(2)}
    assert json.loads(draft.rendered(6).raw or b"")["content"] == "[same as the result of c0]"


def test_short_results_and_results_with_images_stay() -> None:
    image = [{"type": "image_url", "image_url": {"url": LONG}}]
    draft = session("short", "short", image, image)
    assert dedupe(draft) is draft


def test_references_need_a_whole_source_and_frozen_messages_stay() -> None:
    draft = session(LONG, LONG, LONG)
    assert dedupe(draft.with_decisions({1: DROP, 2: DROP})).decisions[6] == DuplicateResult(4)
    frozen = dedupe(draft.reopened(5))
    assert frozen.decisions[4] == KEEP
    assert frozen.decisions[6] == DuplicateResult(2)
