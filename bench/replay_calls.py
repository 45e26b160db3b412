"""Replay recorded calls through the gateway: compare requests, responses and totals with the recordings.

    python bench/replay_calls.py FILE_OR_FOLDER ...

Reads the cassettes in which test suites store real calls to providers: YAML or JSON of vcrpy, VCR (Ruby) and go-vcr.
Each recorded POST to one of the five model paths is made again, in its own session, to a gateway in front of a server
that sends the recorded responses. Streams are split into chunks of random sizes, the same ones on each run. A
background response is fetched as often as in the recording. The script compares the request that arrives, the responses
that come back, and the session's tokens with the `usage` in the last response.

Two changes are intended: the gateway requests the usage of a stream that does not, and removes it again; and it adds
the session's totals in a comment before the end of a stream. The exit code is 1 if anything else differs.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import http.client
import json
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from replay_bodies import only_asks_for_usage

from gateway import config
from gateway.app.worker import build_app
from gateway.cli.serve import only_provider
from gateway.server.serving import ServerThread, make_config

PATHS = ("chat/completions", "completions", "embeddings", "responses", "messages")
SUFFIXES = {".yaml", ".yml", ".json"}
#: header with the id of the call, for the server that responds to it
MARK = "x-recorded-call"
#: the comment that the gateway adds before the end of a stream
COMMENT = re.compile(rb"(?m)(?:^: x-[^\n]*\n)+\n")
OK = http.client.OK


@dataclass(frozen=True)
class Recorded:
    """A call in a cassette. `tokens`: (input, output) as reported, None if they were not.

    `fetched`: the path of a background response, and its body each time it was fetched.
    """

    id: str
    source: str
    path: str
    body: bytes
    status: int
    answer: bytes
    is_stream: bool
    tokens: tuple[int | None, int | None]
    fetched: tuple[tuple[str, bytes], ...] = ()


# --- cassettes --------------------------------------------------------------------------------------------------------


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A YAML loader that ignores the class names of Python and Ruby; the values are used unchanged."""


def _plain(loader: Any, _suffix: str, node: Any) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    return loader.construct_sequence(node) if isinstance(node, yaml.SequenceNode) else loader.construct_scalar(node)


Loader.add_multi_constructor("!ruby", _plain)
Loader.add_multi_constructor("tag:yaml.org,2002:python", _plain)


def recorded_in(paths: list[Path]) -> Iterator[Recorded]:
    """Yield every call of every cassette once."""
    seen = set[str]()
    for path in paths:
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
        for file in files:
            interactions = interactions_of(file)
            for interaction in interactions:
                call = read(interaction, str(file))
                if call is not None and call.id not in seen:
                    seen.add(call.id)
                    yield with_what_was_fetched(call, interactions)


def interactions_of(file: Path) -> list[Any]:
    try:
        text = file.read_bytes()
        loaded = json.loads(text) if file.suffix == ".json" else yaml.load(text, Loader)
    except (OSError, ValueError, yaml.YAMLError):
        return []
    found = loaded.get("interactions", loaded.get("http_interactions")) if isinstance(loaded, dict) else None
    return found if isinstance(found, list) else []


def read(interaction: Any, source: str) -> Recorded | None:
    """Return a call to a model whose response was stored unchanged; None for any other."""
    if not isinstance(interaction, dict):
        return None
    asked, response = interaction.get("request"), interaction.get("response")
    if not isinstance(asked, dict) or not isinstance(response, dict) or str(asked.get("method")).upper() != "POST":
        return None
    path = urlsplit(str(asked.get("uri") or asked.get("url") or "")).path
    known = next((known for known in PATHS if path.endswith(f"/{known}")), None)
    status = response.get("status", response.get("status_code", response.get("code")))
    status = status.get("code") if isinstance(status, dict) else status
    body, answer = (bytes_of(side.get("body", side.get("parsed_body"))) for side in (asked, response))
    fields = json_of(body)
    if known is None or not isinstance(status, int) or not answer or not fields or "model" not in fields:
        return None
    is_stream = answer.lstrip().startswith((b"data:", b"event:", b": "))
    if is_stream != (fields.get("stream") is True) and status == OK:
        return None  # the client's own form of the response
    call_id = blake2b(body + b"\0" + answer, digest_size=12).hexdigest()
    return Recorded(call_id, source, known, body, status, answer, is_stream, reported(answer, is_stream=is_stream))


