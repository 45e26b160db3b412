"""Make twenty calls to a real model through the gateway, and compare the totals with the usage reported by its server.

    python bench/real_model.py --base-url http://127.0.0.1:8199

Starts `gateway serve --upstream` with an empty SQLite store. A recorder between the gateway and the model's server
stores every response as the server sent it, so that its usage is known even if the client does not see it (a stream
without include_usage). The server must support chat, completions, messages and responses, as llama.cpp's does. The chat
calls need the openai SDK (`pip install '.[dev]'`). The exit code is 1 if any two counts differ.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import openai

SESSION = "real"
MODEL = "gemma-3-270m"
HEADERS = {"x-session-id": SESSION, "content-type": "application/json"}
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Wie heißt die Hauptstadt von Österreich?",
    "東京について一文で教えてください。",
    "Write a haiku about the sea.",
    "List the first five primes.",
)


class Tokens(NamedTuple):
    """Input and output tokens, as reported by the provider or as added up by the gateway."""

    input: int = 0
    output: int = 0

    def plus(self, other: Tokens) -> Tokens:
        return Tokens(self.input + other.input, self.output + other.output)

    def __str__(self) -> str:
        return f"{self.input:,}+{self.output:,}"


# --- the provider's reports --------------------------------------------------------------------------------------


class Recorder(ThreadingHTTPServer):
    """Forward every call to `provider` and store the bodies of its responses."""

    daemon_threads = True

    def __init__(self, provider: str) -> None:
        super().__init__(("127.0.0.1", 0), _Pass)
        self.provider = urlsplit(provider).netloc
        self.answers: list[bytes] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Pass(BaseHTTPRequestHandler):
    server: Recorder

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        connection = http.client.HTTPConnection(self.server.provider, timeout=300)
        connection.request("POST", self.path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        self.send_response(answer.status)
        self.send_header("content-type", answer.getheader("content-type") or "")
        self.end_headers()  # HTTP/1.0: the end of the connection is the end of the response
        self.server.answers.append(b"")
        while piece := answer.read1(65536):
            self.server.answers[-1] += piece
            self.wfile.write(piece)
        connection.close()


def reported(answer: bytes) -> Tokens:
    """Return the usage in a response of any of the four APIs, whole or streamed; the last value of each kind counts."""
    text = answer.decode()
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")] or [text]
    found = Tokens()
    for event in map(json.loads, lines):
        for usage in (event.get("usage"), *((event.get(part) or {}).get("usage") for part in ("message", "response"))):
            if usage:
                found = Tokens(_input(usage) or found.input, usage.get("completion_tokens", usage.get("output_tokens")))
    return found


def _input(usage: dict[str, Any]) -> int:
    apart = (
        "cache_read_input_tokens",
        "cache_creation_input_tokens",
    )  # Anthropic: not in input_tokens
    return sum(usage.get(name) or 0 for name in ("prompt_tokens", "input_tokens", *apart))


# --- the gateway's totals ----------------------------------------------------------------------------------------


def shown(header: str | None) -> Tokens:
    usage = json.loads(header or "{}")
    return Tokens(usage.get("promptTokens", -1), usage.get("completionTokens", -1))


def stored(session: dict[str, Any]) -> Tokens:
    usage = session["cumulative_token_usage"]
    return Tokens(usage["input_tokens"], usage["output_tokens"])


@contextlib.contextmanager
def gateway(upstream: str, store: str) -> Iterator[str]:
    """Yield the address of a running gateway."""
    command = [sys.executable, "-m", "gateway", "serve", "--port", "0", "--upstream", upstream, "--store", store]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        # The gateway must not block on a full pipe of its log.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        try:
            if "http://" not in first:
                sys.exit(f"the gateway did not start: {first}")
            yield "http://" + first.split("http://")[1].split()[0]
        finally:
            process.terminate()
            process.wait(60)


# --- the calls --------------------------------------------------------------------------------------------------


class Made(NamedTuple):
    """A call: its kind, and the session's total that the gateway returned with it."""

    name: str
    total: Tokens
    before: bool  # the headers of a stream are sent before its usage is known


