"""Generate agent sessions on models that bind thinking to its prefix, and check each request independently."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.thinking_sessions import SHAPES, Stage, stage

pytestmark = pytest.mark.long

#: groups of seeds, so that a failing group is found quickly
GROUPS = 4
SESSIONS = 10
MOST_TURNS = 14


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("sessions")) as started:
        yield started


@pytest.mark.parametrize("group", range(GROUPS))
def test_generated_sessions_are_valid_and_rarely_repaired(group: int, sessions: Stage) -> None:
    played = [sessions.play(group * SESSIONS + number, MOST_TURNS) for number in range(SESSIONS)]
    assert [(one.plan.seed, one.failures) for one in played if one.failures] == []
    assert len({one.plan.shape for one in played}) >= len(SHAPES) // 2
    assert sum(one.trimmed for one in played) > SESSIONS


def test_a_call_that_nearly_exhausts_its_budget_is_sent_without_invalid_thinking(sessions: Stage) -> None:
    """The last call exceeds the input that its budget allows, and its tool results are shortened again."""
    played = sessions.play(7000989)
    assert (played.failures, played.plan.session_budget) == ([], 4997)
