"""The lists of the API: orders, searches, pages."""

from __future__ import annotations

import pytest

from gateway.core.errors import InvalidRequest
from gateway.server.sessions import sort_of
from tests.support.web import Web


def test_unknown_order_is_refused() -> None:
    assert sort_of(None) == "recent"
    assert sort_of("cost") == "cost"
    with pytest.raises(InvalidRequest, match="recent, tokens, cost"):
        sort_of("name")


def test_the_api_finds_sorts_and_continues(web: Web) -> None:
    for number in range(3):
        web.chat(f"findable-{number}", f"tokens={number + 1}00/1", model="priced")
    found = web.get("/api/sessions?q=findable&sort=cost&limit=2").json
    assert [view["id"] for view in found["sessions"]] == ["findable-2", "findable-1"]
    rest = web.get(f"/api/sessions?q=findable&sort=cost&limit=2&cursor={found['cursor']}").json
    assert ([view["id"] for view in rest["sessions"]], rest["cursor"]) == (["findable-0"], None)


def test_the_calls_of_a_session_come_in_pages(web: Web, session: str) -> None:
    for _ in range(5):
        web.chat(session)
    every = [call["call_id"] for call in web.get(f"/api/sessions/{session}/calls").json["calls"]]
    seen, cursor = list[str](), ""
    while True:
        page = web.get(f"/api/sessions/{session}/calls?limit=2{cursor}").json
        seen += [call["call_id"] for call in page["calls"]]
        if page["cursor"] is None:
            break
        cursor = f"&cursor={page['cursor']}"
    assert seen == every
    assert len(seen) == 5
    wrong = web.get(f"/api/sessions/{session}/calls?cursor=zzz")
    assert (wrong.status, wrong.error["param"]) == (400, "cursor")


def test_newest_calls_are_listed_by_access(web: Web, session: str) -> None:
    web.chat(session)
    (newest,) = web.get("/api/calls?limit=1").json["calls"]
    assert newest["session"] == session
