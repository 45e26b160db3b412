"""Leave out parts of a tool result that an earlier result already showed.

A part is an element of a JSON list (the result itself, or the longest list in it), or a paragraph of a text. A later
result leaves out the parts that one earlier result, which is sent whole, contains word for word. A mark names that
result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gateway.core.conversation.lossless_json import write
from gateway.core.conversation.message import decode, digest
from gateway.core.conversation.units import Item
from gateway.core.trimming.deadline import Deadline
from gateway.core.trimming.dedupe import MIN_RESULT_CHARS, is_comparable, replaceable_results
from gateway.core.trimming.draft import KEEP, Decision, Draft, DuplicateResult
from gateway.core.trimming.parts import split_parts
from gateway.core.trimming.reader import Reader
from gateway.core.values import dataclass

#: Bytes of the shortest part that is compared: shorter parts may be equal by chance.
_MIN_PART_BYTES: Final = 40
#: Bytes that the hash and length of a part take in memory.
_PART_BYTES: Final = 150


@dataclass(frozen=True, slots=True)
class _Part:
    key: bytes
    length: int


#: a part that is too short to be compared
_TOO_SHORT: Final = _Part(b"", 0)


def overlap(draft: Draft) -> Draft:
    """Leave out of each changeable result the parts that an earlier result already shows."""
    seen: dict[bytes, int] = {}
    changes: dict[int, Decision] = {}
    replaceable = replaceable_results(draft)
    for item in draft.conversation.items:
        if draft.decisions[item.index] != KEEP or not is_comparable(item):
            continue
        parts = parts_of(item, draft.conversation.messages[item.index], draft.reader, draft.deadline)
        reference = _reference(parts, seen) if item.index in replaceable else None
        if reference is not None:
            changes[item.index] = reference
        else:
            for part in parts:
                if part is not _TOO_SHORT:
                    seen.setdefault(part.key, item.index)
    return draft.with_decisions(changes) if changes else draft


def _reference(parts: Sequence[_Part], seen: dict[bytes, int]) -> DuplicateResult | None:
    """Return a reference to the earlier result that shares most of these parts, or None if it saves too little."""
    shared: dict[int, list[int]] = {}
    for number, part in enumerate(parts):
        if part is not _TOO_SHORT and part.key in seen:
            shared.setdefault(seen[part.key], []).append(number)
    lengths = {source: sum(parts[number].length for number in numbers) for source, numbers in shared.items()}
    most = max(lengths, key=lengths.__getitem__, default=None)
    return (
        DuplicateResult(most, tuple(shared[most])) if most is not None and lengths[most] >= MIN_RESULT_CHARS else None
    )


def parts_of(item: Item, raw: bytes, reader: Reader, deadline: Deadline) -> Sequence[_Part]:
    """Return the parts of a result, as hashes and lengths."""

    def compute() -> tuple[_Part, ...]:
        deadline.tick(1 + item.length // _MIN_PART_BYTES)
        parts, _, _ = split_parts(decode(raw).get("content"))
        # half of a surrogate pair cannot be encoded otherwise
        raws = (write(part).encode("utf-8", "surrogatepass") for part in deadline.over(parts))
        return tuple([_Part(digest(raw), len(raw)) if len(raw) >= _MIN_PART_BYTES else _TOO_SHORT for raw in raws])

    return reader.cached_for_message("parts", item.key, compute, lambda parts: _PART_BYTES * len(parts))
