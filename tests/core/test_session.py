from __future__ import annotations

from gateway.core.session import MAX_EPOCHS, SessionState


def epoch(prefix: str) -> dict[str, object]:
    return {"v": 1, "prefix": prefix}


def test_an_epoch_is_kept_under_its_prefix() -> None:
    assert SessionState().with_epoch(epoch("a")).epochs == {"a": epoch("a")}


def test_an_epoch_takes_the_place_of_the_one_it_goes_on_from() -> None:
    state = SessionState().with_epoch(epoch("a")).with_epoch(epoch("b")).with_epoch(epoch("c"), instead_of="a")
    assert list(state.epochs) == ["b", "c"]


def test_the_oldest_conversation_gives_way() -> None:
    state = SessionState()
    for number in range(MAX_EPOCHS + 2):
        state = state.with_epoch(epoch(str(number)))
    assert list(state.epochs) == [str(number) for number in range(2, MAX_EPOCHS + 2)]


def test_the_same_epoch_again_is_the_newest_and_stands_once() -> None:
    state = SessionState().with_epoch(epoch("a")).with_epoch(epoch("b")).with_epoch(epoch("a"))
    assert list(state.epochs) == ["b", "a"]
