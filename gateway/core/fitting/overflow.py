"""What cannot be fitted is refused, by name."""

from __future__ import annotations

from gateway.core.errors import RequestFault


class BudgetTooSmall(RequestFault):
    """What stands beside the messages (tools, a schema) is over the context budget by itself. Sizes in tokens."""

    code = "context_length_exceeded"

    def __init__(self, *, needed: int, budget: int) -> None:
        super().__init__(
            f"Without any message the request takes {needed:,} tokens, for its tools and the form of its answer, and "
            f"its context budget is {budget:,}. Offer fewer tools, or raise the budget.",
            param="tools",
        )
        self.needed = needed
        self.budget = budget


class ContextOverflow(RequestFault):
    """What must stay is larger than the limit. Sizes in tokens; `index` is the largest message that must stay."""

    code = "context_length_exceeded"

    def __init__(self, *, needed: int, limit: int, index: int, role: str, tokens: int) -> None:
        super().__init__(
            f"The messages that must stay take {needed:,} tokens and {limit:,} are free for them. "
            f"The largest is messages[{index}] ({role}) with {tokens:,} tokens; shorten it or raise the limit.",
            param=f"messages[{index}]",
        )
        self.needed = needed
        self.limit = limit
        self.index = index
        self.tokens = tokens
