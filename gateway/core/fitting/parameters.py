"""Read the parameters of tools, and the form of the example values in their definitions.

Models hand values on from one tool to the next. Of a result that has thirty, those will be needed that some tool asks
for: under the same name, or of the same form, such as `gift_card_4421` where a description says "such as gift_card_78".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from gateway.core.fitting.terms import Lexicon, shapes_of
from gateway.core.values import dataclass

#: definitions of more bytes than this are not read: no model can be shown so many
_MOST_BYTES: Final = 2**20
#: names and shapes of each that are remembered; no agent has a thousand parameters
_MOST: Final = 4096
_ENTRY_BYTES: Final = 120
#: A label and the colon after it. The search starts at the beginning of a word only and has no group, so that it stays
#: fast where a cell of a table is a megabyte of base64.
_LABEL: Final = re.compile(r"(?<![\w-])[\w-]+: ")
#: characters of the shortest shape that tells anything
_SHORTEST: Final = 3


@dataclass(frozen=True, slots=True)
class Parameters:
    """What the tools of a request take.

    Attributes:
        names: of their parameters, see `spelled`.
        shapes: of the examples in their definitions, see `shapes_of`.
    """

    names: frozenset[str] = frozenset()
    shapes: frozenset[str] = frozenset()

    def named_in(self, labels: Mapping[str, Sequence[int]]) -> set[int]:
        """The blocks with a value under the name of a parameter; `labels`: see `labelled`."""
        return {number for name in self.names & labels.keys() for number in labels[name]}

    def wanted(self, terms: Sequence[str]) -> Iterator[str]:
        """Those of some terms that look like what is asked for."""
        if self.shapes:
            yield from (term for term, shape in zip(terms, shapes_of(terms), strict=True) if shape in self.shapes)

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes, about."""
        return _ENTRY_BYTES * (1 + len(self.names) + len(self.shapes)) + sum(map(len, (*self.names, *self.shapes)))


NO_PARAMETERS: Final = Parameters()


def parameters_of(tools: Iterable[bytes]) -> Parameters:
    """Those of the fields of a request that define tools, in the form of any API; none of what is no JSON."""
    names, texts = set[str](), list[str]()
    for raw in tools:
        if len(raw) > _MOST_BYTES:
            continue
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError):
            continue
        for inner in _inside(value):
            if isinstance(inner, str):
                texts.append(inner)
            elif isinstance(inner, dict) and isinstance(properties := inner.get("properties"), dict):
                names.update(map(spelled, properties))
    found = Lexicon().terms("\n".join(texts))
    shapes = {shape for shape in shapes_of([*found]) if _tells(shape)}
    return Parameters(frozenset(sorted(names)[:_MOST]), frozenset(sorted(shapes)[:_MOST]))


def _inside(value: Any) -> Iterator[Any]:
    """All values inside one, however deep it is."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        yield value
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _tells(shape: str) -> bool:
    """Whether a shape has a number and more than that: a number, a day or a time looks like each other one."""
    return "0" in shape and len(shape) >= _SHORTEST and any(map(str.isalpha, shape))


def spelled(name: str) -> str:
    """A name as it is compared: `userId` and `user_id` are the same."""
    return name.replace("_", "").replace("-", "").lower()


def labelled(texts: Sequence[str]) -> Mapping[str, Sequence[int]]:
    """Names, see `spelled`, and the numbers of the texts that hold a value of that name, written `name: value`."""
    found: dict[str, list[int]] = {}
    for number, text in enumerate(texts):
        for label in dict.fromkeys(_LABEL.findall(text)):
            numbers = found.setdefault(spelled(label.removesuffix(": ")), [])
            if not numbers or numbers[-1] != number:
                numbers.append(number)
    return found
