"""Play long sessions of the real Claude Code with trimming, on models that bind thinking to its prefix.

    python bench/clients/claude_sessions.py [SCENARIO ...] [--model NAME ...] [--turns 36] [--claude FILE] [--json]
    python bench/clients/claude_sessions.py --list

Needs Claude Code, with its Node on the PATH: as `claude` on the PATH, named with --claude, or installed by
`run.py claude-code --environments FOLDER` (then FOLDER/claude-code/node_modules/.bin/claude). Without it the script
says so and does nothing. No key and no network are needed.

Each scenario starts the built-in provider with the rules of today's Claude models, a gateway in front of it, and
`claude -p` in a folder of generated files. The model's turns are scripted: on each one it thinks and calls Claude
Code's own tools (Read, Bash), on the last one it says that it is done. Checked are: Claude Code's exit code and last
text, that the provider refused no more calls than the scenario allows, that the gateway's totals are what the provider
billed, that the session was trimmed where it should be, and that each field but the messages, and each header, arrives
as it does without a gateway. Exit code 1 if a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import run

from gateway.mock import CLAUDE_RULES, MockProvider, MockServer, ModelRules, RecordedCall, ToolCall, Turn

MODELS = ("claude-opus-5-5", "claude-fable-5-2")
LAST_TEXT = "All parts are done."
PROMPT, COMPACT = "Repair the program, part by part.", "/compact"
#: lines of each file that the model reads: 3,000 tokens
LINES = 200
#: Input tokens. A session of 36 turns grows to 110,000; the tools and the system prompt are 3,000 of them with two
#: tools, and 22,000 with all of them.
BUDGET, BUDGET_WITH_ALL_TOOLS = 32_000, 50_000
SESSION_BUDGET = 1_200_000
TWO_TOOLS, ALL_TOOLS = ("--tools=Read,Bash",), ()
RUNS_S, SETTLES_S = 600.0, 20.0
#: headers that differ between two runs of Claude Code, or that the gateway sets for its own connection
OWN_HEADERS = {"content-length", "host", "x-claude-code-session-id", "accept-encoding", "connection", "x-api-key"}
#: a field with the session's name
OWN_FIELDS = {"metadata"}


@dataclass(frozen=True)
class Scenario:
    """The settings of one session.

    Attributes:
        settings: of the gateway.
        headers: that Claude Code adds to each call.
        arguments: of Claude Code.
        prompts: Claude Code is started with each of them; each start after the first one resumes the session.
        later: settings of a second gateway with an empty store, for the prompts after the first one.
        subagent: turns of a subagent that the model starts in the middle.
        rules: of the provider.
        refusals: how many calls the provider may refuse.
        changed: fields and headers that differ from those of Claude Code's first call.
        is_trimmed: the session is larger than its budget.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = TWO_TOOLS
    prompts: Sequence[str] = (PROMPT,)
    later: Mapping[str, Any] | None = None
    subagent: int = 0
    rules: tuple[ModelRules, ...] = CLAUDE_RULES
    refusals: int = 0
    changed: frozenset[str] = frozenset()
    is_trimmed: bool = True


