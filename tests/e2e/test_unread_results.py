"""When the budget runs low, the model still sees the tool results that it has just requested."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.mock import CLAUDE_RULES, MockProvider, MockServer
from tests.conftest import StartGateway
from tests.support.agents import play
from tests.support.formats import Format, Json
from tests.support.gateways import GatewayThread
from tests.support.web import CHAT, Reply, Web

BUDGET = 40_000
WIRES = pytest.mark.parametrize("wire", ["chat", "messages", "responses"])
FUNCTION = '''\
def settle_invoice(invoice, rate):
    """Return what the customer of an invoice still owes, in cents."""
    owed = sum(line.cents for line in invoice.lines) - invoice.paid_cents
    if invoice.is_overdue:
        owed += round(owed * rate.late_fee)
    return max(0, owed)
'''
QUESTION = "What does settle_invoice return for an invoice that is overdue?"
OLD = "\n".join(f"line {number}: the value of part {number} is {number * number}" for number in range(120))
HANDLE = "full text: GET /api/results/"


def module(functions: int) -> str:
    """Return a source file with `FUNCTION` in its middle."""
    others = [
        f"def compute_total_{number}(order, table):\n"
        f'    """Return column {number} of the table for an order."""\n'
        f"    row = table.find(order.key_{number}, default={number})\n"
        f"    return row.values[{number}] * order.factor_{number}\n"
        for number in range(functions)
    ]
    return "\n\n".join([*others[: functions // 2], FUNCTION, *others[functions // 2 :]])


#: about 2,200 tokens; and more tokens than are left of the budget
FITS, TOO_LONG = module(40), module(240)


def called(name: str, path: str) -> Json:
    arguments = json.dumps({"file_path": path})
    made = {"id": f"call_{name}", "type": "function", "function": {"name": "Read", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [made]}


def answered(name: str, text: str) -> Json:
    return {"role": "tool", "tool_call_id": f"call_{name}", "content": text}


def conversation(*unread: str) -> list[Json]:
    """Return messages that end with results; the model has read an older one."""
    asked = [{"role": "user", "content": "Look at the notes."}, called("old", "notes.txt"), answered("old", OLD)]
    said = [{"role": "assistant", "content": "I have read them."}, {"role": "user", "content": QUESTION}]
    new = [[called(f"n{number}", "billing.py"), answered(f"n{number}", text)] for number, text in enumerate(unread)]
    return [*asked, *said, *[message for pair in new for message in pair]]


def spend(web: Web, share: float, budget: int = BUDGET, session: str = "s") -> None:
    """Use a share of a session's budget."""
    headers = {
        "x-session-id": session,
        "x-session-budget-tokens": str(budget),
        "x-mock": f"tokens=9/{int(share * budget)}",
    }
    assert web.post(CHAT, {"model": "gpt-4o", "messages": [{"role": "user", "content": "go"}]}, headers).status == 200


def post(web: Web, api: Format, messages: list[Json], budget: int = BUDGET, **headers: str) -> Reply:
    headers = {"x-session-id": "s", "x-session-budget-tokens": str(budget), **headers}
    return web.post(api.path, api.body(messages), headers)


def results(api: Format, mock: MockProvider) -> dict[str, str]:
    """Return the tool results in the last call that reached the provider, by the id of their call.

    Old lines that a trim repeats at the end of a result are removed.
    """
    found: dict[str, str] = {}
    for element in api.sent(mock.calls[-1].body):
        if api.wire == "chat" and element["role"] == "tool":
            found[element["tool_call_id"]] = element["content"]
        elif element.get("type") == "function_call_output":
            found[element["call_id"]] = element["output"]
        elif api.wire == "messages" and isinstance(element["content"], list):
            parts: list[Any] = element["content"]
            found |= {part["tool_use_id"]: part["content"] for part in parts if part["type"] == "tool_result"}
    return {name: text.partition("\n\n[earlier in this conversation]")[0] for name, text in found.items()}


@pytest.fixture
def gateway(mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway) -> GatewayThread:
    del mock
    return gateway_server(mock_server.url, default_provider="upstream")


@WIRES
@pytest.mark.parametrize(("used", "mode"), [(0.82, "summary"), (0.91, "summary")])
def test_an_unread_result_is_sent_complete_while_an_older_one_is_shortened(
    gateway: GatewayThread, mock: MockProvider, wire: str, used: float, mode: str
) -> None:
    api = Format(wire)
    spend(gateway.web, used)
    reply = post(gateway.web, api, conversation(FITS))
    assert reply.status == 200, reply.body
    shown = results(api, mock)
    assert shown["call_n0"] == FITS
    assert HANDLE in shown["call_old"]
    assert reply.header("x-response-mode") == mode
    assert reply.header("x-context-trimmed") == "summary=1", "only the older result is shortened"


@WIRES
def test_a_result_too_long_for_the_budget_is_an_extract_relevant_to_the_question(
    gateway: GatewayThread, mock: MockProvider, wire: str
) -> None:
    api = Format(wire)
    spend(gateway.web, 0.82)
    reply = post(gateway.web, api, conversation(TOO_LONG))
    assert reply.status == 200, reply.body
    shown = results(api, mock)["call_n0"]
    assert all(line in shown for line in FUNCTION.splitlines())
    assert len(TOO_LONG) / 3 < len(shown) < len(TOO_LONG), "as much of it as fits"
    text, _, handle = shown.rpartition(HANDLE)
    assert text.splitlines()[-1] == f"[summary of {len(TOO_LONG):,} characters; "
    assert gateway.web.get(f"/api/results/{handle.rstrip(']')}").body.decode() == TOO_LONG
    assert "summary=1" in str(reply.header("x-context-trimmed"))
    assert int(str(reply.header("x-session-budget-remaining-tokens"))) >= 0


