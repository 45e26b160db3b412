"""What cannot be fitted is refused, by name."""

from __future__ import annotations

from gateway.core.errors import RequestFault


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
