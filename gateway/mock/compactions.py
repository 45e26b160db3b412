"""Create compaction blocks, and check the compaction blocks that a request sends back.

- A signed block is created by a separate request. It replaces the messages that it summarizes.
- An unsigned block is created by the API within a response, at a threshold. It follows the summarized messages.

Sources: platform.claude.com/docs/en/build-with-claude, pages compaction-on-demand, compaction-thinking-blocks and
compaction-threshold. Some error messages come from tests against the real API (2026-09-26), others are inferred.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple

import msgspec

from gateway.mock import betas
from gateway.mock.claude_fields import Controls
from gateway.mock.claude_rules import ModelRules
from gateway.mock.context_edits import Compact, Edit, read_field
from gateway.mock.prefixes import Prefix, blocks_of
from gateway.mock.prompts import last_text
from gateway.mock.thinking_blocks import CompactionSeal, identifier, read, sign
from gateway.mock.wire import ApiError, JsonObject

#: Fields of a signed block that a request may send.
_FIELDS: Final = frozenset({"type", "content", "signature", "cache_control", "tool_changes", "encrypted_content"})
#: Characters of the user's last message that a summary quotes.
_QUOTED: Final = 200
_MISPLACED: Final = (
    "`compaction` block must be sent first, in place of the messages it summarizes; remove those messages"
)
_DIGEST_BYTES: Final = 12


class _Summarize(msgspec.Struct, forbid_unknown_fields=True, tag="summarize"):
    instructions: Annotated[str, msgspec.Meta(max_length=16_384)] | None = None


class Signed(NamedTuple):
    """The signed compaction block at the start of a request."""

    seal: CompactionSeal
    identifier: bytes
    signature: str

    @property
    def lineage(self) -> tuple[bytes, ...]:
        """Return the identifiers of the block and of the blocks that it replaces."""
        return (self.identifier, *self.seal.before)


class CompactionContext(NamedTuple):
    """The settings of a request that decide which compaction blocks it may contain."""

    betas: frozenset[str]
    edits: tuple[Edit, ...]
    task_budget: JsonObject


def refuse_request(
    controls: Controls, rules: ModelRules, messages: Sequence[JsonObject], named: frozenset[str]
) -> None:
    """Refuse a compaction request that the API does not accept. `named`: the betas of the request.

    Raises:
        ApiError: 400.
    """
    if betas.ON_DEMAND_COMPACTION not in named:
        raise ApiError(400, f"`compaction` parameter requires anthropic-beta: {betas.ON_DEMAND_COMPACTION}")
    if not rules.compacts:
        raise ApiError(400, "compaction: This model does not support compaction.")
    read_field(controls.compaction, _Summarize, "compaction")
    refused = {
        "context_management": controls.context_management is not None,
        "stop_sequences": bool(controls.stop_sequences),
        "output_config.format": (controls.output_config or {}).get("format") is not None,
        "tool_choice": controls.forces_a_tool,
        "output_config.task_budget.remaining": controls.task_budget.get("remaining") is not None,
    }
    for field, is_given in refused.items():
        if is_given:
            raise ApiError(400, f"{field}: cannot be combined with `compaction`. Remove it from the request.")
    conversation = [message for message in messages if message.get("role") != "system"]
    if not any(blocks_of(message.get("content")) for message in conversation):
        message = "compaction: `messages` has no content to summarize."
        raise ApiError(400, message, code="compaction_nothing_to_summarize")
    if _has_open_call(messages):
        raise ApiError(400, "compaction: The last assistant turn ends in a tool call with no result. Send its result.")


def signed_block(messages: Sequence[JsonObject], context: CompactionContext) -> Signed | None:
    """Return the signed compaction block of a request, or None.

    Raises:
        ApiError: 400, the request must not contain compaction blocks, or a block is not valid.
    """
    sent = [
        (number, index, block)
        for number, message in enumerate(messages)
        for index, block in enumerate(blocks_of(message.get("content")))
        if block.get("type") == "compaction" and block.get("content") is not None
    ]
    for number, index, block in sent:
        path = f"messages.{number}.content.{index}"
        if block.get("signature") is None:
            _refuse_unsigned(path, context)
        else:
            _refuse_signed(path, block, len(sent), context)
    signed = [block for _, _, block in sent if block.get("signature") is not None]
    return _opened(signed[0]) if signed else None


def _refuse_unsigned(path: str, context: CompactionContext) -> None:
    if betas.THRESHOLD_COMPACTION not in context.betas:
        if betas.ON_DEMAND_COMPACTION in context.betas:
            raise ApiError(400, f"{path}: a `compaction` block with `content` requires its `signature`")
        raise ApiError(400, _unexpected(path))
    if not any(isinstance(edit, Compact) for edit in context.edits):
        strategy = "a `compact_20260112` strategy in `context_management.edits`"
        raise ApiError(400, f"`compaction` blocks require {strategy}.")


def _refuse_signed(path: str, block: JsonObject, count: int, context: CompactionContext) -> None:
    if betas.ON_DEMAND_COMPACTION not in context.betas:
        if betas.THRESHOLD_COMPACTION in context.betas:
            needs = f"`signature` requires anthropic-beta: {betas.ON_DEMAND_COMPACTION}"
            raise ApiError(400, f"{path}.compaction: {needs}")
        raise ApiError(400, _unexpected(path))
    if count > 1:
        raise ApiError(400, "messages: A request carries one `compaction` block at most. Send the newest one.")
    if path != "messages.0.content.0":
        raise ApiError(400, _MISPLACED, code="compaction_block_misplaced")
    for key in sorted(block.keys() - _FIELDS):
        raise ApiError(400, f"{path}.compaction.{key}: {betas.EXTRA_INPUTS}")
    if any(isinstance(edit, Compact) for edit in context.edits):
        raise ApiError(400, "context_management: `compact_20260112` cannot run with a signed `compaction` block.")
    if context.task_budget.get("remaining") is not None:
        raise ApiError(400, "output_config.task_budget.remaining: cannot be sent with a signed `compaction` block.")


def _opened(block: JsonObject) -> Signed:
    signature = str(block["signature"])
    seal = read(signature, CompactionSeal)
    if seal is None:
        invalid = "messages.0.content.0: Invalid `signature` in `compaction` block."
        raise ApiError(400, invalid, code="compaction_signature_invalid")
    if seal.content != _digest(str(block["content"]).encode()):
        differs = "messages.0.content.0: The `content` of the `compaction` block differs from the signed one."
        raise ApiError(400, differs, code="compaction_content_mismatch")
    return Signed(seal, identifier(signature), signature)


def digest_before_kept_turns(signed: Signed, prefix: Prefix, messages: Sequence[JsonObject]) -> bytes:
    """Return the digest of the content before the turns that a request keeps after its signed block.

    Thinking in kept turns stays valid if this is the digest of the summarized conversation. It is a different digest in
    these cases:

    - The model does not support it.
    - The system prompt or the tools have changed.
    - The API merges the first kept turn into the last summarized message.
    """
    # The first message contains the compaction block, so it counts only if it contains another block too.
    first = next(
        (message for message in messages if len(blocks_of(message.get("content"))) > (message is messages[0])), {}
    )
    is_separate = first.get("role") not in (signed.seal.role, "system")
    if is_separate and signed.seal.end and signed.seal.start == prefix.start:
        return signed.seal.end
    return _digest(prefix.start + signed.signature.encode())


def signed_summary(
    text: str, prefix: Prefix, messages: Sequence[JsonObject], before: Sequence[bytes], rules: ModelRules
) -> JsonObject:
    """Return a signed block that replaces `messages`, whose content is in `prefix`."""
    roles = [str(message.get("role")) for message in messages if blocks_of(message.get("content"))]
    seal = CompactionSeal(
        content=_digest(text.encode()),
        start=prefix.start,
        end=prefix.digest if rules.prefix_check != "none" else b"",
        role=roles[-1] if roles else "",
        before=list(before),
    )
    return {"type": "compaction", "content": text, "signature": sign(seal)}


def summary_of(messages: Sequence[JsonObject]) -> str:
    """Return the text of a summary; always the same for the same messages."""
    return f"Summary of {len(messages)} messages. The user last said: {last_text(messages)[:_QUOTED]}"


def _unexpected(path: str) -> str:
    return f"{path}: Input tag 'compaction' found using 'type' does not match any of the expected tags"


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _has_open_call(messages: Sequence[JsonObject]) -> bool:
    """Return True if the last assistant message calls a tool whose result is missing."""
    last = next((n for n in range(len(messages) - 1, -1, -1) if messages[n].get("role") == "assistant"), None)
    if last is None:
        return False
    blocks = [block for message in messages[last:] for block in blocks_of(message.get("content"))]
    results = {block.get("tool_use_id") for block in blocks if block.get("type") == "tool_result"}
    return any(block.get("type") == "tool_use" and block.get("id") not in results for block in blocks)
