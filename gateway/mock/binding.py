"""Check the thinking blocks that a request sends back, and create the thinking blocks of its response."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final, Literal, NamedTuple

from gateway.mock.betas import BINDING
from gateway.mock.claude_rules import ModelRules
from gateway.mock.compactions import Signed, digest_before_kept_turns
from gateway.mock.prefixes import Prefix, PrefixMemory, blocks_of, is_thinking
from gateway.mock.thinking_blocks import Seal, identifier, read, sign, signature_of
from gateway.mock.wire import ApiError, JsonObject

#: How a block that fails the prefix check is treated.
Mismatch = Literal["error", "drop_block", "allow"]

_BOUND: Final = (
    "The block is bound to a different conversation. Remove the block, or set "
    '`thinking.block_binding.prefix_mismatch_behavior` to "drop_block".'
)
_NEEDS_BETA: Final = f"That setting requires the `{BINDING}` value in the `anthropic-beta` header."
_MISSING: Final = "The `thinking` block that preceded this one when it was created is missing from this request."
_CHANGED: Final = {
    "system": "The `system` prompt differs from the one this block was created with.",
    "tools": "The `tools` list differs from the one this block was created with.",
}
_MODIFIED: Final = (
    "`thinking` or `redacted_thinking` blocks in the latest assistant message cannot be modified. These blocks must "
    "remain as they were in the original response."
)


class BindingTerms(NamedTuple):
    """The model, account and settings that the thinking blocks of a request are checked against."""

    rules: ModelRules
    account: str
    mismatch: Mismatch
    has_beta: bool
    """The request names the beta that controls the check."""
    signed: Signed | None = None
    """The signed compaction block at the start of the request."""


class SentThinking(NamedTuple):
    """A thinking block that a request sends back."""

    path: str
    block: JsonObject
    seal: Seal
    identifier: bytes


#: The thinking blocks of a request, by message number and block number.
SentBlocks = dict[tuple[int, int], SentThinking]


@dataclass(slots=True)
class Checked:
    """A request whose thinking blocks have been checked."""

    prefix: Prefix
    """The content of the whole request."""
    messages: list[JsonObject] = field(default_factory=list)
    """The messages without the dropped blocks."""
    chain: list[bytes] = field(default_factory=list)
    """The identifiers of the thinking blocks that new thinking blocks follow."""
    has_gap: bool = False
    """A block in `chain` was not created directly after its predecessor in `chain`."""
    transformations: list[JsonObject] = field(default_factory=list)
    lineage: tuple[bytes, ...] = ()
    """The identifiers of the signed compaction block at the start of the request, and of those that it replaces."""

    def after(self, block: JsonObject) -> Checked:
        """Return the request in which `block`, an unsigned compaction block, replaces all messages."""
        self.prefix.restart()
        self.prefix.add("compaction", "assistant", block, opens=True)
        return Checked(self.prefix, [{"role": "assistant", "content": [block]}])


def create(texts: Sequence[str], checked: Checked, terms: BindingTerms, response: int) -> list[JsonObject]:
    """Return new thinking blocks, one for each text, bound to the request. `response`: the number of the call."""
    account = terms.account if terms.rules.account_bound else ""
    chain = list(checked.chain)
    blocks: list[JsonObject] = []
    for index, text in enumerate(texts):
        seal = Seal(
            account=account,
            model=terms.rules.name,
            prefix=checked.prefix.digest,
            previous=chain[-1] if chain else b"",
            depth=len(chain),
            chain=_digest(chain),
            response=response,
            index=index,
            count=len(texts),
            compaction=checked.lineage[0] if checked.lineage else b"",
        )
        signature = sign(seal)
        chain.append(identifier(signature))
        blocks.append({"type": "thinking", "thinking": text, "signature": signature})
    return blocks


def check(messages: Sequence[JsonObject], prefix: Prefix, terms: BindingTerms, memory: PrefixMemory) -> Checked:
    """Return the request without the thinking blocks that must be dropped and the messages that the API ignores.

    Args:
        messages: as sent.
        prefix: of the system prompt and the tools; the messages are added to it.
        terms: what the blocks are checked against.
        memory: earlier prefixes, to name the changed part in the error message.

    Raises:
        ApiError: 400, for one of these reasons: a signature is missing or forged, thinking in the latest assistant
            message was modified, or a block fails the prefix check and must not be dropped.
    """
    compaction = _newest_compaction(messages)
    sent = {
        place: _read(place, block)
        for place, block in _thinking(messages)
        if place > compaction and not _is_of_declined_model(messages, place)
    }
    _check_latest(messages, sent)
    checked = Checked(prefix, lineage=terms.signed.lineage if terms.signed else ())
    for number, message in enumerate(messages):
        kept: list[JsonObject] = []
        opens = True
        for index, block in enumerate(blocks_of(message.get("content"))):
            place = (number, index)
            if place in sent:
                if _passes(sent[place], checked, terms, memory):
                    kept.append(block)
                continue
            if place < compaction or is_thinking(block) or block.get("type") == "fallback":
                continue
            kept.append(block)
            name = f"messages.{number}.content.{index}"
            if place == compaction and terms.signed is not None:
                prefix.resume(name, digest_before_kept_turns(terms.signed, prefix, messages))
                continue
            if place == compaction:
                prefix.restart()
            prefix.add(name, str(message.get("role")), block, opens=opens)
            opens = False
        if kept or number > compaction[0]:
            checked.messages.append({**message, "content": kept})
    memory.remember(prefix)
    return checked


def _passes(sent: SentThinking, checked: Checked, terms: BindingTerms, memory: PrefixMemory) -> bool:
    """Return True for a block that the model receives. Report dropped blocks and blocks that failed the check.

    Raises:
        ApiError: 400, the block fails the prefix check.
    """
    rules, seal = terms.rules, sent.seal
    reason = None
    if seal.account not in ("", terms.account):
        reason = "organization_binding_mismatch"
    elif seal.model not in (rules.name, *rules.reads):
        reason = "model_binding_mismatch"
    if reason is not None:
        # The block can be read again by its own model or account, so later blocks still follow it.
        _append(sent, checked)
        checked.transformations.append({"type": "thinking_dropped", "path": sent.path, "reason": reason})
        return False
    has_same_content = seal.prefix == checked.prefix.digest and seal.compaction in (b"", *checked.lineage)
    if rules.prefix_check == "none" or (has_same_content and _is_valid_after(checked, seal)):
        _append(sent, checked)
        return True
    if terms.mismatch == "error":
        cause = _missing(seal, checked) if has_same_content else _change(seal, checked, memory)
        raise ApiError(400, _refusal(sent, cause, has_beta=terms.has_beta))
    is_allowed = terms.mismatch == "allow"
    kind = "thinking_mismatch_allowed" if is_allowed else "thinking_dropped"
    checked.transformations.append({"type": kind, "path": sent.path, "reason": "prefix_binding_mismatch"})
    if is_allowed:
        _append(sent, checked)
    return is_allowed


def _append(sent: SentThinking, checked: Checked) -> None:
    checked.has_gap = checked.has_gap or not _follows(sent.seal, checked.chain)
    checked.chain.append(sent.identifier)


def _is_valid_after(checked: Checked, seal: Seal) -> bool:
    """Return True if the chain is empty, or is the end of the thinking that preceded the block at its creation.

    Without a gap, it is enough to compare the last identifier and the length. With a gap, the whole chain must be the
    same. It then contains blocks that were allowed in spite of a gap, or that the model does not read, because later
    blocks were created after them.
    """
    return seal.chain == _digest(checked.chain) if checked.has_gap else _follows(seal, checked.chain)


def _follows(seal: Seal, chain: list[bytes]) -> bool:
    return not chain or (chain[-1] == seal.previous and len(chain) <= seal.depth)


def _digest(chain: list[bytes]) -> bytes:
    return hashlib.blake2b(b"".join(chain), digest_size=8).digest()


def _missing(seal: Seal, checked: Checked) -> str | None:
    return _MISSING if seal.previous not in checked.chain else None


def _change(seal: Seal, checked: Checked, memory: PrefixMemory) -> str | None:
    name = memory.first_change(seal.prefix, checked.prefix.parts)
    if name is None:
        return None
    return _CHANGED.get(name, f"Content before this block differs from when it was created, first at `{name}`.")


def _refusal(sent: SentThinking, cause: str | None, *, has_beta: bool) -> str:
    sentences = [f"{_invalid(sent.path, sent.block)}.", _BOUND]
    if not has_beta:
        sentences.append(_NEEDS_BETA)
    if cause is not None:
        sentences.append(cause)
    return " ".join(sentences)


def _invalid(path: str, block: JsonObject) -> str:
    key = "data" if block.get("type") == "redacted_thinking" else "signature"
    return f"{path}: Invalid `{key}` in `{block.get('type')}` block"


def _read(place: tuple[int, int], block: JsonObject) -> SentThinking:
    """Return a thinking block with its signed data.

    Raises:
        ApiError: 400, the signature is missing or forged.
    """
    path = f"messages.{place[0]}.content.{place[1]}"
    signature = signature_of(block)
    if not isinstance(signature, str):
        kind = block.get("type")
        raise ApiError(400, f"{path}.{kind}.{'data' if kind == 'redacted_thinking' else 'signature'}: Field required")
    seal = read(signature, Seal)
    if seal is None:
        raise ApiError(400, _invalid(path, block))
    return SentThinking(path, block, seal, identifier(signature))


def _thinking(messages: Sequence[JsonObject]) -> Iterator[tuple[tuple[int, int], JsonObject]]:
    for number, message in enumerate(messages):
        for index, block in enumerate(blocks_of(message.get("content"))):
            if is_thinking(block):
                yield (number, index), block


def _is_of_declined_model(messages: Sequence[JsonObject], place: tuple[int, int]) -> bool:
    """Return True for the thinking of a model that refused: a fallback block follows it in the same message."""
    blocks = blocks_of(messages[place[0]].get("content"))
    return any(block.get("type") == "fallback" for block in blocks[place[1] :])


def _newest_compaction(messages: Sequence[JsonObject]) -> tuple[int, int]:
    """Return the message and block number of the newest compaction block, or (-1, -1).

    The API ignores all messages before this block.
    """
    for number in range(len(messages) - 1, -1, -1):
        blocks = blocks_of(messages[number].get("content"))
        for index in range(len(blocks) - 1, -1, -1):
            # A block without content means that the API could not summarize.
            if blocks[index].get("type") == "compaction" and blocks[index].get("content") is not None:
                return number, index
    return -1, -1


def _check_latest(messages: Sequence[JsonObject], sent: SentBlocks) -> None:
    """Refuse incomplete or reordered thinking in the latest assistant message.

    A client may send one response as several assistant messages, so all consecutive assistant messages at the end are
    checked. A response without any of its thinking is accepted.

    Raises:
        ApiError: 400, a thinking block is missing or in the wrong order.
    """
    end = next((n for n in range(len(messages), 0, -1) if messages[n - 1].get("role") == "assistant"), 0)
    length = sum(1 for _ in takewhile(lambda n: messages[n].get("role") == "assistant", range(end - 1, -1, -1)))
    latest = [block for (number, _), block in sent.items() if end - length <= number < end]
    for block in latest:
        group = [other for other in latest if other.seal.response == block.seal.response]
        if group[0] is block and [other.seal.index for other in group] != list(range(block.seal.count)):
            raise ApiError(400, f"{block.path}: {_MODIFIED}")
