"""Run the official SDKs and popular clients through the gateway, each in its own environment.

    python bench/clients/run.py [NAME ...] [--environments FOLDER] [--json]
    python bench/clients/run.py --list

Linux or macOS; needs Python with `pip install '.[dev]'`, Node with npm, and the two package registries; no key. For
each client, its newest version is installed into a temporary folder (with --environments into a permanent one, which is
used again). A gateway with client keys is started in front of the built-in provider, and the client's script runs its
checks. At the end, the gateway's settled totals must equal the provider's bills, with nothing held. The exit code is 1
if anything failed. The newest Node clients need Node 22; if Node is older, Node 24 is installed from the npm registry.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from gateway.mock import MockProvider, MockServer  # noqa: E402

KEY, ONCE_KEY, ADMIN_KEY = "client-key-0123456789", "once-key-0123456789", "admin-key-0123456789"
#: The models that a client may use. The gateway refuses other names; the provider refuses missing-model.
MODELS = ["mock-*", "missing-*"]
BUDGET = 10_000_000
STARTS_S, RUNS_S = 60.0, 300.0
OLDEST_NODE, BROUGHT_NODE = 22, 24
_BANNER = re.compile(r"^gateway \S+ · (http://\S+)$", re.MULTILINE)
#: variables of the user that would point a client to another server
_FOREIGN = re.compile(
    r"OPENAI|ANTHROPIC|CLAUDE|GATEWAY|LITELLM|PYTHON|VIRTUAL_ENV|CODEX|OPENCODE|AIDER|_PROXY$", re.IGNORECASE
)


@dataclass(frozen=True)
class Client:
    """A script and its requirements. `packages`: the first is the client; the version of each is printed."""

    name: str
    script: str
    packages: tuple[str, ...]
    shown: tuple[str, ...]

    @property
    def node(self) -> bool:
        """Return True if npm installs it."""
        return self.script.endswith(".mjs") or self.name in {"claude-code", "codex", "opencode"}


CLIENTS = (
    Client("openai-python", "py_openai.py", ("openai[realtime]",), ("openai",)),
    Client("anthropic-python", "py_anthropic.py", ("anthropic",), ("anthropic",)),
    Client("langchain", "py_langchain.py", ("langchain-openai",), ("langchain-openai", "openai")),
    Client(
        "pydantic-ai",
        "py_pydantic_ai.py",
        ("pydantic-ai-slim[openai,anthropic]",),
        ("pydantic-ai-slim", "openai", "anthropic"),
    ),
    Client("openai-agents", "py_agents.py", ("openai-agents",), ("openai-agents", "openai")),
    Client("instructor", "py_instructor.py", ("instructor",), ("instructor", "openai")),
    Client(
        "frameworks",
        "py_frameworks.py",
        (
            *("autogen-agentchat", "autogen-ext[openai]", "smolagents[openai]", "llama-index-llms-openai-like"),
            *("haystack-ai", "agno", "strands-agents[openai,anthropic]"),
        ),
        (
            *("autogen-ext", "smolagents", "llama-index-llms-openai-like", "haystack-ai", "agno", "strands-agents"),
            *("openai", "anthropic"),
        ),
    ),
    # litellm 1.106 imports mcp for tools and for responses, but does not declare it as a dependency.
    Client("litellm", "py_litellm.py", ("litellm", "mcp"), ("litellm", "mcp", "openai")),
    Client("openai-node", "node_openai.mjs", ("openai", "ws", "zod"), ("openai", "ws")),
    Client("anthropic-node", "node_anthropic.mjs", ("@anthropic-ai/sdk", "zod"), ("@anthropic-ai/sdk",)),
    Client(
        "ai-sdk",
        "node_ai_sdk.mjs",
        ("ai", "@ai-sdk/openai", "@ai-sdk/anthropic", "@ai-sdk/openai-compatible", "zod"),
        ("ai", "@ai-sdk/openai", "@ai-sdk/anthropic", "@ai-sdk/openai-compatible"),
    ),
    Client("claude-code", "cli_claude_code.py", ("@anthropic-ai/claude-code",), ("@anthropic-ai/claude-code",)),
    Client("codex", "cli_codex.py", ("@openai/codex",), ("@openai/codex",)),
    Client("opencode", "cli_opencode.py", ("opencode-ai",), ("opencode-ai",)),
    Client("aider", "cli_aider.py", ("aider-chat",), ("aider-chat", "litellm")),
)


@dataclass
class Outcome:
    """The results of one client's script."""

    client: str
    versions: dict[str, str] = field(default_factory=dict)
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    totals: str = ""


