"""The built-in provider's rules for Claude models, compared with a second implementation of them."""

from __future__ import annotations

from tests.support.claude_agreement import Result, compare

SESSIONS = 200


def test_the_provider_refuses_and_drops_what_the_independent_checker_does() -> None:
    result = Result()
    for seed in range(SESSIONS):
        compare(seed, result)
    assert result.disagreements == []
    # The comparison is only useful with many requests in which every rule is broken at least once.
    assert result.requests > 5 * SESSIONS
    assert result.unsure < SESSIONS // 4
    broken = {rule for outcome in result.outcomes for rule in outcome.split()[-1].split("/")}
    assert broken >= {
        "prefix_changed", "gap", "restored", "unknown_signature", "modified", "model",
        "beta", "forced", "thinking_type", "sampling", "prefill",
    }  # fmt: skip
