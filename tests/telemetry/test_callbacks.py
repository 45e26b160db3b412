"""Test the events that the user's own observers and webhooks receive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, cast

import pytest

from gateway.core.errors import ConfigError
from gateway.core.ledger.arithmetic import AccountKey, Amount
from gateway.core.ledger.refusals import Allowance
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ledger.thresholds import BudgetAlert
from gateway.core.record import PENDING, CallRecord
from gateway.core.steps import StepChange
from gateway.core.usage import Charge, Totals, Usage
from gateway.telemetry import callbacks
from gateway.telemetry.callbacks import CallbackObserver, Shapes
from gateway.telemetry.webhooks import WebhookSender
from tests.support.timing import LIMIT_S

CALL = CallRecord(
    call_id="01", request_id="mine", session=SessionKey("alice", "s"), derived_session=False, started_at=1.0,
    dialect="chat", operation="chat", provider="openai", model="gpt-5", response_model=None, stream=True, status=200,
    outcome="ok", error_code=None, finish_reason="stop", tools=(),
    charge=Charge(Usage.of(10, 5), "provider", Decimal("0.25")), overhead_s=0.0, first_byte_s=0.3, duration_s=3.0,
    request_bytes=1, response_bytes=1,
)  # fmt: skip
TOTALS = Totals(calls=2, input_tokens=20, output_tokens=10, total_tokens=30, cost_usd=Decimal("0.5"))
LEFT = Allowance(1_000, 970, "5.000000", "4.500000", warning=0.9)
CHANGE = StepChange(SessionKey("alice", "s"), "writer", "draft", "review", 1, ("search",), 1_795_000_000.5)


def call_shape(call: CallRecord) -> dict[str, Any]:
    fields = ("call_id", "request_id", "provider", "model", "outcome")
    shown = {name: getattr(call, name) for name in fields}
    return {**shown, "session": "alice/s", "usage": "…", "usage_source": "provider", "cost_usd": "0.250000"}


SHAPES = Shapes(
    call_shape, lambda key: f"{key.namespace}/{key.id}", lambda totals: {"total_tokens": totals.total_tokens}
)


@dataclass
class All:
    """An observer that records all events."""

    heard: list[tuple[str, Any]] = field(default_factory=list)

    def on_usage(self, event: Mapping[str, Any]) -> None:
        self.heard.append(("on_usage", event))

    def on_finish(self, event: Mapping[str, Any]) -> None:
        self.heard.append(("on_finish", event))

    def on_step(self, event: Mapping[str, Any]) -> None:
        self.heard.append(("on_step", event))


class StepsOnly:
    def __init__(self) -> None:
        self.steps = 0

    def on_step(self, event: Mapping[str, Any]) -> None:
        self.steps += 1


class Broken:
    def on_finish(self, event: Mapping[str, Any]) -> None:
        raise RuntimeError("a bug of the user's")


class Leaving:
    def on_finish(self, event: Mapping[str, Any]) -> None:
        raise SystemExit(3)


class Unwilling:
    def __init__(self) -> None:
        raise SystemExit(3)

    def on_finish(self, event: Mapping[str, Any]) -> None:
        pass


class Silent:
    pass


class Asynchronous:
    async def on_finish(self, event: Mapping[str, Any]) -> None:
        pass


class Needy:
    def __init__(self, needed: str) -> None:
        self.needed = needed


AN_OBJECT = All()


@dataclass
class Queue:
    """A webhook that records its events."""

    events: frozenset[str]
    put_in: list[tuple[str, Any]] = field(default_factory=list)
    format: str = "event"
    name: str = "queue"

    def put(self, message_id: str, body: bytes) -> None:
        self.put_in.append((message_id, json.loads(body)))

    async def offer(self, message_id: str, body: bytes) -> bool:
        self.put(message_id, body)
        return True


def told(*observers: object, webhooks: list[Queue] | None = None) -> CallbackObserver:
    return CallbackObserver(observers, cast("list[WebhookSender]", webhooks or []), SHAPES)


ALERT = BudgetAlert("budget_1", 1.0, AccountKey("session", "alice", "s"), 80, "tokens", Amount(90), (100, None, None))


class BudgetsOnly:
    def __init__(self) -> None:
        self.heard: list[Mapping[str, Any]] = []

    def on_budget(self, event: Mapping[str, Any]) -> None:
        self.heard.append(event)
        raise RuntimeError("a bug of the user's")


async def test_budget_alert_is_passed_to_its_observers_and_webhooks_only() -> None:
    one, wanted, other = BudgetsOnly(), Queue(frozenset({"on_budget"})), Queue(frozenset({"on_finish"}))
    made = told(one, All(), webhooks=[wanted, other])
    receivers = made.alert_receivers()
    assert [receiver.name for receiver in receivers] == ["queue", "observers"]
    assert [await receiver.accept(ALERT) for receiver in receivers] == [True, True]
    [event] = one.heard
    assert (event["account"], event["name"], event["threshold"], event["used_fraction"]) == (
        "session",
        "alice/s",
        80,
        0.9,
    )
    [(message_id, body)] = wanted.put_in
    assert (message_id, body["type"], body["data"]) == ("budget_1", "on_budget", event)
    assert other.put_in == []


def test_nothing_receives_alerts_unless_it_is_configured() -> None:
    assert told(All(), webhooks=[Queue(frozenset({"on_finish"}))]).alert_receivers() == []


def test_event_is_written_in_the_format_of_each_webhook() -> None:
    hooks = [Queue(frozenset({"on_step"}), format=form) for form in ("event", "slack")]
    told(webhooks=hooks).stepped(CHANGE)
    first, second = (hook.put_in[0][1] for hook in hooks)
    assert first["type"] == "on_step"
    assert second == {"text": "Session alice/s moved from step draft to review (index 1)."}


def test_charged_call_sends_usage_and_finish_events() -> None:
    one = All()
    told(one).record(CALL, TOTALS, LEFT)
    assert one.heard == [
        (
            "on_usage",
            {
                "call_id": "01",
                "request_id": "mine",
                "session": "alice/s",
                "provider": "openai",
                "model": "gpt-5",
                "usage": "…",
                "usage_source": "provider",
                "cost_usd": "0.250000",
                "totals": {"total_tokens": 30},
                "total_cost_usd": "0.500000",
                "budget": {
                    "limit_tokens": 1_000,
                    "remaining_tokens": 970,
                    "limit_usd": "5.000000",
                    "remaining_usd": "4.500000",
                },
            },
        ),
        ("on_finish", call_shape(CALL)),
    ]


def test_unknown_values_are_null() -> None:
    one = All()
    told(one).record(CALL, replace(TOTALS, unpriced_calls=1), None)
    told(one).record(replace(CALL, session=None), None, None)
    (_, unpriced), _, (_, alone), _ = one.heard
    assert (unpriced["total_cost_usd"], unpriced["budget"]) == (None, None)
    assert (alone["totals"], alone["total_cost_usd"]) == (None, None)


def test_uncharged_call_sends_only_a_finish_event() -> None:
    one = All()
    told(one).record(replace(CALL, charge=None, outcome="refused"), None, None)
    assert [name for name, _ in one.heard] == ["on_finish"]


def test_step_change_is_sent_to_its_listeners() -> None:
    one, other = All(), StepsOnly()
    both = told(one, other)
    both.stepped(CHANGE)
    both.record(CALL, TOTALS)
    assert one.heard[0] == (
        "on_step",
        {
            "session": "alice/s",
            "agent": "writer",
            "step_before": "draft",
            "step": "review",
            "index": 1,
            "tools": ("search",),
            "at": "2026-11-18T11:06:40.500Z",
        },
    )
    assert other.steps == 1


def test_events_without_listeners_are_not_built() -> None:
    def fails(_: object) -> Any:
        raise AssertionError("nobody wants this")

    quiet = CallbackObserver([StepsOnly()], [], Shapes(fails, fails, fails))
    quiet.record(CALL, TOTALS, LEFT)
    CallbackObserver([], [], Shapes(fails, fails, fails)).stepped(CHANGE)


@pytest.mark.parametrize("observer", [Broken(), Leaving()], ids=["fails", "exits"])
def test_exception_in_one_observer_is_logged_and_others_are_called(
    observer: object, heard: pytest.LogCaptureFixture
) -> None:
    one, queue = All(), Queue(frozenset({"on_finish"}))
    told(observer, one, webhooks=[queue]).record(CALL, TOTALS, LEFT)
    assert [name for name, _ in one.heard] == ["on_usage", "on_finish"]
    assert len(queue.put_in) == 1
    [line] = [record for record in heard.records if record.name == "gateway"]
    assert line.getMessage() == f"callbacks.observers: {type(observer).__name__}.on_finish failed"
    assert line.exc_info is not None


def test_pending_call_and_its_end_have_different_event_ids() -> None:
    queue = Queue(frozenset(callbacks.EVENTS))
    observer = told(webhooks=[queue])
    observer.record(replace(CALL, outcome=PENDING, charge=None), TOTALS, LEFT)
    observer.record(CALL, TOTALS, LEFT)
    assert [message_id for message_id, _ in queue.put_in] == ["pending_01", "usage_01", "finish_01"]


def test_webhook_gets_its_events_with_unique_ids() -> None:
    all_of_them, usage = Queue(frozenset(callbacks.EVENTS)), Queue(frozenset({"on_usage"}))
    both = told(webhooks=[all_of_them, usage])
    both.record(CALL, TOTALS, LEFT)
    both.stepped(CHANGE)
    both.stepped(CHANGE)
    assert [message["type"] for _, message in all_of_them.put_in] == ["on_usage", "on_finish", "on_step", "on_step"]
    ids = [message_id for message_id, _ in all_of_them.put_in]
    assert ids[:2] == ["usage_01", "finish_01"]
    assert len(set(ids)) == 4
    assert not any("." in one for one in ids)  # what is signed has dots between its parts
    [(_, message)] = usage.put_in
    assert set(message) == {"type", "timestamp", "data"}
    assert message["data"]["totals"] == {"total_tokens": 30}


def test_observer_class_is_instantiated_and_object_is_used_directly() -> None:
    here = __name__
    one, other, again = callbacks.load_observers([f"{here}.All", f"{here}.AN_OBJECT", f"{here}:All"])
    assert type(one).__name__ == "All"
    assert type(again) is type(one)
    assert again is not one
    assert getattr(other, "heard", None) == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Silent", "has none of on_usage, on_finish, on_step"),
        ("Asynchronous", "has methods that are not plain functions: they are called without await"),
        ("Needy", "cannot be loaded: TypeError: "),
        ("Unwilling", "cannot be loaded: SystemExit: 3"),
        ("Missing", "cannot be loaded: AttributeError: "),
    ],
)
def test_unusable_observer_is_a_configuration_error(name: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        callbacks.load_observers([f"{__name__}.All", f"{__name__}.{name}", "no.such.module"])
    first, second = error.value.problems
    assert first.startswith(f"callbacks.observers[1]: {__name__}.{name} {problem}")
    assert second.startswith("callbacks.observers[2]: no.such.module cannot be loaded: ModuleNotFoundError: ")


async def test_closing_works_without_webhooks() -> None:
    async with asyncio.timeout(LIMIT_S):
        await told(All()).aclose()