LOW = {"context": {"budget": BUDGET}}
#: After Bash, only Read is allowed, so Bash is withdrawn and offered again repeatedly.
STEPS = [
    {"name": "read", "conditions": [{"sequence_match": ["Bash"]}], "available_tools": {"allowed": ["Read"]}},
    {"name": "any", "is_default": True},
]
SCENARIOS = {
    "no trimming": Scenario(is_trimmed=False),
    "context budget": Scenario(LOW),
    "context budget, all tools": Scenario({"context": {"budget": BUDGET_WITH_ALL_TOOLS}}, arguments=ALL_TOOLS),
    "context budget, resumed twice": Scenario(LOW, prompts=(PROMPT,) * 3),
    # Claude Code changes its own history, and removes its thinking after a refusal. It also changes a beta and the
    # first block of the system prompt. Both are the same without a gateway.
    "context budget, compacted": Scenario(
        LOW, prompts=(PROMPT, COMPACT, PROMPT), refusals=1, changed=frozenset({"anthropic-beta", "system"})
    ),
    "context budget, subagent": Scenario(LOW, arguments=("--tools=Read,Bash,Agent",), subagent=6),
    "session budget, modes": Scenario(
        headers={"x-session-budget-tokens": str(SESSION_BUDGET)}, changed=frozenset({"max_tokens"})
    ),
    "session budget and context budget": Scenario(LOW, headers={"x-session-budget-tokens": "900000"}),
    "an open tool round needs its thinking": Scenario(
        LOW,
        rules=tuple(replace(one, keeps_open_round=True) for one in CLAUDE_RULES),
        refusals=1,
        changed=frozenset({"thinking", "anthropic-beta"}),
    ),
    "steps": Scenario({"steps": STEPS}, changed=frozenset({"anthropic-beta"}), is_trimmed=False),
    "steps and context budget": Scenario({**LOW, "steps": STEPS}, changed=frozenset({"anthropic-beta"})),
    # The thinking is bound to what the first gateway sent. Claude Code removes its thinking itself.
    "store lost, budget removed": Scenario(LOW, prompts=(PROMPT,) * 2, later={}, refusals=1),
    "store lost, same budget": Scenario(LOW, prompts=(PROMPT,) * 2, later=LOW),
}


@dataclass
class Row:
    """One session. `kept`: share of the received thinking blocks that was sent; `wrong`: failed checks."""

    scenario: str
    model: str
    calls: int = 0
    refused: list[str] = field(default_factory=list)
    trimmed: int = 0
    kept: float | None = None
    largest: int = 0
    original: int = 0
    settled: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


class Claude:
    """Claude Code with its own home and project folders."""

    def __init__(self, binary: str, folder: Path, model: str, scenario: Scenario) -> None:
        self.project = folder / "project"
        self._session = str(uuid.uuid4())
        self._command = [binary, "-p", f"--model={model}", "--output-format=json", *scenario.arguments]
        self._command += ["--allowedTools=Read,Bash,Agent"]
        headers = "\n".join(f"{name}: {value}" for name, value in scenario.headers.items())
        home = folder / "home"
        home.mkdir()
        self.project.mkdir()
        self._environment = {
            **run.clean(),
            "HOME": str(home),
            "PWD": str(self.project),
            "ANTHROPIC_API_KEY": run.KEY,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            **({"ANTHROPIC_CUSTOM_HEADERS": headers} if headers else {}),
        }

    def say(self, base_url: str, prompt: str, *, is_resumed: bool) -> dict[str, Any]:
        """Run Claude Code and return its report, with its exit code."""
        session = "--resume" if is_resumed else "--session-id"
        done = subprocess.run(
            [*self._command, session, self._session, "--", prompt],
            cwd=self.project,
            env={**self._environment, "ANTHROPIC_BASE_URL": base_url},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUNS_S,
            check=False,
        )
        try:
            said: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            said = {"result": f"{done.stdout[-300:]} {done.stderr[-300:]}".strip()}
        return {**said, "exit_code": done.returncode}


def script(turns: int, project: Path, *, first: int = 0, subagent: int = 0) -> Iterator[Turn]:
    """Yield turns that think and call tools, and a last one that does not; create the files that are read."""
    for number in range(first + 1, first + turns):
        calls = [_read(project, number)] if number % 3 else [_echo(number)]
        if number % 7 == 0:
            # Tools are sometimes called in parallel.
            calls.append(_echo(number))
        yield Turn(f"I look at part {number}.", thinking=(_thought(number),), tool_calls=tuple(calls))
        if subagent and number == first + turns // 2:
            task = {"description": "Look", "prompt": "Look at the parts.", "subagent_type": "general-purpose"}
            agent = ToolCall("Agent", json.dumps({**task, "run_in_background": False}))
            yield Turn("I ask for help.", thinking=(_thought(number),), tool_calls=(agent,))
            yield from script(subagent, project, first=1000)
    yield Turn(LAST_TEXT, thinking=("All of it is done now.",))


