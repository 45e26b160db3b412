"""Refuse requests whose thinking, tool choice, sampling or task budget a Claude model does not accept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from gateway.mock import betas
from gateway.mock.binding import Mismatch
from gateway.mock.claude_fields import Controls, has_tool_result
from gateway.mock.claude_rules import ModelRules
from gateway.mock.context_edits import read_field
from gateway.mock.prefixes import blocks_of, is_thinking
from gateway.mock.wire import ApiError, JsonObject

_ADVICE: Final = 'Use "thinking.type.adaptive" and "output_config.effort" to control thinking behavior.'
#: Efforts that need thinking.
HIGH_EFFORTS: Final = frozenset({"xhigh", "max"})
_PREFILL: Final = (
    "This model does not support assistant message prefill. The conversation must end with a user message."
)


class _TaskBudget(msgspec.Struct, forbid_unknown_fields=True, tag="tokens"):
    total: int
    remaining: Annotated[int, msgspec.Meta(ge=0)] | None = None


def mismatch(controls: Controls, rules: ModelRules, *, is_old_account: bool) -> Mismatch:
    """Return how the request and the account treat a block that fails the prefix check."""
    binding = (controls.thinking or {}).get("block_binding")
    chosen = binding.get("prefix_mismatch_behavior") if isinstance(binding, dict) else None
    if chosen is not None:
        return "drop_block" if chosen == "drop_block" else "error"
    return "allow" if is_old_account and rules.prefix_check == "new" else "error"


def refuse_thinking(controls: Controls, rules: ModelRules, named: frozenset[str]) -> None:
    """Refuse a thinking configuration that the model does not accept. `named`: the betas of the request.

    Raises:
        ApiError: 400.
    """
    thinking = controls.thinking
    if thinking is None:
        return
    mode = controls.mode(rules)
    if mode not in rules.modes:
        raise ApiError(400, f'"thinking.type.{mode}" is not supported for this model. {_ADVICE}')
    if mode in ("disabled", "between_tools") and rules.off_needs_low_effort:
        effort = (controls.output_config or {}).get("effort")
        if effort in HIGH_EFFORTS:
            raise ApiError(400, f'"thinking.type.{mode}" is not supported with effort "{effort}" for this model.')
    if mode == "between_tools":
        for key in thinking:
            if key != "type":
                raise ApiError(400, f"thinking.between_tools.{key}: {betas.EXTRA_INPUTS}")
    _refuse_binding(thinking.get("block_binding"), mode, named)


def _refuse_binding(binding: object, mode: str, named: frozenset[str]) -> None:
    if binding is None:
        return
    path = f"thinking.{mode}.block_binding"
    if mode == "disabled" or betas.BINDING not in named:
        raise ApiError(400, f"{path}: {betas.EXTRA_INPUTS}")
    if not isinstance(binding, dict):
        raise ApiError(400, f"{path}: Input should be an object")
    for key, value in binding.items():
        if key != "prefix_mismatch_behavior":
            raise ApiError(400, f"{path}.{key}: {betas.EXTRA_INPUTS}")
        if value not in ("error", "drop_block", None):
            raise ApiError(400, f"{path}.{key}: Input should be 'error' or 'drop_block'")


def refuse_forced_choice(controls: Controls, rules: ModelRules) -> None:
    """Refuse a request that forces a tool call, if the model does not accept it.

    Raises:
        ApiError: 400.
    """
    if not controls.forces_a_tool:
        return
    if rules.forced_choice == "refused":
        raise ApiError(400, 'tool_choice: type "tool" and "any" are not supported for this model.')
    if rules.forced_choice == "not_thinking" and controls.mode(rules) != "disabled":
        raise ApiError(400, "Thinking may not be enabled when tool_choice forces tool use.")


def refuse_sampling(controls: Controls, rules: ModelRules) -> None:
    """Refuse sampling parameters that the model does not accept.

    Raises:
        ApiError: 400.
    """
    if rules.sampling is None:
        return
    given = {"temperature": controls.temperature, "top_p": controls.top_p, "top_k": controls.top_k}
    for name, value in given.items():
        if value is not None and value not in rules.sampling[name]:
            raise ApiError(400, f"`{name}` is deprecated for this model.")
    if not rules.sampling_together and controls.temperature is not None and controls.top_p is not None:
        raise ApiError(400, "`temperature` and `top_p` cannot both be specified for this model. Please use only one.")


def refuse_task_budget(controls: Controls, rules: ModelRules, named: frozenset[str]) -> None:
    """Refuse a task budget without its beta, of a wrong type, or too small for the model.

    Raises:
        ApiError: 400.
    """
    path = "output_config.task_budget"
    value = (controls.output_config or {}).get("task_budget")
    if value is None:
        return
    if betas.TASK_BUDGETS not in named:
        raise ApiError(400, f"{path}: {betas.EXTRA_INPUTS}")
    budget = read_field(value, _TaskBudget, path)
    if rules.least_task_budget is None:
        raise ApiError(400, f"{path}: This model does not support task budgets.")
    if budget.total < rules.least_task_budget:
        raise ApiError(400, f"`task_budget.total` must be at least {rules.least_task_budget:,} tokens for this model")


def refuse_messages(controls: Controls, rules: ModelRules, messages: Sequence[JsonObject]) -> None:
    """Refuse a prefilled response and, if the rules require it, an open tool round without its thinking.

    Raises:
        ApiError: 400.
    """
    if not rules.prefill and messages and messages[-1].get("role") == "assistant" and not _ends_compacted(messages):
        raise ApiError(400, _PREFILL)
    if not rules.keeps_open_round or controls.mode(rules) not in ("adaptive", "enabled"):
        return
    number = len(messages) - 2
    if number < 0 or not has_tool_result(messages) or messages[number].get("role") != "assistant":
        return
    first = next(iter(blocks_of(messages[number].get("content"))), {})
    if not is_thinking(first):
        raise ApiError(
            400,
            f"messages.{number}.content.0.type: Expected `thinking` or `redacted_thinking`, but found "
            f"`{first.get('type')}`. When `thinking` is enabled, a final `assistant` message must start with a "
            "thinking block (preceeding the lastmost set of `tool_use` and `tool_result` blocks).",
        )


def _ends_compacted(messages: Sequence[JsonObject]) -> bool:
    """Return True if the last message ends with a compaction. The model then responds to the summarized messages."""
    blocks = blocks_of(messages[-1].get("content"))
    return bool(blocks) and blocks[-1].get("type") == "compaction"
