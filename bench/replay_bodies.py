"""Replay recorded chat requests through the gateway, and check that the provider receives the same bytes.

    python bench/replay_bodies.py FILE.jsonl

Each line holds the body of a chat request, or an object with that body under "request". Lines whose "wire" is another
API than "openai_chat" are skipped. Every body is sent three times, in three spellings of JSON, to a gateway in front of
the built-in provider, and compared there by its hash. One change is intended: the gateway adds include_usage to a
stream that does not request its usage. The check verifies that it is the only change. The exit code is 1 if anything
else differs, a call fails, or the session's total is not what the provider counted.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gateway import config
from gateway.app.worker import build_app
from gateway.cli.serve import only_provider
from gateway.mock.provider import RecordedCall
from gateway.mock.server import MockServer
from gateway.server.serving import ServerThread, make_config

SESSION = "replay"
#: arguments of json.dumps
SPELLINGS: dict[str, dict[str, Any]] = {
    "compact": {"separators": (",", ":"), "ensure_ascii": False},
    "spaced": {"ensure_ascii": False},
    "ascii": {"ensure_ascii": True},
}


def requests_of(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, body) of every chat request."""
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            row = json.loads(line) if line.strip() else {}
            if row.get("wire", "openai_chat") != "openai_chat":
                continue
            body = row["request"] if isinstance(row.get("request"), dict) else row
            if "messages" in body:
                yield number, {**body, "model": body.get("model") or row.get("model") or "mock-small"}


def asks_for_usage(body: dict[str, Any]) -> bool:
    return bool((body.get("stream_options") or {}).get("include_usage"))


def only_asks_for_usage(sent: bytes, received: bytes) -> bool:
    """Return True if the only difference is stream_options.include_usage, set on a stream that lacks it.

    Everything else has to be in the same order, with numbers in the same spelling. Only the space between the outermost
    keys may differ.
    """
    before, after = (json.loads(body, parse_float=str, parse_int=str) for body in (sent, received))
    if not before.get("stream") or asks_for_usage(before) or not asks_for_usage(after):
        return False
    for body in (before, after):
        options = body.pop("stream_options", None) or {}
        options.pop("include_usage", None)
        body["other stream_options"] = options
    return json.dumps(before) == json.dumps(after)


class Replay:
    """Send bodies and count the results."""

    def __init__(self, gateway: str, provider: MockServer) -> None:
        self._connection = http.client.HTTPConnection(gateway.removeprefix("http://"), timeout=60)
        self._provider = provider.provider
        self.counts = Counter[str]()

    def send(self, line: int, spelling: str, body: bytes) -> None:
        headers = {"content-type": "application/json", "x-session-id": SESSION}
        self._connection.request("POST", "/v1/chat/completions", body, headers)
        answer = self._connection.getresponse()
        content = answer.read()
        self.counts["sent"] += 1
        if answer.status != http.HTTPStatus.OK:
            self.counts["errors"] += 1
            print(f"line {line}, {spelling}: {answer.status} {content[:300]!r}", file=sys.stderr)
            return
        outcome = self._compare(body, self._provider.calls[-1])
        self.counts[outcome] += 1
        if outcome == "changed":
            print(f"line {line}, {spelling}: the provider received another body", file=sys.stderr)

    def _compare(self, body: bytes, received: RecordedCall) -> str:
        if received.body_sha256 == hashlib.sha256(body).hexdigest():
            return "untouched"
        return "usage asked for" if only_asks_for_usage(body, received.body) else "changed"

    def total(self) -> int:
        """Return the session's tokens, as the gateway reports them."""
        self._connection.request("GET", f"/api/sessions/{SESSION}")
        tokens: int = json.loads(self._connection.getresponse().read())["cumulative_token_usage"]["total_tokens"]
        return tokens


def replay(file: Path) -> bool:
    started = time.monotonic()
    requests = 0
    with MockServer() as provider:
        settings = only_provider("mock", provider.url, auth="none")
        flags = {**settings, "store.url": "memory://", "telemetry.log.level": "error"}
        app = build_app(lambda: config.load(environment={}, flags=flags, search=False))
        with ServerThread(
            make_config(app, max_head_bytes=65536, max_body=2**26, head_timeout_s=20, grace_s=1)
        ) as gateway:
            run = Replay(gateway.url, provider)
            for line, body in requests_of(file):
                requests += 1
                for spelling, arguments in SPELLINGS.items():
                    run.send(line, spelling, json.dumps(body, **arguments).encode())
            total = run.total() if requests else 0
        billed = provider.provider.billed()
    counts = run.counts
    print(f"{requests:,} requests, {counts['sent']:,} bodies sent in {time.monotonic() - started:.1f} s")
    print(f"  {counts['untouched']:>6,} received byte for byte")
    print(f"  {counts['usage asked for']:>6,} received with stream_options.include_usage added, and nothing else")
    print(f"  {counts['changed']:>6,} received otherwise changed")
    print(f"  {counts['errors']:>6,} failed")
    print(f"session total {total:,} tokens, the provider's own count {billed.total_tokens:,} in {billed.calls:,} calls")
    return not counts["changed"] and not counts["errors"] and total == billed.total_tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE.jsonl")
    return 0 if replay(parser.parse_args().file) else 1


if __name__ == "__main__":
    sys.exit(main())