def with_what_was_fetched(call: Recorded, interactions: list[Any]) -> Recorded:
    """Return a background call with the responses of its fetches."""
    answer = json_of(call.answer)
    if call.path != "responses" or answer.get("status") not in {"queued", "in_progress"}:
        return call
    found = []
    for interaction in interactions:
        asked, response = interaction["request"], interaction["response"]
        where = urlsplit(str(asked.get("uri") or asked.get("url") or ""))
        if str(asked.get("method")).upper() == "GET" and where.path.endswith(f"/responses/{answer['id']}"):
            path = f"responses/{answer['id']}?{where.query}".removesuffix("?")
            found.append((path, bytes_of(response.get("body", response.get("parsed_body")))))
    tokens = reported(found[-1][1], is_stream=False) if found else call.tokens
    return replace(call, fetched=tuple(found), tokens=tokens)


def bytes_of(body: Any) -> bytes:
    """Return a body from the forms of the three kinds of cassettes."""
    if isinstance(body, dict) and ("string" in body or "base64_string" in body):
        compressed = body.get("base64_string")
        body = base64.b64decode(compressed) if compressed is not None else body["string"]
    if isinstance(body, bytes):
        return gzip.decompress(body) if body.startswith(b"\x1f\x8b") else body
    if isinstance(body, str):
        return body.encode("utf-8", "surrogatepass")
    return json.dumps(body, ensure_ascii=False).encode() if body is not None else b""


def json_of(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


# --- reported usage, read without code of the gateway --------------------------------------------------------------


def reported(answer: bytes, *, is_stream: bool) -> tuple[int | None, int | None]:
    """Return input and output tokens; in a stream the last value of each counts.

    Two values of an Anthropic stream are ignored: an input of 0 at its end, and the output at its start.
    """
    if not is_stream:
        return sides(json_of(answer).get("usage"))
    tokens: list[int | None] = [None, None]
    for line in answer.decode("utf-8", "replace").splitlines():
        event = json_of(line[5:].encode()) if line.startswith("data:") else {}
        holders = (event, event.get("response"), event.get("message"), event.get("x_groq"))
        for usage in [holder.get("usage") for holder in holders if isinstance(holder, dict)]:
            for place, number in enumerate(sides(usage)):
                is_late = place == 0 and event.get("type") == "message_delta" and not number
                is_early = place == 1 and event.get("type") == "message_start"
                if number is not None and not is_late and not is_early:
                    tokens[place] = number
    return tokens[0], tokens[1]


def without_usage(stream: bytes) -> bytes:
    """Return a chat stream without the chunk that has only the usage, which its client did not request."""
    events = re.split(rb"(?<=\n\n)", stream)
    return b"".join(event for event in events if not _is_usage(json_of(event.removeprefix(b"data:"))))


def _is_usage(chunk: dict[str, Any]) -> bool:
    return chunk.get("choices") == [] and isinstance(chunk.get("usage"), dict)


def sides(usage: Any) -> tuple[int | None, int | None]:
    if not isinstance(usage, dict):
        return None, None
    passes = usage.get("iterations")
    if isinstance(passes, list) and passes:
        each = [sides(one) for one in passes]
        return sum(one[0] or 0 for one in each), sum(one[1] or 0 for one in each)
    given, made = usage.get("prompt_tokens", usage.get("input_tokens")), usage.get("completion_tokens")
    if given is not None and "prompt_tokens" not in usage:
        given += sum(usage.get(f"cache_{name}_input_tokens") or 0 for name in ("read", "creation"))
    return given, made if made is not None else usage.get("output_tokens")


# --- the run ----------------------------------------------------------------------------------------------------------


class Replay:
    """Respond with the recordings, and store the requests."""

    def __init__(self) -> None:
        self.calls: dict[str, Recorded] = {}
        self.received: dict[str, list[tuple[str, bytes]]] = {}
        self.counts = Counter[str]()

    @contextmanager
    def serving(self) -> Iterator[str]:
        replay = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_: object) -> None:
                pass

            def do_POST(self) -> None:
                mark = self.headers[MARK]
                body = self.rfile.read(int(self.headers["content-length"]))
                replay.received.setdefault(mark, []).append((self.path, body))
                self.answer(replay.calls[mark])

            def do_GET(self) -> None:
                call = replay.calls[self.headers[MARK]]
                asked = replay.received.setdefault(f"fetched {call.id}", [])
                asked.append((self.path, b""))
                self.answer(replace(call, answer=call.fetched[len(asked) - 1][1], is_stream=False))

            def answer(self, call: Recorded) -> None:
                self.send_response(call.status)
                self.send_header("content-type", "text/event-stream" if call.is_stream else "application/json")
                if not call.is_stream:
                    self.send_header("content-length", str(len(call.answer)))
                    self.end_headers()
                    self.wfile.write(call.answer)
                    return
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                sizes, start = random.Random(call.id), 0
                while start < len(call.answer):
                    piece = call.answer[start : start + sizes.choice((1, 9, 100, 1000, 10_000))]
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                    start += len(piece)
                self.wfile.write(b"0\r\n\r\n")

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            server.server_close()

    def check(self, call: Recorded, connection: http.client.HTTPConnection) -> None:
        self.calls[call.id] = call
        headers = {"content-type": "application/json", "x-session-id": call.id, MARK: call.id}
        connection.request("POST", f"/v1/{call.path}", call.body, headers)
        response = connection.getresponse()
        status, answer = response.status, response.read()
        self.counts["calls"] += 1
        self.counts["streams"] += call.is_stream
        requests = self.received.pop(call.id, [])
        received = requests[0][1] if [path for path, _ in requests] == [f"/v1/{call.path}"] else None
        self.fetch(call, headers, connection)
        del self.calls[call.id]
        asked = received is not None and only_asks_for_usage(call.body, received)
        if received != call.body:
            how = f"{[path for path, _ in requests]}, {status} {answer[:300]!r}"
            self.note("usage asked for" if asked else "request", call, how, is_fault=not asked)
        plain = COMMENT.sub(b"", answer) if call.is_stream else answer
        if (status, plain) != (call.status, without_usage(call.answer) if asked else call.answer):
            self.note("answer", call, f"{status}, {len(answer)} bytes for {len(call.answer)}: {answer[-200:]!r}")
        connection.request("GET", f"/api/sessions/{call.id}")
        usage = json_of(connection.getresponse().read()).get("cumulative_token_usage", {})
        counted = usage.get("input_tokens", 0), usage.get("output_tokens", 0)
        if call.status != OK:
            self.counts["refused by the provider"] += 1
            call_tokens: tuple[int | None, int | None] = (0, 0)
        else:
            self.counts["reported"] += call.tokens != (None, None)
            call_tokens = call.tokens
        if any(said is not None and said != ours for said, ours in zip(call_tokens, counted, strict=True)):
            self.note("tokens", call, f"{counted} for {call_tokens}")

    def fetch(self, call: Recorded, headers: dict[str, str], connection: http.client.HTTPConnection) -> None:
        for path, answer in call.fetched:
            connection.request("GET", f"/v1/{path}", headers=headers)
            content = connection.getresponse().read()
            self.counts["fetched"] += 1
            if content != answer or self.received[f"fetched {call.id}"][-1][0] != f"/v1/{path}":
                self.note("answer", call, f"{path}: {content[-200:]!r}")

    def note(self, what: str, call: Recorded, how: str, *, is_fault: bool = True) -> None:
        self.counts[what] += 1
        if is_fault:
            print(f"{what} differs: {call.source} {call.path}: {how}", file=sys.stderr)


