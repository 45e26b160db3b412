"""Replace all providers by one, for `gateway serve --mock` and `--upstream`.

Only where calls go is changed. What the configuration says else of models (aliases, windows, prices, fallbacks, agents)
stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def with_only(
    raw: Mapping[str, Any], *, name: str, block: Mapping[str, object], facts: Mapping[str, object]
) -> dict[str, Any]:
    """A configuration, before it is checked, in which every model is served by one provider.

    Args:
        raw: as it was read.
        name: of the provider.
        block: what is set for it, over what the configuration says of a provider of that name.
        facts: of each model for which the configuration does not say them.
    """
    blocks, rows = raw.get("providers"), raw.get("models")
    own = blocks.get(name) if isinstance(blocks, dict) else None
    # No other provider stays: under its name, "groq/llama-…", a call would still go there.
    found = {
        **raw,
        "providers": {name: {**(own if isinstance(own, dict) else {}), **block}},
        "default_provider": name,
        "built_in_providers": False,
    }
    if rows is None or isinstance(rows, list):  # of anything else the schema says what is wrong with it
        kept = [{**facts, **row, "provider": name} if isinstance(row, dict) else row for row in rows or ()]
        is_whole = not facts or any(isinstance(row, dict) and row.get("match") == "*" for row in kept)
        found["models"] = kept if is_whole else [*kept, {"match": "*", "provider": name, **facts}]
    return found
