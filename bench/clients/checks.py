"""Shared code of the Python scripts: the gateway's address, the report of a check, and the audit of totals.

Standard library only: each script runs in an environment that has its client and nothing of the gateway.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from typing import Any, NamedTuple

#: set by run.py
GATEWAY = os.environ.get("GATEWAY_URL", "http://127.0.0.1:8484")
PROVIDER = os.environ.get("PROVIDER_URL", "http://127.0.0.1:9100")
KEY = os.environ.get("GATEWAY_KEY", "none")
#: a client key that can be used once per minute
ONCE_KEY = os.environ.get("GATEWAY_ONCE_KEY", "none")
ADMIN_KEY = os.environ.get("GATEWAY_ADMIN_KEY", "none")
WRONG_KEY = "not-a-key-of-this-gateway"

MODEL = "mock-small"
#: The client key may not use the first model, so the gateway returns 404. The provider does not have the second, and
#: returns 404 itself.
FORBIDDEN_MODEL, MISSING_MODEL = "forbidden-model", "missing-model"
TOTALS = "x-session-cumulative-token-usage"
#: for the built-in provider: a stream that takes two seconds; faults come without delay
SLOW = {"x-mock": "chunks=40;interval=0.05"}
SLOW_CHUNKS = 40
NO_BUDGET = {"x-session-budget-tokens": "1"}
_WITHIN_S = 20.0

WEATHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def fault(status: int) -> dict[str, str]:
    """Return the header that makes the built-in provider respond with this status."""
    return {"x-mock": f"status={status}"}


class Tokens(NamedTuple):
    """Input and output tokens."""

    input: int
    output: int


class Audit(NamedTuple):
    """The settled tokens of all sessions, the tokens that the provider billed, and the number of holds."""

    settled: Tokens
    billed: Tokens
    held: int

    @property
    def even(self) -> bool:
        return self.settled == self.billed and self.held == 0

    def __str__(self) -> str:
        return (
            f"settled {self.settled.input}+{self.settled.output}, "
            f"billed {self.billed.input}+{self.billed.output}, held {self.held}"
        )


def get(url: str, key: str = "") -> Any:
    """Return the JSON at an address."""
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(request, timeout=_WITHIN_S) as answer:
        return json.load(answer)


def sessions() -> list[dict[str, Any]]:
    """Return all sessions of the gateway."""
    found: list[dict[str, Any]] = get(f"{GATEWAY}/api/sessions?limit=1000", ADMIN_KEY)["sessions"]
    return found


def audit() -> Audit:
    """Return the present state."""
    listed = sessions()
    used = [session["cumulative_token_usage"] for session in listed]
    settled = Tokens(sum(one["input_tokens"] for one in used), sum(one["output_tokens"] for one in used))
    bill = get(f"{PROVIDER}/__mock/billed")["total"]
    held = sum((session["budget"] or {}).get("held") or 0 for session in listed)
    return Audit(settled, Tokens(bill["input_tokens"], bill["output_tokens"]), held)


def settled() -> Audit:
    """Return the state once the totals are equal and nothing is held; fail if that does not happen."""
    deadline = time.monotonic() + _WITHIN_S
    while not (found := audit()).even:
        assert time.monotonic() < deadline, str(found)
        time.sleep(0.05)
    return found


def check_totals(text: object) -> None:
    """Check that a header has the totals of a session."""
    assert isinstance(text, str), f"no {TOTALS}"
    shown = json.loads(text)
    assert shown["totalTokens"] == shown["promptTokens"] + shown["completionTokens"] > 0, text


def failure(call: Callable[[], Any], kind: type[BaseException]) -> Any:
    """Return the exception that a call raises; it must be of this class or a subclass."""
    try:
        result = call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} but {result!r}")


def run(*checks: Callable[[], Any]) -> None:
    """Run each check, sync or async, and report a line for it; the exit code is 1 if one failed.

    A check is named by its function: `chat_stream` is "chat stream".
    """
    failed = False
    for check in checks:
        try:
            result = check()
            if inspect.iscoroutine(result):
                asyncio.run(result)
        except Exception as error:  # noqa: BLE001  # noqa: BLE001  # any exception of a client is a failed check
            traceback.print_exc()
            failed = True
            _report(check.__name__, error)
        else:
            _report(check.__name__)
    sys.exit(1 if failed else 0)


def _report(name: str, error: Exception | None = None) -> None:
    line: dict[str, object] = {"check": name.removeprefix("_").replace("_", " "), "ok": error is None}
    if error is not None:
        line["why"] = f"{type(error).__name__}: {error}"
    print(json.dumps(line), flush=True)