def replay(paths: list[Path]) -> bool:
    started, run = time.monotonic(), Replay()
    with run.serving() as url:
        only = only_provider("recorded", url, auth="none", retries=0, breaker={"failures": 1000})
        flags = {**only, "store.url": "memory://", "telemetry.log.level": "error", "context.trim": "off"}
        app = build_app(lambda: config.load(environment={}, flags=flags, search=False))
        serving = make_config(app, max_head_bytes=65536, max_body=2**26, head_timeout_s=20, grace_s=1)
        with ServerThread(serving) as gateway:
            connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=60)
            for call in recorded_in(paths):
                run.check(call, connection)
            connection.close()
    show(run.counts, time.monotonic() - started)
    return bool(run.counts["calls"]) and not any(run.counts[what] for what in ("request", "answer", "tokens"))


def show(counts: Counter[str], took_s: float) -> None:
    changed, asked = counts["request"], counts["usage asked for"]
    print(f"{counts['calls']:,} recorded calls, {counts['streams']:,} of them streams, in {took_s:.0f} s")
    print(f"{counts['calls'] - changed - asked:7,} requests received byte for byte")
    print(f"{asked:7,} received with include_usage added, and nothing else")
    print(f"{changed:7,} received otherwise changed, elsewhere, twice, or not at all")
    print(f"{counts['calls'] - counts['answer']:7,} answers returned byte for byte, but for the comment of a stream")
    print(f"{counts['answer']:7,} returned otherwise")
    print(f"{counts['fetched']:7,} times an answer made in the background was fetched")
    print(f"{counts['reported']:7,} answers reported their usage; {counts['refused by the provider']:,} were refusals")
    print(f"{counts['tokens']:7,} sessions with other tokens than were reported")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="+", metavar="FILE_OR_FOLDER")
    paths = parser.parse_args().paths
    if missing := [str(path) for path in paths if not path.exists()]:
        parser.error(f"there is no {', '.join(missing)}")
    return 0 if replay(paths) else 1


if __name__ == "__main__":
    sys.exit(main())
