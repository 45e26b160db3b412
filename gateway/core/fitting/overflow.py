"""What cannot be fitted is refused, by name."""

from __future__ import annotations

from gateway.core.errors import RequestFault


class BudgetTooSmall(RequestFault):
    """What stands beside the messages (tools, a schema, other fields) is over the budget by itself. Sizes in tokens."""

    code = "context_length_exceeded"

    def __init__(self, *, needed: int, budget: int) -> None:
        super().__init__(
            f"Without any message the request takes {needed:,} tokens, for its tools, the form of its answer and "
            f"other long fields, and its context budget is {budget:,}. Offer fewer tools, or raise the budget.",
            param="tools",
        )
        self.needed = needed
        self.budget = budget


class TextTooLong(RequestFault):
    """A request that is one text, of which nothing can be left out, is over its context budget. Sizes in tokens."""

    code = "context_length_exceeded"

    def __init__(self, *, needed: int, budget: int, param: str) -> None:
        super().__init__(
            f"The request takes {needed:,} tokens and its context budget is {budget:,}. Its {param} is one text, of "
            "which nothing is left out: shorten it, or raise the budget.",
            param=param,
        )
        self.needed = needed
        self.budget = budget


class ContextOverflow(RequestFault):
    """What must stay is larger than the limit. Sizes in tokens; `index`: the largest of what must stay, in `array`."""

    code = "context_length_exceeded"

    def __init__(self, *, needed: int, limit: int, index: int, role: str, tokens: int, array: str = "messages") -> None:
        super().__init__(
            f"The messages that must stay take {needed:,} tokens and {max(0, limit):,} are free for them. "
            f"The largest is {array}[{index}] ({role}) with {tokens:,} tokens: shorten it, raise the "
            "context budget (x-context-budget, context.budget), or call a model with a larger window.",
            param=f"{array}[{index}]",
        )
        self.role = role
        self.needed = needed
        self.limit = limit
        self.index = index
        self.tokens = tokens

    def at(self, index: int, array: str) -> ContextOverflow:
        """The same, of what stands there in the request as it came."""
        return ContextOverflow(
            needed=self.needed, limit=self.limit, index=index, role=self.role, tokens=self.tokens, array=array
        )