def use_recent_node(environments: Path) -> None:
    """Put a Node version that supports the newest clients first on the PATH."""
    said = subprocess.run(["node", "--version"], check=True, capture_output=True, text=True).stdout
    if int(said.removeprefix("v").partition(".")[0]) >= OLDEST_NODE:
        return
    machine = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    package = f"node-{sys.platform}-{machine}"
    folder = environments / "node"
    if not (folder / ".installed").exists():
        npm_install(folder, [f"{package}@{BROUGHT_NODE}"])
    os.environ["PATH"] = f"{folder / 'node_modules' / package / 'bin'}{os.pathsep}{os.environ['PATH']}"


def install(client: Client, folder: Path) -> None:
    """Install the client's packages into a folder; a folder with packages is left unchanged."""
    if (folder / ".installed").exists():
        return
    if client.node:
        npm_install(folder, [f"{name}@latest" for name in client.packages])
        return
    venv.create(folder, with_pip=True, clear=True)
    command = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", *client.packages]
    subprocess.run(command, env=clean(), check=True, stdout=subprocess.DEVNULL)
    (folder / ".installed").touch()


def npm_install(folder: Path, packages: Sequence[str]) -> None:
    """Install npm packages into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text('{"private": true}')
    command = ["npm", "install", "--no-audit", "--no-fund", *packages]
    subprocess.run(command, cwd=folder, env=clean(), check=True, stdout=subprocess.DEVNULL)
    (folder / ".installed").touch()


def versions(client: Client, folder: Path) -> dict[str, str]:
    """Return the installed version of each printed package."""
    if client.node:
        manifests = {name: folder / "node_modules" / name / "package.json" for name in client.shown}
        return {name: json.loads(file.read_text())["version"] for name, file in manifests.items()}
    code = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
    command = [str(folder / "bin/python"), "-c", code, *client.shown]
    printed = subprocess.run(command, env=clean(), check=True, capture_output=True, text=True).stdout
    return dict(zip(client.shown, printed.split(), strict=True))


def clean() -> dict[str, str]:
    """Return the environment without variables that would point a client to another server."""
    return {name: value for name, value in os.environ.items() if not _FOREIGN.search(name)}


@contextlib.contextmanager
def gateway(folder: Path, provider_url: str, more: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Run `gateway serve` in front of a provider, with client keys and a budget too large to matter.

    `more`: other settings, by their top-level key.
    """
    settings = {
        "auth": {
            "keys": [
                {"name": "client", "key": KEY, "models": MODELS},
                {"name": "once", "key": ONCE_KEY, "models": MODELS, "rpm": 1},
            ],
            "admin_key": ADMIN_KEY,
        },
        "providers": {"mock": {"base_url": provider_url, "auth": "none", "retries": 0}},
        "default_provider": "mock",
        "built_in_providers": False,
        "store": {"url": f"sqlite://{folder / 'gateway.db'}"},
        "budget": {"tokens": BUDGET},
        **(more or {}),
    }
    (folder / "gateway.yaml").write_text(json.dumps(settings))
    log = folder / "gateway.log"
    command = [sys.executable, "-m", "gateway", "serve", "-c", str(folder / "gateway.yaml"), "--port", "0"]
    environment = {**clean(), "PYTHONPATH": str(ROOT), "HOME": str(folder)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stderr=output)
    try:
        yield await_address(process, log)
    finally:
        process.terminate()
        process.wait(STARTS_S)


def await_address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the address on which a gateway listens, from its log."""
    deadline = time.monotonic() + STARTS_S
    while not (found := _BANNER.search(log.read_text())):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the gateway did not start:\n{log.read_text()}")
        time.sleep(0.05)
    return found[1]


def play(client: Client, environments: Path) -> Outcome:
    """Run one client's script against a separate gateway."""
    folder = environments / client.name
    outcome = Outcome(client.name)
    try:
        install(client, folder)
        outcome.versions = versions(client, folder)
    except (subprocess.CalledProcessError, OSError) as error:
        outcome.failed["install"] = str(error)
        return outcome
    with (
        tempfile.TemporaryDirectory() as work,
        MockServer(MockProvider()) as provider,
        gateway(Path(work), provider.url) as url,
    ):
        _script(client, folder, Path(work), {"GATEWAY_URL": url, "PROVIDER_URL": provider.url}, outcome)
    return outcome


