"""Write the window of a model into the settings of a client, so that it compacts before the gateway trims or refuses.

| client | settings | source |
|---|---|---|
| Claude Code | environment variables | https://code.claude.com/docs/en/env-vars |
| Codex | `config.toml` | https://developers.openai.com/codex/config-reference |
| opencode | `opencode.json` | https://opencode.ai/docs/providers |
"""

from __future__ import annotations

import json
import shlex
from typing import Final, NamedTuple

#: the range of CLAUDE_CODE_AUTO_COMPACT_WINDOW
_CLAUDE_LEAST: Final = 100_000
_CLAUDE_MOST: Final = 1_000_000
#: output tokens that Claude Code asks of a model that it does not know; asking for more would reserve more of a budget
_CLAUDE_OUTPUT: Final = 32_000
#: part of the names of the models whose window Claude Code knows itself
_CLAUDE: Final = "claude"
#: share of the window at which Codex compacts
_CODEX_SHARE: Final = 0.9
_EXAMPLE_MODEL: Final = "gpt-5.1"


class ClientLimits(NamedTuple):
    """What a client may use of a model; None for what is unknown. `model`: None if the user names none."""

    model: str | None = None
    window: int | None = None
    output: int | None = None


def claude_code(limits: ClientLimits) -> str:
    """Return shell lines for Claude Code, each after a line break."""
    model, window, output = limits
    values: dict[str, object] = {}
    if model is not None:
        values["ANTHROPIC_MODEL"] = shlex.quote(model)
        if window is not None and _CLAUDE not in model.lower():
            values["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = window
        if output is not None and output < _CLAUDE_OUTPUT:
            values["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = output
    if window is not None:
        values["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = min(max(window, _CLAUDE_LEAST), _CLAUDE_MOST)
        if window < _CLAUDE_LEAST:
            # A share of that window without room for a response, so Claude Code compacts well before the window.
            values["CLAUDE_AUTOCOMPACT_PCT_OVERRIDE"] = max(1, window * 100 // _CLAUDE_LEAST)
    return "".join(f"\nexport {name}={value}" for name, value in values.items())


def codex(limits: ClientLimits) -> str:
    """Return lines of TOML for Codex, each after a line break."""
    model, window, _ = limits
    lines = [f"model = {json.dumps(model)}"] if model is not None else []
    if window is not None:
        lines.append(f"model_context_window = {window}")
        lines.append(f"model_auto_compact_token_limit = {int(window * _CODEX_SHARE)}")
    return "".join(f"\n{line}" for line in lines)


def opencode(limits: ClientLimits) -> str:
    """Return the models of a provider of opencode, as members of a JSON object."""
    model, window, output = limits
    if model is None:
        return f"{json.dumps(_EXAMPLE_MODEL)}: {{}}"
    # opencode accepts only both numbers together.
    known = {"limit": {"context": window, "output": output}} if window is not None and output is not None else {}
    return f"{json.dumps(model)}: {json.dumps(known)}"
