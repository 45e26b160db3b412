"""Play long sessions of the real Codex CLI with trimming, on models whose reasoning must be sent back.

    python bench/clients/codex_sessions.py [--model NAME ...] [--turns 32] [--budget 30000] [--codex FILE]

Needs the Codex CLI (npm: @openai/codex): as `codex` on the PATH, or named with --codex. Without it the script says so
and does nothing. No key and no network are needed.

Starts the built-in provider with the request rules of OpenAI's models, a gateway with a context budget, and `codex
exec` in a folder of generated files. On each turn the model has one file read, on the last one it says that it is done.
Checked are: the exit code and the last text, that the provider refused no call, that the session was trimmed, and that
the gateway's totals are what the provider billed. Exit code 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import run

from gateway.mock import STRICT_MODELS, MockProvider, MockServer, ToolCall, Turn

MODELS = ("gpt-5.3-codex", "gpt-6.2-sol")
LAST_TEXT = "All parts are done."
#: lines of each file that the model reads: 2,400 tokens
LINES = 150
RUNS_S = 600.0
#: Codex must not compact: the gateway is to trim.
CONFIG = """
model = "{model}"
model_provider = "gateway"
model_context_window = 400000
model_auto_compact_token_limit = 390000
[model_providers.gateway]
name = "gateway"
base_url = "{base_url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
EXEC = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "Repair the program by parts.")


def script(turns: int, project: Path) -> list[Turn]:
    """Return turns that have a generated file read, and a last one that does not."""
    found = []
    for number in range(turns - 1):
        lines = (f"value_{number * 1000 + one} = compute({one}, 'item {number}-{one}')" for one in range(LINES))
        (project / f"part_{number}.py").write_text("\n".join(lines))
        call = ToolCall("exec_command", json.dumps({"cmd": f"cat part_{number}.py"}))
        found.append(Turn(f"I look at part {number}.", tool_calls=(call,)))
    return [*found, Turn(LAST_TEXT)]


def fetched(url: str) -> Any:
    """Return the JSON at an address of the gateway's API."""
    with urllib.request.urlopen(url) as response:
        return json.load(response)


def wrong(binary: str, model: str, turns: int, budget: int) -> list[str]:
    """Play one session, print its figures, and return the checks that failed."""
    with tempfile.TemporaryDirectory() as name, MockServer(MockProvider(strict=STRICT_MODELS)) as server:
        folder = Path(name)
        for part in ("gateway", "project", "home"):
            (folder / part).mkdir()
        server.provider.push(*script(turns, folder / "project"))
        with run.gateway(folder / "gateway", server.url, {"auth": {}, "context": {"budget": budget}}) as base_url:
            (folder / "home/config.toml").write_text(CONFIG.format(model=model, base_url=base_url))
            environment = {**run.clean(), "HOME": str(folder), "CODEX_HOME": str(folder / "home")}
            done = subprocess.run(
                [binary, *EXEC],
                cwd=folder / "project",
                env={**environment, "OPENAI_API_KEY": run.KEY},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=RUNS_S,
                check=False,
            )
            (session,) = fetched(f"{base_url}/api/sessions")["sessions"]
            calls = fetched(f"{base_url}/api/sessions/{session['id']}/calls?limit=100")["calls"]
        contexts = [call["context"] for call in calls if call["context"]]
        refused = sum(call.status >= 400 for call in server.provider.calls if call.path == "/v1/responses")
        settled, billed = session["cumulative_token_usage"]["total_tokens"], server.provider.billed().total_tokens
        trimmed = sum(bool(one["trimmed"]) for one in contexts)
        print(
            f"{model}: {len(calls)} calls, {refused} refused, {trimmed} trimmed, at most "
            f"{max(one['tokens'] for one in contexts):,} of {max(one['original_tokens'] for one in contexts):,} input "
            f"tokens sent, {settled:,} tokens settled, {billed:,} billed"
        )
        checks = {
            f"exit code {done.returncode}: {done.stderr[-300:]}": done.returncode == 0,
            f"last text {done.stdout[-200:]!r}": LAST_TEXT in done.stdout,
            f"{refused} calls were refused": not refused,
            "the session was not trimmed": trimmed > 0,
            "settled and billed tokens differ": settled == billed,
        }
        return [said for said, is_right in checks.items() if not is_right]


def main() -> None:
    """Play the sessions that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=MODELS)
    parser.add_argument("--turns", type=int, default=32)
    parser.add_argument("--budget", type=int, default=30_000)
    parser.add_argument("--codex", default=shutil.which("codex"))
    asked = parser.parse_args()
    if asked.codex is None:
        print("skipped: codex is not installed (npm install -g @openai/codex)")
        return
    found = [one for model in asked.model for one in wrong(asked.codex, model, asked.turns, asked.budget)]
    for one in found:
        print(f"WRONG: {one}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