def _thought(number: int) -> str:
    return "\n".join(f"Step {number}.{line}: I look at part {number * 31 + line} next." for line in range(6))


def _read(project: Path, number: int) -> ToolCall:
    file = project / f"part_{number}.py"
    file.write_text("\n".join(f"value_{number * 1000 + n} = compute({n}, 'item {number}-{n}')" for n in range(LINES)))
    return ToolCall("Read", json.dumps({"file_path": str(file)}))


def _echo(number: int) -> ToolCall:
    return ToolCall("Bash", json.dumps({"command": f"echo part {number}", "description": f"Name part {number}"}))


def played(name: str, model: str, binary: str, turns: int) -> Row:
    """Play one session."""
    scenario, row, started = SCENARIOS[name], Row(name, model), time.monotonic()
    with tempfile.TemporaryDirectory() as work, contextlib.ExitStack() as stack:
        folder = Path(work)
        provider = MockProvider(claude=scenario.rules)
        server = stack.enter_context(MockServer(provider))
        urls = [
            stack.enter_context(run.gateway(_new(folder / f"gateway{number}"), server.url, {"auth": {}, **settings}))
            for number, settings in enumerate((scenario.settings, scenario.later))
            if settings is not None
        ]
        direct = _sent_directly(Claude(binary, _new(folder / "session"), model, scenario))
        # The system prompt names the folder, so the same folder is used again.
        shutil.rmtree(folder / "session")
        claude, size = Claude(binary, _new(folder / "session"), model, scenario), turns // len(scenario.prompts)
        for part, prompt in enumerate(scenario.prompts):
            if prompt == COMPACT:
                provider.push(Turn("<summary>I looked at the first parts.</summary>", thinking=("I sum up.",)))
            else:
                provider.push(*script(size, claude.project, first=part * size, subagent=scenario.subagent))
            said = claude.say(urls[min(part, len(urls) - 1)], prompt, is_resumed=part > 0)
            if (said["exit_code"], said.get("result")) != (0, "" if prompt == COMPACT else LAST_TEXT):
                row.wrong.append(f"exit code {said['exit_code']}, last text {str(said.get('result'))[:300]!r}")
            while provider.next_turn() is not None:
                """A call that was refused, or a run that ended early, leaves turns."""
        _measure(row, provider.calls, [record for url in urls for record in _records(url)])
        _check(row, scenario, provider, urls)
        _compare(row, scenario, provider.calls, direct)
    row.seconds = time.monotonic() - started
    return row


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _sent_directly(claude: Claude) -> RecordedCall:
    """Return the first call that Claude Code makes without a gateway."""
    with MockServer(MockProvider([Turn(LAST_TEXT)])) as server:
        claude.say(server.url, PROMPT, is_resumed=False)
        return server.provider.calls[0]


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=SETTLES_S) as answer:
        return json.load(answer)


