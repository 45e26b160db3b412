from __future__ import annotations

from gateway.core.counting.estimate import Estimator
from gateway.core.counting.overhead import Overhead, RecentOverheads
from gateway.core.counting.request import read_request


def _overhead(estimator: Estimator, name: str) -> Overhead:
    return estimator.overhead(read_request("messages", {"tools": [{"name": name}], "system": "be kind"}))


def test_overhead_is_found_under_its_key(estimator: Estimator) -> None:
    besides, one, other = RecentOverheads(2**20), _overhead(estimator, "one"), _overhead(estimator, "other")
    besides.keep("a", one, 10)
    besides.keep("b", other, 10)
    assert (besides.find("a"), besides.find("b"), besides.find("c")) == (one, other, None)


def test_overheads_are_limited_in_bytes_and_the_oldest_is_dropped_first(estimator: Estimator) -> None:
    besides, one = RecentOverheads(20_000), _overhead(estimator, "one")
    for number in range(10):
        besides.keep(number, one, 5_000)
    assert 10_000 < besides.size_bytes <= 20_000
    assert (besides.find(0), besides.find(9)) == (None, one)


def test_limit_of_0_stores_nothing(estimator: Estimator) -> None:
    besides = RecentOverheads(0)
    besides.keep("a", _overhead(estimator, "one"), 10)
    assert (besides.find("a"), besides.size_bytes) == (None, 0)


def test_overhead_can_be_counted_without_messages(estimator: Estimator) -> None:
    body = {"tools": [{"name": "look", "description": "two words"}], "system": "be kind"}
    messages = [{"role": "user", "content": "one two"}, {"role": "user", "content": "three"}]
    overhead = estimator.overhead(read_request("messages", body))
    whole = estimator.estimate(read_request("messages", body, messages=messages))
    assert estimator.from_sums(overhead, estimator.sums(overhead, messages)) == whole
