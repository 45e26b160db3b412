"""Test which thinking blocks the called model or account cannot read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway import config
from gateway.core.thinking_origin import (
    MAX_ORIGINS,
    ThinkingOrigin,
    UnreadableThinking,
    followed,
    thinking_blocks,
    unread,
)

RULES = config.families().thinking
OPUS, SONNET, HAIKU, FABLE = "claude-opus-5-5", "claude-sonnet-5-5", "claude-haiku-5-5", "claude-fable-5-1"


@pytest.mark.parametrize(
    ("maker", "target", "reason"),
    [
        ("claude-fable-5-2", "claude-fable-5-2", None),
        ("claude-fable-5-2", "claude-mythos-5-2", None),
        ("claude-fable-5-2", FABLE, "model"),
        ("claude-fable-5-2", OPUS, "model"),
        (FABLE, "claude-fable-5-2", "model"),
        (FABLE, "claude-mythos-5-1", None),
        (OPUS, FABLE, None),
        (SONNET, FABLE, "model"),
        ("claude-sonnet-5-5-20260901", FABLE, "model"),
        ("claude-fable-5-20260101", FABLE, None),
        ("claude-fable-5-20260101", "claude-fable-5-2", "model"),
        (FABLE, "claude-fable-5-20260101", None),
        (FABLE, OPUS, "model"),
        ("claude-opus-5", OPUS, None),
        ("claude-haiku-4-5", OPUS, None),
        (SONNET, OPUS, None),
        (OPUS, SONNET, "model"),
        ("claude-opus-5", SONNET, "model"),
        ("claude-sonnet-5", SONNET, None),
        ("claude-opus-4-8", SONNET, None),
        (SONNET, HAIKU, "model"),
        (OPUS, "claude-opus-5", None),
        ("anthropic/claude-opus-5.5", "us.anthropic.claude-sonnet-5-5-v1:0", "model"),
        (OPUS, "another-model", None),
    ],
)
def test_a_model_switch_says_which_blocks_are_dropped(maker: str, target: str, reason: str | None) -> None:
    found = unread([ThinkingOrigin("a", maker, 0)], 3, "a", target, RULES)
    assert [(one.blocks, one.reason, one.model) for one in found] == ([(3, reason, maker)] if reason else [])


@pytest.mark.parametrize(
    ("model", "is_bound"),
    [(SONNET, True), (HAIKU, True), (OPUS, False), (FABLE, False), ("claude-sonnet-5", False), ("other", False)],
)
def test_another_provider_cannot_read_blocks_that_are_bound_to_an_account(model: str, *, is_bound: bool) -> None:
    found = unread([ThinkingOrigin("a", model, 0)], 2, "b", model, RULES)
    assert found == ((UnreadableThinking(2, "provider", "a", model),) if is_bound else ())
    assert unread([ThinkingOrigin("a", model, 0)], 2, "a", model, RULES) == ()


def test_blocks_are_counted_by_who_made_them() -> None:
    origins = followed([ThinkingOrigin("a", SONNET, 0)], 3, "b", SONNET)
    assert origins == (ThinkingOrigin("a", SONNET, 0), ThinkingOrigin("b", SONNET, 3))
    assert unread(origins, 5, "b", SONNET, RULES) == (UnreadableThinking(3, "provider", "a", SONNET),)
    assert unread(origins, 5, "a", SONNET, RULES) == (UnreadableThinking(2, "provider", "b", SONNET),)
    assert unread(origins, 2, "b", SONNET, RULES) == (UnreadableThinking(2, "provider", "a", SONNET),), (
        "the client left some out"
    )
    assert unread(origins, 0, "b", SONNET, RULES) == ()


def test_origins_change_with_the_model_or_the_provider_only() -> None:
    first = many = followed((), 4, "a", OPUS)
    assert first == (ThinkingOrigin("a", OPUS, 0),), "what made earlier blocks is not known: most likely this one"
    assert followed(first, 9, "a", OPUS) == first
    for number in range(20):
        many = followed(many, number, f"p{number}", OPUS)
    assert len(many) == MAX_ORIGINS
    assert many[-1] == ThinkingOrigin("p19", OPUS, 19)


@pytest.mark.parametrize(
    ("content", "count"),
    [
        ([{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "x"}], 1),
        ([{"type": "redacted_thinking", "data": "x"}, {"type": "thinking", "thinking": ""}], 2),
        ([{"type": "text", "text": '{"type": "thinking"}'}], 0),
        ("thinking", 0),
    ],
)
def test_thinking_blocks_are_counted_in_the_bytes_of_a_body(content: Any, count: int) -> None:
    for separators in ((",", ":"), (" , ", " : ")):
        body = json.dumps([{"role": "assistant", "content": content}], separators=separators)
        assert thinking_blocks(body.encode()) == count
