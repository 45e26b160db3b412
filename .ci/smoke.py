"""README's first command, as a stranger runs it: the installed package, in an empty folder, with the built-in provider.

Starts `gateway serve --mock`, waits until it is ready, makes one call, reads the totals, stops it with SIGTERM.
"""

# ruff: noqa: INP001, S310, S603, S607, T201  # a script; the addresses and commands are its own

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_READY_WITHIN_S = 10.0
_STOPPED_WITHIN_S = 10.0
_MESSAGES = [{"role": "user", "content": "Say hello."}]


def main() -> None:
    """Run it, or end with what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}
        _not_the_checkout(folder, environment)
        begun = time.monotonic()
        with _served(Path(folder), environment) as (process, url):
            _wait_until_ready(f"{url}/readyz", begun + _READY_WITHIN_S)
            print(f"ready after {time.monotonic() - begun:.2f} s")
            _call(url)
            _dashboard(url)
            process.send_signal(signal.SIGTERM)
            code = process.wait(_STOPPED_WITHIN_S)
            if code != 0:
                sys.exit(f"after SIGTERM the gateway ended with {code}, not 0")
        subprocess.run(["gateway", "demo", "--steps", "2"], cwd=folder, env=environment, check=True)


def _not_the_checkout(folder: str, environment: dict[str, str]) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", "import gateway; print(gateway.__file__)"],
        cwd=folder, env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    if Path(__file__).resolve().parent.parent in Path(shown.stdout.strip()).resolve().parents:
        sys.exit(f"this is the checkout, not the installed package: {shown.stdout.strip()}")


@contextmanager
def _served(folder: Path, environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a gateway, and return its process and the address that it prints."""
    command = ["gateway", "serve", "--mock", "--port", "0", "--store", f"sqlite://{folder}/gateway.db"]
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as process:
        killer = threading.Timer(_READY_WITHIN_S + _STOPPED_WITHIN_S, process.kill)
        killer.start()
        try:
            yield process, _address(process)
        finally:
            killer.cancel()
            process.kill()


def _address(process: subprocess.Popen[str]) -> str:
    if process.stderr is None:
        sys.exit("no stderr")
    for line in process.stderr:
        match = re.match(r"gateway \S+ · (http://\S+)", line)
        if match:
            # What it says later must not fill the pipe.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return match[1]
        print(line, end="")
    sys.exit("the gateway ended before it named its address")


def _wait_until_ready(url: str, deadline: float) -> None:
    while True:
        try:
            urllib.request.urlopen(url, timeout=1).close()
        except OSError:  # refused, or an HTTP status that is an error
            if time.monotonic() > deadline:
                raise
        else:
            return
        time.sleep(0.05)


def _call(url: str) -> None:
    body = json.dumps({"model": "mock-small", "messages": _MESSAGES}).encode()
    headers = {"content-type": "application/json", "x-session-id": "smoke"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        usage = json.load(answer)["usage"]
        totals = json.loads(answer.headers["x-session-cumulative-token-usage"])
    expected = {
        "promptTokens": usage["prompt_tokens"],
        "completionTokens": usage["completion_tokens"],
        "totalTokens": usage["total_tokens"],
    }
    if totals != expected:
        sys.exit(f"x-session-cumulative-token-usage is {totals}, the provider reported {expected}")
    print(f"x-session-cumulative-token-usage: {totals}")


def _dashboard(url: str) -> None:
    """Check that the dashboard and its files are part of the package."""
    with urllib.request.urlopen(f"{url}/ui", timeout=10) as answer:
        names = re.findall(r'(?:src|href)="(ui/[^"]+)"', answer.read().decode())
    for name in [*names, f"{names[0].rpartition('/')[0]}/vendor/uPlot.min.js"]:
        urllib.request.urlopen(f"{url}/{name}", timeout=10).close()
    print(f"dashboard: {len(names)} files")


if __name__ == "__main__":
    main()
