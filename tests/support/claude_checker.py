"""Check Messages requests against the published rules of Claude models, without using any code of the gateway.

The checker sees every request and every response of a conversation. It remembers what each thinking block was created
after, so it can say whether a later request still carries the block in the same place. The sources are the provider's
pages on preserved thinking (platform.claude.com, "preserved-thinking" and its sub-pages) and the "what's new" pages of
each model. Where these pages leave a case open the finding is not `sure`.

Not covered: server-side compaction and context editing, and URLs whose content changes.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tests.support.claude_grammar import BETA, Block, Body, Finding, Model, blocks, grammar, request_rules

THINKING = ("thinking", "redacted_thinking")


@dataclass(frozen=True)
class _Born:
    """The prefix that a thinking block was created after."""

    model: Model
    prefix: tuple[str, ...]
    sent: tuple[str, ...]
    kept: tuple[str, ...]
    response: int


@dataclass
class _Walk:
    """The part of a prompt that was read so far.

    `sent` lists the thinking blocks as sent. `kept` lists them without those that failed the check and were dropped.
    The pages do not say which of the two lists a new block is bound to. Blocks that the model cannot read are in both,
    because they may stay in the history and are read again after a return to their model.
    """

    tools: Sequence[Block]
    elements: list[tuple[str, str]] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    referenced: set[str] = field(default_factory=set)

    def add(self, path: str, role: str, block: Block) -> None:
        self.elements.append((path, _digest([role, _clean(block)])))
        for inner in [block, *blocks(block.get("content"))]:
            if inner.get("type") == "tool_reference":
                self.referenced.add(inner.get("tool_name", ""))

    def prefix(self) -> tuple[str, ...]:
        seen = [_clean(one) for one in self.tools if not one.get("defer_loading") or one.get("name") in self.referenced]
        return (_digest(seen), *(digest for _, digest in self.elements))

    def first_change(self, before: tuple[str, ...]) -> str:
        """Return the path of the first element that differs from `before`."""
        for place, (old, new) in enumerate(zip(before, self.prefix(), strict=False)):
            if old != new:
                return "tools" if place == 0 else self.elements[place - 1][0]
        longer = len(self.elements) >= len(before)
        return self.elements[len(before) - 1][0] if longer else "the end: content is missing"


@dataclass
class ClaudeChecker:
    """Check each request of an account. Call `check` with a request and `record` with its response."""

    new_account: bool = True
    _born: dict[str, _Born] = field(default_factory=dict)
    _responses: list[tuple[str, ...]] = field(default_factory=list)

    def check(self, body: Body, beta: str = "") -> list[Finding]:
        """Return what is wrong with a request, in the order of its content. `beta` is its `anthropic-beta` header."""
        return [*request_rules(body, beta), *grammar(body), *self._run(body, beta)[0], *self._latest(body)]

    def refusals(self, body: Body, beta: str = "") -> list[Finding]:
        """Return only the findings for which the provider certainly answers 400."""
        return [one for one in self.check(body, beta) if one.effect == "refused" and one.sure]

    def record(self, body: Body, response: Body, beta: str = "") -> None:
        """Remember the thinking blocks of a response to `body`."""
        walk = self._run(body, beta)[1]
        model = Model.of(body["model"])
        content: Sequence[Block] = response.get("content") or ()
        for place, block in enumerate(content):
            if block.get("type") not in THINKING:
                walk.add(f"response.content.{place}", "assistant", block)
                continue
            mark = _mark(block)
            number = len(self._responses)
            self._born[mark] = _Born(model, walk.prefix(), tuple(walk.sent), tuple(walk.kept), number)
            walk.sent.append(mark)
            walk.kept.append(mark)
        self._responses.append(tuple(_mark(block) for block in content if block.get("type") in THINKING))

    def _run(self, body: Body, beta: str) -> tuple[list[Finding], _Walk]:
        walk = _Walk(body.get("tools") or ())
        for place, block in enumerate(blocks(body.get("system"))):
            walk.add(f"system.{place}", "top", block)
        findings = []
        for path, role, block in _content(body):
            if block.get("type") not in THINKING:
                walk.add(path, role, block)
                continue
            found = self._thinking(path, block, walk, body, beta)
            mark = _mark(block)
            walk.sent.append(mark)
            if found is None or found.effect == "tolerated" or found.rule == "model":
                walk.kept.append(mark)
            findings += [found] if found else []
        return findings, walk

    def _thinking(self, path: str, block: Block, walk: _Walk, body: Body, beta: str) -> Finding | None:
        born = self._born.get(_mark(block))
        if born is None:
            return Finding(path, "unknown_signature", "no response had this block")
        model = Model.of(body["model"])
        reads = model.reads(born.model)
        if reads is False:
            return Finding(path, "model", f"{model} does not read thinking of {born.model}", "dropped")
        if reads is None:
            return Finding(path, "model", "the pages do not say whether the model reads it", "dropped", sure=False)
        found = self._binding(path, model, born, walk) if model.checks_prefix else None
        return None if found is None else replace(found, effect=self._effect(model, body, beta))

    def _binding(self, path: str, model: Model, born: _Born, walk: _Walk) -> Finding | None:
        if walk.prefix() != born.prefix:
            return Finding(path, "prefix_changed", f"first change at {walk.first_change(born.prefix)}")
        # The pages do not say whether a block that the model cannot read may be left out.
        unread = {mark for mark in (*born.sent, *walk.sent) if self._reads(model, mark) is False}
        readings = [
            _ends(born.sent, walk.sent),
            _ends(born.kept, walk.kept),
            _ends([one for one in born.sent if one not in unread], [one for one in walk.sent if one not in unread]),
        ]
        if all(readings):
            return None
        restored = set(walk.sent) - set(born.sent)
        detail = "thinking before it was put back" if restored else "thinking before it is missing or in another order"
        return Finding(path, "restored" if restored else "gap", detail, sure=not any(readings))

    def _reads(self, model: Model, mark: str) -> bool | None:
        return model.reads(self._born[mark].model) if mark in self._born else None

    def _effect(self, model: Model, body: Body, beta: str) -> Literal["refused", "dropped", "tolerated"]:
        binding = (body.get("thinking") or {}).get("block_binding")
        if binding is not None and BETA in beta:
            return "dropped" if binding.get("prefix_mismatch_behavior") == "drop_block" else "refused"
        return "refused" if self.new_account or model.always_refuses else "tolerated"

    def _latest(self, body: Body) -> Iterator[Finding]:
        """Yield where the newest assistant turn has some but not all thinking of a response, or another order.

        Assistant messages in a row are one turn.
        """
        roles = [one["role"] for one in body["messages"]]
        stop = next((n for n in range(len(roles), 0, -1) if roles[n - 1] == "assistant"), 0)
        start = next((n for n in range(stop, 0, -1) if roles[n - 1] != "assistant"), 0)
        newest = {f"messages.{number}" for number in range(start, stop)}
        groups: dict[int, list[tuple[str, str]]] = {}
        for path, _, block in _content(body):
            mark = _mark(block)
            if path.rpartition(".content")[0] in newest and block.get("type") in THINKING and mark in self._born:
                groups.setdefault(self._born[mark].response, []).append((path, mark))
        for number, group in groups.items():
            if tuple(mark for _, mark in group) != self._responses[number]:
                yield Finding(group[0][0], "modified", "thinking of the latest assistant message was modified")


def _content(body: Body) -> Iterator[tuple[str, str, Block]]:
    for number, message in enumerate(body["messages"]):
        for place, block in enumerate(blocks(message["content"])):
            yield f"messages.{number}.content.{place}", message["role"], block


def _clean(block: Block) -> dict[str, Any]:
    """Return a block as the model sees it: without cache marks, with the content of tool results as a list."""
    kept = {key: value for key, value in block.items() if key != "cache_control"}
    if block.get("type") == "tool_result":
        kept["content"] = [_clean(one) for one in blocks(block.get("content"))]
    return kept


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:24]


def _mark(block: Block) -> str:
    """Return what identifies a thinking block. Its visible text does not: the signature carries the thinking."""
    return str(block.get("data") if block.get("type") == "redacted_thinking" else block.get("signature"))


def _ends(whole: Sequence[str], part: Sequence[str]) -> bool:
    """Return True if `part` is the end of `whole`: the oldest thinking may be left out, and no other."""
    return len(part) <= len(whole) and list(whole[len(whole) - len(part) :]) == list(part)
