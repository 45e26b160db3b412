from __future__ import annotations

import pytest

from gateway.core.trimming.terms import IDENTIFIER, NAME, WORD, Lexicon, kind_of, shapes_of


@pytest.mark.parametrize(
    ("term", "kind"),
    [
        ("HAT204", IDENTIFIER),
        ("user_id", IDENTIFIER),
        ("src/main.py", IDENTIFIER),
        ("a@b.de", IDENTIFIER),
        ("getUser", IDENTIFIER),
        ("4711", IDENTIFIER),
        ("404", IDENTIFIER),
        ("12", -1),
        ("a1b", -1),
        ("JFK", IDENTIFIER),
        ("the", -1),
        ("HTTP", IDENTIFIER),
        ("Boston", NAME),
        ("refund", WORD),
        ("would", -1),
        ("Would", -1),
    ],
)
def test_kind_of_each_term(term: str, kind: int) -> None:
    assert kind_of(term) == kind


def test_terms_are_lower_case_with_their_highest_kind() -> None:
    assert Lexicon().terms("Boston boston HAT204 of") == {"boston": NAME, "hat204": IDENTIFIER}


def test_scripts_without_spaces_give_pairs() -> None:
    assert Lexicon().terms("注文番号 A12345") == {"注文": WORD, "文番": WORD, "番号": WORD, "a12345": IDENTIFIER}


def test_a_full_lexicon_starts_again_empty() -> None:
    lexicon = Lexicon(limit_bytes=700)
    for text in ("alpha beta", "gamma alpha", "beta " + "x" * 1000, "alpha"):
        assert set(lexicon.terms(text)) == set(text.split())
        assert lexicon.size_bytes <= 700


def test_terms_keep_the_order_of_the_text() -> None:
    # otherwise sums of floats, and so choices, would differ between processes
    words = ["flight", "hat204", "boston", "refund_7", "depot", "nineteen", "order", "4711", "parcel", "invoice"]
    assert list(Lexicon().terms(" ".join(words))) == words


def test_terms_of_one_shape_differ_in_their_numbers_only() -> None:
    assert shapes_of(["hat001", "hat12", "a1b22-c", "2024-05-01", "none"]) == [
        "hat0",
        "hat0",
        "a0b0-c",
        "0-0-0",
        "none",
    ]
    assert shapes_of([]) == []