def _script(client: Client, folder: Path, work: Path, addresses: dict[str, str], outcome: Outcome) -> None:
    environment = {
        **clean(),
        **addresses,
        "GATEWAY_KEY": KEY,
        "GATEWAY_ONCE_KEY": ONCE_KEY,
        "GATEWAY_ADMIN_KEY": ADMIN_KEY,
        "CLIENT_BIN": str(folder / ("node_modules/.bin" if client.node else "bin")),
        "WORK": str(work),
        # litellm and others request prices from the network when they are imported.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    script = HERE / client.script
    if script.suffix == ".mjs":
        # Node searches packages next to the script.
        for name in (client.script, "checks.mjs"):
            (folder / name).write_bytes((HERE / name).read_bytes())
        command = ["node", str(folder / client.script)]
    else:
        command = [sys.executable if client.script.startswith("cli_") else str(folder / "bin/python"), str(script)]
    try:
        done = subprocess.run(
            command, cwd=work, env=environment, stdout=subprocess.PIPE, text=True, timeout=RUNS_S, check=False
        )
    except subprocess.TimeoutExpired:
        outcome.failed["the script"] = f"not done after {RUNS_S:g} s"
        return
    for line in done.stdout.splitlines():
        _take(line, outcome)
    if done.returncode and not outcome.failed:
        outcome.failed["the script"] = f"exit code {done.returncode}"
    _settle(environment, outcome)


def _take(line: str, outcome: Outcome) -> None:
    """Read a script's line about one check; ignore its other output."""
    try:
        found: Any = json.loads(line)
    except ValueError:
        return
    if not isinstance(found, dict) or "check" not in found:
        return
    if found["ok"]:
        outcome.passed.append(found["check"])
    else:
        outcome.failed[found["check"]] = found["why"]


def _settle(environment: dict[str, str], outcome: Outcome) -> None:
    """Compare the totals, in a process that knows the addresses."""
    code = "import checks; print(checks.settled())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=HERE,
        env={**environment, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        outcome.failed["totals"] = done.stderr.strip().splitlines()[-1]
    else:
        outcome.passed.append("totals")
        outcome.totals = done.stdout.strip()


def show(outcomes: Sequence[Outcome]) -> None:
    """Print the table."""
    print("| client | version | passed | failed | totals |\n|---|---|---|---|---|")
    for one in outcomes:
        named = ", ".join(f"{name} {version}" for name, version in one.versions.items())
        failed = "; ".join(f"{name}: {why.splitlines()[0][:200]}" for name, why in one.failed.items()) or "none"
        print(f"| {one.client} | {named} | {len(one.passed)}: {', '.join(one.passed)} | {failed} | {one.totals} |")


def main() -> None:
    """Read the command line and play the clients, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [client.name for client in CLIENTS]
    parser.add_argument("clients", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all without")
    parser.add_argument("--environments", type=Path, help="folder to install into and to use again")
    parser.add_argument("--json", action="store_true", help="the outcome as JSON")
    parser.add_argument("--list", action="store_true", help="the clients")
    asked = parser.parse_args()
    unknown = set(asked.clients) - set(names)
    if unknown:
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    if asked.list:
        print("\n".join(names))
        return
    chosen = [client for client in CLIENTS if not asked.clients or client.name in asked.clients]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (asked.environments or Path(temporary)).resolve()
        if any(client.node for client in chosen):
            use_recent_node(folder)
        outcomes = []
        for client in chosen:
            print(f"{client.name} …", file=sys.stderr, flush=True)
            outcomes.append(play(client, folder))
    if asked.json:
        print(json.dumps([asdict(one) for one in outcomes], indent=1))
    else:
        show(outcomes)
    sys.exit(1 if any(one.failed for one in outcomes) else 0)


if __name__ == "__main__":
    main()
