"""The prompts with which clients summarize their own conversation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.counting.measure import Wire
from gateway.dialects import endpoint
from gateway.dialects.client_compaction import PROMPTS, has_compaction_prompt

PATHS: dict[Wire, str] = {"chat": "chat/completions", "messages": "messages", "responses": "responses"}
#: as Claude Code begins its prompt
NO_TOOLS = (
    "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\n- You already have all the context you need.\n\n"
)
HI = {"role": "user", "content": "hi"}
HELLO = {"role": "assistant", "content": "hello"}
RULES = {"role": "system", "content": "Be brief."}


def asks(items: Any, wire: Wire = "chat") -> bool:
    field = "input" if wire == "responses" else "messages"
    body = json.dumps({"model": "m", "max_tokens": 9, field: items}).encode()
    return has_compaction_prompt(endpoint("POST", PATHS[wire]).dialect.read(body), wire)


def user(*texts: str, kind: str = "text") -> dict[str, Any]:
    return {"role": "user", "content": [{"type": kind, "text": text} for text in texts]}


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("wire", PATHS)
def test_the_prompt_of_each_client_is_recognized_in_each_format(prompt: str, wire: Wire) -> None:
    assert asks([HI, HELLO, {"role": "user", "content": f"{NO_TOOLS}{prompt} the conversation so far."}], wire)
    kind = "input_text" if wire == "responses" else "text"
    assert asks([HI, HELLO, user("<system-reminder>later</system-reminder>", f"{prompt} more", kind=kind)], wire)


def test_the_prompt_may_be_the_whole_input_of_a_responses_request() -> None:
    assert asks(f"{PROMPTS[1]}. Create a handoff summary.", "responses")


def test_a_system_message_may_follow_the_prompt() -> None:
    assert asks([HI, HELLO, user(f"{PROMPTS[0]} it"), RULES])
    assert not asks([HI, HELLO, user(f"{PROMPTS[0]} it"), RULES, RULES])


def test_a_prompt_before_or_after_a_long_conversation_in_one_message_is_recognized() -> None:
    talk = "\n".join(f"[User]: part {number}" for number in range(20_000))
    assert asks([RULES, user(f"<conversation>\n{talk}\n</conversation>\n\n{PROMPTS[3]} in the tags above.")])
    assert asks([RULES, user(f"{PROMPTS[4]}below.\n<conversation>\n{talk}")])


@pytest.mark.parametrize(
    "items",
    [
        [HI],
        [],
        [user(PROMPTS[0]), HELLO, HI],
        [HI, {"role": "assistant", "content": PROMPTS[0]}],
        [user(f"Why does it say: {PROMPTS[0]}the conversation?")],
        [HI, {"role": "tool", "tool_call_id": "a", "content": PROMPTS[0]}],
        [HI, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "text": PROMPTS[0]}]}],
        [HI, {"role": "user", "content": [PROMPTS[0], None, {"text": 5}]}],
        [HI, PROMPTS[0], 5],
        [HI, {"role": [], "content": PROMPTS[0]}],
        [HI, {"role": {}, "content": {"text": PROMPTS[0]}}],
        [HI, {"type": "function_call_output", "call_id": "a", "output": PROMPTS[0]}],
    ],
)
def test_the_words_alone_are_no_prompt(items: Any) -> None:
    assert not asks(items)
    assert not asks(items, "messages")
    assert not asks(items, "responses")


def test_other_formats_and_odd_bodies_have_no_prompt() -> None:
    call = endpoint("POST", "completions").dialect.read(json.dumps({"model": "m", "prompt": PROMPTS[0]}).encode())
    assert not has_compaction_prompt(call, "completions")
    assert not has_compaction_prompt(call, None)
    assert not asks({"role": "user"}, "responses")
    assert not asks(5, "responses")
