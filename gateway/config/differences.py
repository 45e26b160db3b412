"""Compare two configurations, without the texts in them, which can be secrets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

from gateway.config.schema import Settings

#: changed keys that are named
_MOST_KEYS: Final = 50
#: shown instead of a text, a list or a section
_SET: Final = "set"
_ABSENT: Final = object()

Values = Mapping[str, Any]


def differences(old: Settings, new: Settings) -> tuple[Values, Values]:
    """Return the changed keys with their old values, and with their new values.

    Numbers, switches and null are shown. Anything else is shown as `set`, because it can be a secret. A key that a
    configuration does not have is missing from its values. Entries of a list are named by their `name`.
    """
    values: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    changed = 0
    for path, *both in _different(old.model_dump(), new.model_dump(), ""):
        changed += 1
        if changed > _MOST_KEYS:
            continue
        for shown, value in zip(values, both, strict=True):
            if value is not _ABSENT:
                shown[path] = _shown(value)
    if changed > _MOST_KEYS:
        for shown in values:
            shown["other keys"] = changed - _MOST_KEYS
    return values


def _different(one: Any, other: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the path of each difference, and both values."""
    if one == other:
        return
    first, second = _parts(one, path), _parts(other, path)
    if first is None or second is None:
        yield path, one, other
        return
    for inner in dict.fromkeys([*first, *second]):
        yield from _different(first.get(inner, _ABSENT), second.get(inner, _ABSENT), inner)


def _parts(value: Any, path: str) -> Mapping[str, Any] | None:
    """Return the parts of a section or of a list of sections by their path, or None if it has none."""
    if isinstance(value, Mapping):
        prefix = f"{path}." if path else ""
        return {f"{prefix}{key}": part for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(row, Mapping) for row in value):
        names = [row.get("name") for row in value]
        is_named = len(set(map(str, names))) == len(names) and None not in names
        keys = names if is_named else range(len(value))
        return {f"{path}[{key}]": row for key, row in zip(keys, value, strict=True)}
    return None


def _shown(value: Any) -> Any:
    if isinstance(value, Decimal):
        return str(value)
    return value if isinstance(value, bool | int | float | None) else _SET
