from __future__ import annotations

import json

import pytest

from gateway.dialects.thinking_error import ThinkingRefusal, thinking_refusal
from gateway.dialects.thinking_fields import BINDING_BETA, with_beta

ADVICE = ' Remove the block, or set `thinking.block_binding.prefix_mismatch_behavior` to "drop_block".'
BOUND = "messages.3.content.0: Invalid `signature` in `thinking` block. The block is bound to a different conversation."


FIRST = (
    "messages.5.content.0.type: Expected `thinking` or `redacted_thinking`, but found `tool_use`. When `thinking` is "
    "enabled, a final `assistant` message must start with a thinking block."
)
MODIFIED = (
    "messages.7.content.1: `thinking` or `redacted_thinking` blocks in the latest assistant message cannot be modified."
)


def body(message: str) -> bytes:
    return json.dumps({"type": "error", "error": {"type": "invalid_request_error", "message": message}}).encode()


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        (BOUND + ADVICE, ThinkingRefusal("binding", 3)),
        (
            BOUND + ADVICE + " Content before this block differs from when it was created, first at `messages.0.content.0`.",
            ThinkingRefusal("binding", 3),
        ),
        ("messages[12]: the preceding `thinking` block is missing", ThinkingRefusal("binding", 12)),
        ("The thinking block is bound to a different conversation.", ThinkingRefusal("binding")),
        (
            FIRST,
            ThinkingRefusal("round", 5),
        ),
        (
            MODIFIED,
            ThinkingRefusal("round", 7),
        ),
        ("messages.1.content.0: Invalid `signature` in `thinking` block", None),
        ("thinking: Extra inputs are not permitted", None),
        ("prompt is too long: 210000 tokens > 200000 maximum", None),
        ('tool_choice: type "tool" and "any" are not supported for this model.', None),
    ],
)  # fmt: skip
def test_a_refusal_of_thinking_blocks_is_read(message: str, wanted: ThinkingRefusal | None) -> None:
    assert thinking_refusal(400, body(message)) == wanted


def test_only_a_refused_request_is_read() -> None:
    assert thinking_refusal(500, body(BOUND)) is None
    assert thinking_refusal(200, body(BOUND)) is None


def test_all_values_of_the_beta_header_are_kept() -> None:
    betas = [(b"anthropic-beta", b"one,two"), (b"x", b"y"), (b"Anthropic-Beta", b"three")]
    assert with_beta(betas, BINDING_BETA) == [(b"x", b"y"), (b"anthropic-beta", b"one,two,three," + BINDING_BETA)]
    assert with_beta([(b"anthropic-beta", BINDING_BETA)], BINDING_BETA) == [(b"anthropic-beta", BINDING_BETA)]