def chat(client: openai.OpenAI, question: str, *, stream: bool, ask: bool = False) -> Made:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if ask else {}
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        max_tokens=24,
        temperature=0,
        stream=stream,
        **options,
    )
    total = shown(answer.headers.get("x-session-cumulative-token-usage"))
    if not stream:
        answer.parse()
        return Made("chat", total, before=False)
    chunks: list[Any] = list(answer.parse())
    with_usage = [chunk for chunk in chunks if chunk.usage is not None]
    if len(with_usage) != int(ask):
        sys.exit(f"{len(with_usage)} chunks with usage reached a client that asked for {int(ask)}")
    return Made("chat, stream, include_usage" if ask else "chat, stream", total, before=True)


def raw(url: str, api: str, body: dict[str, Any], *, stream: bool) -> Made:
    """Make a call as curl would; the total of a stream is in the comment at its end."""
    data = json.dumps({"model": MODEL, "stream": stream, **body}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/{api}", data, HEADERS), timeout=300) as answer:
        text = answer.read().decode()
        header = answer.headers["x-session-cumulative-token-usage"]
    if not stream:
        return Made(api, shown(header), before=False)
    mark = ": x-session-cumulative-token-usage: "
    comments = [line.removeprefix(mark) for line in text.splitlines() if line.startswith(mark)]
    return Made(f"{api}, stream", shown(comments[-1] if comments else None), before=False)


def calls(client: openai.OpenAI, url: str) -> Iterator[Made]:
    for question in QUESTIONS[:5]:
        yield chat(client, question, stream=False)
    for question in QUESTIONS[:4]:
        yield chat(client, question, stream=True, ask=True)
        yield chat(client, question, stream=True)
    for stream in (False, True):
        yield raw(url, "completions", {"prompt": "The capital of France is", "max_tokens": 12}, stream=stream)
        message = [{"role": "user", "content": QUESTIONS[0]}]
        yield raw(url, "messages", {"messages": message, "max_tokens": 12}, stream=stream)
        yield raw(url, "responses", {"input": QUESTIONS[0], "max_output_tokens": 12}, stream=stream)
    yield chat(client, QUESTIONS[5], stream=False)


def play(provider: str, folder: Path) -> bool:
    store = f"sqlite://{folder / 'real.db'}"
    recorder = Recorder(provider)
    total, right = Tokens(), True
    with gateway(recorder.url, store) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as plain:
        client = plain.with_options(default_headers=HEADERS, max_retries=0)
        print(f"{'':>4} {'call':<28} {'provider reported':>18} {'their sum':>12} {'gateway shows':>14}")
        for number, made in enumerate(calls(client, url), 1):
            usage = reported(recorder.answers[-1])
            expected = total if made.before else total.plus(usage)
            total = total.plus(usage)
            right &= made.total == expected and len(recorder.answers) == number
            note = " (before)" if made.before else ""
            print(f"{number:>4} {made.name:<28} {usage!s:>18} {total!s:>12} {made.total!s:>14}{note}")
    with gateway(recorder.url, store) as url, urllib.request.urlopen(f"{url}/api/sessions/{SESSION}") as answer:
        after = stored(json.load(answer))
    command = [sys.executable, "-m", "gateway", "sessions", "show", SESSION, "--store", store, "--json"]
    session = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"\nthe model's server, summed over {len(recorder.answers)} answers   {total}")
    print(f"the gateway, started again              {after}")
    print(f"gateway sessions show, from the file    {stored(session)}   usage: {session['usage_source']}")
    return right and total == after == stored(session) and session["usage_source"] == "provider"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8199", help="the model's server, as http://HOST:PORT")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        right = play(arguments.base_url, Path(folder))
    print("all counts agree" if right else "THE COUNTS DIFFER")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
