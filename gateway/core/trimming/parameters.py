"""Read the parameters of tools, and the form of the example values in their definitions.

Models pass values from one tool to the next. If a result has thirty values, the next call will need those that some
tool takes: a value under the name of a parameter, or one of the same form as an example. For instance,
`gift_card_4421` fits a description with "such as gift_card_78".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from gateway.core.trimming.terms import Lexicon, shapes_of
from gateway.core.values import dataclass

#: Tool definitions of more bytes are not read: no model accepts so many.
_MAX_DEFINITION_BYTES: Final = 2**20
#: Most names, and most shapes, that are kept: no agent has a thousand parameters.
_MAX_NAMES: Final = 4096
_ENTRY_BYTES: Final = 120
#: A label and the colon after it. The search starts only at the start of a word and has no group. So it stays fast in a
#: table cell with a megabyte of base64.
_LABEL: Final = re.compile(r"(?<![\w-])[\w-]+: ")
#: Characters of the shortest shape that is specific enough.
_MIN_SHAPE_CHARS: Final = 3


@dataclass(frozen=True, slots=True)
class Parameters:
    """Names and example values of the parameters of a request's tools.

    Attributes:
        names: names of the parameters, see `spelled`.
        shapes: shapes of the examples in the definitions, see `shapes_of`.
    """

    names: frozenset[str] = frozenset()
    shapes: frozenset[str] = frozenset()

    def blocks_named(self, labels: Mapping[str, Sequence[int]]) -> set[int]:
        """Return the numbers of the blocks with a value under the name of a parameter. `labels`: see `labelled`."""
        return {number for name in self.names & labels.keys() for number in labels[name]}

    def wanted(self, terms: Sequence[str]) -> Iterator[str]:
        """Yield the terms that have the shape of an example."""
        if self.shapes:
            yield from (term for term, shape in zip(terms, shapes_of(terms), strict=True) if shape in self.shapes)

    @property
    def size_bytes(self) -> int:
        """Return the approximate size in memory."""
        return _ENTRY_BYTES * (1 + len(self.names) + len(self.shapes)) + sum(map(len, (*self.names, *self.shapes)))


NO_PARAMETERS: Final = Parameters()


def parameters_of(tools: Iterable[bytes]) -> Parameters:
    """Return the parameters in the request fields that define tools, of any API; fields without JSON are skipped."""
    names, texts = set[str](), list[str]()
    for raw in tools:
        if len(raw) > _MAX_DEFINITION_BYTES:
            continue
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError):
            continue
        for inner in _all_values(value):
            if isinstance(inner, str):
                texts.append(inner)
            elif isinstance(inner, dict) and isinstance(properties := inner.get("properties"), dict):
                names.update(map(spelled, properties))
    found = Lexicon().terms("\n".join(texts))
    shapes = {shape for shape in shapes_of([*found]) if _is_specific(shape)}
    return Parameters(frozenset(sorted(names)[:_MAX_NAMES]), frozenset(sorted(shapes)[:_MAX_NAMES]))


def _all_values(value: Any) -> Iterator[Any]:
    """Yield a value and all values inside it, at any depth."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        yield value
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _is_specific(shape: str) -> bool:
    """Return whether a shape has a number and letters. Other shapes, such as that of a date, fit too many values."""
    return "0" in shape and len(shape) >= _MIN_SHAPE_CHARS and any(map(str.isalpha, shape))


def spelled(name: str) -> str:
    """Return a name in the form in which names are compared: `userId` and `user_id` are equal."""
    return name.replace("_", "").replace("-", "").lower()


def labelled(texts: Sequence[str]) -> Mapping[str, Sequence[int]]:
    """Return the numbers of the texts with a value of each name, written `name: value`. Names: see `spelled`."""
    found: dict[str, list[int]] = {}
    for number, text in enumerate(texts):
        for label in dict.fromkeys(_LABEL.findall(text)):
            numbers = found.setdefault(spelled(label.removesuffix(": ")), [])
            if not numbers or numbers[-1] != number:
                numbers.append(number)
    return found
