from __future__ import annotations

import pytest

from gateway.core.trimming.identifiers import find_codes, find_labelled


@pytest.mark.parametrize(
    ("question", "codes"),
    [
        ("close issue #42", ["42"]),
        ("#7", ["7"]),
        ("what does line 88 do?", ["88"]),
        ("Summarize page 77 and page 8.", ["77", "8"]),
        ("the note of the item with id 37", ["37"]),
        ("What is the population of NY?", ["NY"]),
        # counts, times, parts of something else
        ("the last 5 of them, in 2 days, for 3", []),
        ("issue #142, page 8.5, item 3-4, 37%, line 88a", []),
        ("item NY-12 of A.NY", []),
        ("OK, GO ON with it", ["GO", "ON"]),
        ("DO IT NOW", []),
        ("OK then", []),
        # a listing
        ("line 1 line 2 line 3 line 4 line 5", []),
    ],
)
def test_find_codes_in_a_question(question: str, codes: list[str]) -> None:
    assert list(find_codes(question)) == codes


@pytest.mark.parametrize(
    ("text", "is_called"),
    [
        ("42 | broken | open\n", True),
        ("broken | 42 | open\n", True),
        ("broken | open | 42\n", True),
        ("{number: 42, title: broken}\n", True),
        ("{title: broken, number: 42}\n", True),
        ("41: a = b\n42: c = d\n", True),
        ("Page 42: birch\n", True),
        ("birch | 42 | 42\n", True),
        ("issue #42. It is broken\n", True),
        ("items[3].id: 42\n", True),
        ("user_id: 42\n", True),
        ('{"orderId": 42, "price": 7}', True),
        ("142 | broken | 42.5 | 42 days\n", False),
        ("42.5: a\n", False),
        ("paid: 42\n", False),
        ("for 42 days of 42\n", False),
    ],
)
def test_find_texts_labelled_with_a_code(text: str, *, is_called: bool) -> None:
    assert list(find_labelled(["7", "42"], iter(["7: nothing", text]))) == [(0, "7"), *[(1, "42")] * is_called]