def _records(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for session in _get(f"{url}/api/sessions?limit=1000")["sessions"]:
        found += _get(f"{url}/api/calls?session={session['id']}&limit=1000")["calls"]
    return found


def _measure(row: Row, calls: Sequence[RecordedCall], records: Sequence[Mapping[str, Any]]) -> None:
    row.calls = len(calls)
    row.refused = [f"{call.status} {call.path}" for call in calls if call.status != 200]
    contexts = [record["context"] for record in records if record["context"] and record["status"] == 200]
    row.trimmed = sum(bool(context["trimmed"]) for context in contexts)
    thinking = [context["thinking"] for context in contexts if context["thinking"]]
    received = sum(one["received"] for one in thinking)
    row.kept = sum(one["sent"] for one in thinking) / received if received else None
    row.largest = max((call.billed.input_tokens for call in calls if call.billed), default=0)
    row.original = max((context["original_tokens"] for context in contexts), default=0)


def _check(row: Row, scenario: Scenario, provider: MockProvider, urls: Sequence[str]) -> None:
    if len(row.refused) > scenario.refusals:
        row.wrong.append(f"the provider refused {len(row.refused)} calls")
    if scenario.is_trimmed != (row.trimmed > 0):
        row.wrong.append(f"{row.trimmed} calls were trimmed")
    billed, row.settled = provider.billed().total_tokens, sum(map(_settled, urls))
    if row.settled != billed:
        row.wrong.append(f"the gateway settled {row.settled:,} tokens, the provider billed {billed:,}")


def _settled(url: str) -> int:
    sessions = _get(f"{url}/api/sessions?limit=1000")["sessions"]
    return sum(session["cumulative_token_usage"]["total_tokens"] for session in sessions)


def _compare(row: Row, scenario: Scenario, calls: Sequence[RecordedCall], direct: RecordedCall) -> None:
    """Check that the main session's calls have the fields, byte for byte, and the headers of a direct call.

    The messages are compared for the first call only, as later ones have more.
    """
    own = OWN_HEADERS | OWN_FIELDS | scenario.changed | set(scenario.headers)
    for number, call in enumerate(calls):
        is_main = call.path == direct.path and call.header("x-claude-code-agent-id") is None
        if call.status == 200 and is_main:
            found, expected = _parts(call, own), _parts(direct, own)
            names = sorted(name for name in expected | found if expected.get(name) != found.get(name))
            if names:
                row.wrong.append(f"call {number + 1} differs from one without a gateway in {', '.join(names)}")
                return
        own |= {"messages"}


def _parts(call: RecordedCall, without: Collection[str]) -> dict[str, bytes]:
    fields = msgspec.json.decode(call.body, type=dict[str, msgspec.Raw])
    found = {name: bytes(value) for name, value in fields.items()} | {k: v.encode() for k, v in call.headers}
    return {name: value for name, value in found.items() if name not in without}


def shown(rows: Sequence[Row]) -> None:
    """Print a table."""
    names = "scenario | model | calls | refused | trimmed | thinking sent | largest input | untrimmed | tokens | wrong"
    print(f"| {names} |\n{'|---' * 10}|")
    for row in rows:
        kept = f"{row.kept:.0%}" if row.kept is not None else "-"
        print(
            f"| {row.scenario} | {row.model} | {row.calls} | {len(row.refused)} | {row.trimmed} | {kept} "
            f"| {row.largest:,} | {row.original:,} | {row.settled:,} | {'; '.join(row.wrong) or 'nothing'} |"
        )


def main() -> None:
    """Read the command line and play the scenarios, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="all without")
    parser.add_argument("--model", nargs="+", default=MODELS)
    parser.add_argument("--turns", type=int, default=36)
    parser.add_argument("--claude", default="claude", help="the command")
    parser.add_argument("--json", action="store_true", help="the outcome as JSON")
    parser.add_argument("--list", action="store_true", help="the scenarios")
    asked = parser.parse_args()
    if asked.list:
        print("\n".join(SCENARIOS))
        return
    unknown = set(asked.scenarios) - set(SCENARIOS)
    if unknown:
        parser.error(f"no such scenario: {', '.join(sorted(unknown))}")
    binary = shutil.which(asked.claude)
    if binary is None:
        print(f"skipped: {asked.claude} is not installed (npm install -g @anthropic-ai/claude-code)", file=sys.stderr)
        return
    rows = []
    for model in asked.model:
        for name in asked.scenarios or SCENARIOS:
            print(f"{model}, {name} …", file=sys.stderr, flush=True)
            rows.append(played(name, model, str(Path(binary).absolute()), asked.turns))
    if asked.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        shown(rows)
    sys.exit(1 if any(row.wrong for row in rows) else 0)


if __name__ == "__main__":
    main()
