from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core import values

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
from gateway.core.usage import Totals
Totals().calls = 7
"""


@values.dataclass(frozen=True, slots=True)
class Ours:
    name: str
    number: int = 0
    items: tuple[int, ...] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True)
class Theirs:
    name: str
    number: int = 0
    items: tuple[int, ...] = field(default_factory=tuple)


GIVEN = st.tuples(st.text(max_size=3), st.integers(0, 2), st.tuples(st.integers(0, 1)))


@given(GIVEN, GIVEN)
def test_dataclass_behaves_like_a_frozen_one(one: tuple, other: tuple) -> None:  # type: ignore[type-arg]
    ours, theirs = Ours(*one), Theirs(*one)
    assert hash(ours) == hash(theirs)
    assert (ours == Ours(*other)) is (theirs == Theirs(*other))
    assert repr(ours) == repr(theirs).replace("Theirs", "Ours")
    assert replace(ours, number=5) == Ours(one[0], 5, one[2])
    assert [one.name for one in fields(ours)] == [one.name for one in fields(theirs)]
    assert not hasattr(ours, "__dict__")


def test_dataclass_without_eq_is_hashed_by_identity() -> None:
    @values.dataclass(frozen=True, eq=False)
    class Single:
        name: str

    one = Single("a")
    assert one != Single("a")
    assert {one: 1} == {one: 1}


def test_mutable_dataclass_is_not_hashable() -> None:
    @values.dataclass(slots=True)
    class Changing:
        name: str

    with pytest.raises(TypeError, match="unhashable"):
        hash(Changing("a"))


def test_development_mode_freezes_instances() -> None:
    command = [sys.executable, "-X", "dev", "-c", PROGRAM]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert FrozenInstanceError.__name__ in run.stderr