def test_results_of_several_calls_share_the_remaining_budget(gateway: GatewayThread, mock: MockProvider) -> None:
    api = Format("chat")
    spend(gateway.web, 0.82)
    both = [*conversation()[:-1], {"role": "user", "content": QUESTION}]
    calls = [called(name, path)["tool_calls"][0] for name, path in (("n0", "billing.py"), ("n1", "table.csv"))]
    rows = json.dumps([{"id": number, "name": f"customer {number}"} for number in range(900)])
    both += [{"role": "assistant", "content": None, "tool_calls": calls}]
    both += [answered("n0", TOO_LONG), answered("n1", rows)]
    reply = post(gateway.web, api, both)
    assert reply.status == 200, reply.body
    shown = results(api, mock)
    assert all(line in shown["call_n0"] for line in FUNCTION.splitlines())
    assert all(HANDLE in shown[name] for name in ("call_n0", "call_n1"))


@WIRES
@pytest.mark.parametrize("headers", [{}, {"x-context-budget": "3000"}], ids=["complete", "extract"])
def test_a_result_keeps_its_form_after_the_model_has_read_it(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, wire: str, headers: dict[str, str]
) -> None:
    api, text, budget = Format(wire), module(100) if headers else FITS, 400_000
    first = gateway_server(mock_server.url, default_provider="upstream")
    spend(first.web, 0.82, budget)
    messages = conversation(text)
    assert post(first.web, api, messages, budget, **headers).status == 200
    before = results(api, mock)["call_n0"]
    assert (before == text) is not bool(headers)
    # The remaining budget is smaller now, but the mode is unchanged, and another worker sends the same text.
    first.stop()
    second = gateway_server(mock_server.url, folder=first.folder, default_provider="upstream")
    messages += [{"role": "assistant", "content": "The sum."}, {"role": "user", "content": "Thanks!"}]
    assert post(second.web, api, messages, budget).header("x-response-mode") == "summary"
    assert results(api, mock)["call_n0"] == before
    # In the next mode, the result is shortened like any other.
    spend(second.web, 0.14, budget)
    assert post(second.web, api, messages, budget).header("x-response-mode") == "handle_only"
    assert len(results(api, mock)["call_n0"]) < len(before) / 4


def test_a_result_read_before_the_mode_started_is_shortened(gateway: GatewayThread, mock: MockProvider) -> None:
    api = Format("chat")
    messages = conversation(FITS)
    assert post(gateway.web, api, messages).header("x-response-mode") == "raw"
    assert results(api, mock)["call_n0"] == FITS
    spend(gateway.web, 0.73)
    messages += [{"role": "assistant", "content": "It returns the sum."}, {"role": "user", "content": "Thanks!"}]
    assert post(gateway.web, api, messages).header("x-response-mode") == "summary"
    assert all(HANDLE in text for text in results(api, mock).values())


@pytest.mark.parametrize("asked", ["summary", "handle_only"])
@pytest.mark.parametrize("used", [0.0, 0.82])
def test_a_mode_requested_by_the_client_applies_to_unread_results(
    gateway: GatewayThread, mock: MockProvider, asked: str, used: float
) -> None:
    api = Format("chat")
    spend(gateway.web, used)
    reply = post(gateway.web, api, conversation(FITS), BUDGET, **{"x-response-mode": asked})
    assert reply.header("x-response-mode") == asked
    assert reply.header("x-context-trimmed") == f"{asked}=2"
    assert all(HANDLE in text for text in results(api, mock).values())


def test_unread_rows_become_a_complete_table(gateway: GatewayThread, mock: MockProvider) -> None:
    api = Format("chat")
    spend(gateway.web, 0.82)
    rows = json.dumps([{"id": number, "name": f"customer {number}", "state": "open"} for number in range(80)])
    reply = post(gateway.web, api, conversation(rows))
    shown = results(api, mock)["call_n0"]
    assert shown.startswith("[JSON list as a table, 80 rows, nothing left out")
    assert all(f"{number}|customer {number}|open" in shown for number in range(80))
    assert reply.header("x-context-trimmed") == "summary=1,table=1"


def test_nothing_is_extracted_if_the_full_text_cannot_be_stored(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"sessions.results_max_mb": 0})
    spend(gateway.web, 0.82)
    calls = len(mock.calls)
    reply = post(gateway.web, Format("chat"), conversation(TOO_LONG))
    assert reply.error["code"] == "budget_exhausted"
    assert len(mock.calls) == calls


def test_an_unread_result_too_large_for_the_context_budget_becomes_an_extract(
    gateway: GatewayThread, mock: MockProvider
) -> None:
    api = Format("chat")
    spend(gateway.web, 0.82)
    reply = post(gateway.web, api, conversation(FITS), BUDGET, **{"x-context-budget": "1200"})
    assert reply.status == 200, reply.body
    shown = results(api, mock)["call_n0"]
    assert all(line in shown for line in FUNCTION.splitlines())
    assert len(shown) < len(FITS) / 2


def test_thinking_bound_to_a_result_stays_valid_when_the_budget_runs_low(
    gateway: GatewayThread, mock: MockProvider
) -> None:
    mock.claude = CLAUDE_RULES
    headers = {"x-session-id": "bound", "x-session-budget-tokens": "200000"}
    try:
        session = play(gateway.base_url, mock, 24, headers=headers)
    finally:
        mock.claude = ()
    modes = {found["x-response-mode"] for found in session.headers if "x-response-mode" in found}
    assert "summary" in modes
    assert not [call for call in mock.calls if call.status == 400], "the provider refused no thinking"
