"""Replace all providers by one, for `gateway serve --mock` and `--upstream`.

Only the target of calls changes. Other settings of models (aliases, windows, prices, fallbacks, agents) stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def with_only(
    raw: Mapping[str, Any], *, name: str, block: Mapping[str, object], facts: Mapping[str, object]
) -> dict[str, Any]:
    """Return an unchecked configuration in which one provider serves every model.

    Args:
        raw: the configuration as read.
        name: the name of the provider.
        block: its settings, which override those of a configured provider of that name.
        facts: facts of models for which the configuration has none.
    """
    blocks, rows = raw.get("providers"), raw.get("models")
    own = blocks.get(name) if isinstance(blocks, dict) else None
    # All other providers are removed: a call for "groq/llama-…" would still go to groq.
    merged = {
        **raw,
        "providers": {name: {**(own if isinstance(own, dict) else {}), **block}},
        "default_provider": name,
        "built_in_providers": False,
    }
    if rows is None or isinstance(rows, list):  # the schema reports anything else
        kept = [{**facts, **row, "provider": name} if isinstance(row, dict) else row for row in rows or ()]
        is_whole = not facts or any(isinstance(row, dict) and row.get("match") == "*" for row in kept)
        merged["models"] = kept if is_whole else [*kept, {"match": "*", "provider": name, **facts}]
    return merged
