"""What the Python scripts here share: where the gateway is, how a check is reported, and the audit of totals.

Standard library only: each script runs in an environment that holds its client and nothing of the gateway.
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
#: a client key that may be used once a minute
ONCE_KEY = os.environ.get("GATEWAY_ONCE_KEY", "none")
ADMIN_KEY = os.environ.get("GATEWAY_ADMIN_KEY", "none")
WRONG_KEY = "not-a-key-of-this-gateway"

MODEL = "mock-small"
#: the client key may not use it, so the gateway says 404; the provider does not have the other, and says so itself
FORBIDDEN_MODEL, MISSING_MODEL = "forbidden-model", "missing-model"
TOTALS = "x-session-cumulative-token-usage"
#: for the built-in provider: a stream that takes two seconds, and faults without any delay
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
    """The header that makes the built-in provider answer with this status."""
    return {"x-mock": f"status={status}"}


class Tokens(NamedTuple):
    """Input and output."""

    input: int
    output: int


class Audit(NamedTuple):
    """What the gateway has settled in all sessions beside what the provider billed, and what is still held."""

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
    """The JSON at an address."""
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(request, timeout=_WITHIN_S) as answer:
        return json.load(answer)


def sessions() -> list[dict[str, Any]]:
    """All sessions of the gateway."""
    found: list[dict[str, Any]] = get(f"{GATEWAY}/api/sessions?limit=1000", ADMIN_KEY)["sessions"]
    return found


def audit() -> Audit:
    """The present state."""
    listed = sessions()
    used = [session["cumulative_token_usage"] for session in listed]
    settled = Tokens(sum(one["input_tokens"] for one in used), sum(one["output_tokens"] for one in used))
    bill = get(f"{PROVIDER}/__mock/billed")["total"]
    held = sum((session["budget"] or {}).get("held") or 0 for session in listed)
    return Audit(settled, Tokens(bill["input_tokens"], bill["output_tokens"]), held)


def settled() -> Audit:
    """The state once the totals are even and nothing is held; fails where that does not come about."""
    deadline = time.monotonic() + _WITHIN_S
    while not (found := audit()).even:
        assert time.monotonic() < deadline, str(found)
        time.sleep(0.05)
    return found


def check_totals(text: object) -> None:
    """Whether a header has a session's totals in it."""
    assert isinstance(text, str), f"no {TOTALS}"
    shown = json.loads(text)
    assert shown["totalTokens"] == shown["promptTokens"] + shown["completionTokens"] > 0, text


def failure(call: Callable[[], Any], kind: type[BaseException]) -> Any:
    """What a call raises, which must be of exactly this class or one below it."""
    try:
        result = call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} but {result!r}")


def run(*checks: Callable[[], Any]) -> None:
    """Run each check, sync or async, and report a line for it; exit code 1 where one failed.

    A check is named by its function: `chat_stream` is "chat stream".
    """
    failed = False
    for check in checks:
        try:
            result = check()
            if inspect.iscoroutine(result):
                asyncio.run(result)
        except Exception as error:  # noqa: BLE001  # whatever a client raises is a failed check
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
