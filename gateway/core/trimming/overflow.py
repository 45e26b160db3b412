"""Define the three errors for requests that cannot be trimmed enough."""

from __future__ import annotations

from gateway.core.counting.largest_part import RequestPart
from gateway.core.errors import RequestFault


class BudgetTooSmall(RequestFault):
    """The overhead of the request (system prompt, tools, schema, other fields) alone exceeds the budget.

    Sizes are in tokens. `part`: the largest part of the overhead, if it is known.
    """

    code = "context_length_exceeded"

    def __init__(self, *, needed: int, budget: int, part: RequestPart | None = None) -> None:
        remedy = "Offer fewer tools" if part is None else f"The largest is {_describe_part(part)}: shorten it"
        super().__init__(
            f"The request takes {needed:,} tokens without its messages (system prompt, tools, schema, other long "
            f"fields), and its context budget is {budget:,}. {remedy}, or raise the budget.",
            param="tools" if part is None else part.param,
        )
        self.needed = needed
        self.budget = budget

    def with_part(self, part: RequestPart) -> BudgetTooSmall:
        """Return the same error, which names the largest part of the overhead."""
        return BudgetTooSmall(needed=self.needed, budget=self.budget, part=part)


class TextTooLong(RequestFault):
    """The request is one text, which cannot be trimmed, and exceeds its context budget.

    Sizes are in tokens. `part`: the largest part of the overhead, if it is larger than the text.
    """

    code = "context_length_exceeded"

    def __init__(self, *, needed: int, budget: int, param: str, part: RequestPart | None = None) -> None:
        reason = f"Its {param} is one text, which is never trimmed: shorten it"
        if part is not None:
            reason = f"Most of that is {_describe_part(part)}, which is never trimmed: shorten it"
        super().__init__(
            f"The request takes {needed:,} tokens and its context budget is {budget:,}. {reason}, or raise the budget.",
            param=param if part is None else part.param,
        )
        self.needed = needed
        self.budget = budget


class ContextOverflow(RequestFault):
    """The messages that cannot be left out exceed the limit.

    Sizes are in tokens. `index`: the largest message that must stay, in `array`; `part`: the largest part of the
    overhead, if it is larger than that message.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        *,
        needed: int,
        limit: int,
        index: int,
        role: str,
        tokens: int,
        array: str = "messages",
        part: RequestPart | None = None,
    ) -> None:
        place = f"{array}[{index}]"
        largest = f"The largest is {place} ({role}) with {tokens:,} tokens"
        if part is not None:
            largest = f"Larger than each message is {_describe_part(part)}"
        super().__init__(
            f"The messages that must stay take {needed:,} tokens and {max(0, limit):,} are free for them. "
            f"{largest}: shorten it, raise the context budget (x-context-budget, context.budget), or call a model with "
            "a larger window.",
            param=place if part is None else part.param,
        )
        self.role = role
        self.needed = needed
        self.limit = limit
        self.index = index
        self.tokens = tokens
        self.array = array

    def at(self, index: int, array: str) -> ContextOverflow:
        """Return the same error with the place of the message in the client's request."""
        return ContextOverflow(
            needed=self.needed, limit=self.limit, index=index, role=self.role, tokens=self.tokens, array=array
        )

    def with_part(self, part: RequestPart) -> ContextOverflow:
        """Return the same error naming a part of the overhead, or this error if the largest message is larger."""
        if part.tokens <= self.tokens:
            return self
        return ContextOverflow(
            needed=self.needed, limit=self.limit, index=self.index, role=self.role, tokens=self.tokens,
            array=self.array, part=part,
        )  # fmt: skip


def _describe_part(part: RequestPart) -> str:
    return f"{part.param} with {part.tokens:,} tokens"
