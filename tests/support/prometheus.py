"""Parse the Prometheus text format strictly by its documentation (exposition format 0.0.4)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

Labels = tuple[tuple[str, str], ...]

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\n"])*)"(?:,|\Z)')
_SUFFIX = re.compile(r"_(?:bucket|sum|count)\Z")


@dataclass
class Samples:
    """All numbers of a text by name and labels."""

    values: dict[str, dict[Labels, float]] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    helps: dict[str, str] = field(default_factory=dict)

    def family(self, name: str) -> dict[Labels, float]:
        return self.values.get(name, {})

    def value(self, name: str, **labels: str) -> float:
        wanted = set(labels.items())
        [found] = [value for shown, value in self.family(name).items() if set(shown) == wanted]
        return found


def read(text: str) -> Samples:
    """Return the samples of a text; fail if anything is invalid."""
    found = Samples()
    assert text.endswith("\n")
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# HELP "):
            _, _, name, said = line.split(" ", 3)
            assert name not in found.helps
            found.helps[name] = said
        elif line.startswith("# TYPE "):
            _, _, current, kind = line.split(" ")
            assert kind in ("counter", "gauge", "histogram")
            assert current not in found.types
            found.types[current] = kind
        else:
            _sample(line, current, found)
    return found


def _sample(line: str, current: str, found: Samples) -> None:
    match = _SAMPLE.fullmatch(line)
    assert match, line
    name, inner, value = match.groups()
    family = _SUFFIX.sub("", name) if found.types[current] == "histogram" else name
    assert family == current, f"{name} stands among {current}"
    labels = tuple((label[1], _unescaped(label[2])) for label in _LABEL.finditer(inner or ""))
    assert "".join(label[0] for label in _LABEL.finditer(inner or "")) == (inner or ""), line
    row = found.values.setdefault(name, {})
    assert labels not in row, line
    row[labels] = float(value)


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], text)
