"""Let a session end with a result: the last call that its budget allows.

A share of each limit of a session is kept for its closing call. When a call no longer fits into the rest, it becomes
the closing call: it may use that share, it calls no tools, and an instruction asks the model to finish. An account
remembers its closing call by the mark that `gateway.core.ledger.arithmetic.closing_mark` returns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

from gateway.core.ledger.arithmetic import AccountKey, Balance, Claim

#: the last instruction of a closing call if the configuration has none
CLOSING_MESSAGE: Final = (
    "The budget of this session is used up, and this is its last response. About {tokens} tokens are left for it. Do "
    "not call tools. Give the result as far as you have it, and say briefly what remains to be done."
)
_PLACEHOLDER: Final = "{tokens}"
#: digits of the largest number in place of the placeholder
_MOST_DIGITS: Final = 9
#: Upper bounds for the tokens of an instruction: bytes of text for each token, and tokens of the message around it.
#: English has four bytes for each token, Chinese three for one or two.
_BYTES_PER_TOKEN: Final = 2
_FRAME: Final = 24


class ClosingPolicy(NamedTuple):
    """The settings under `budget.closing`: the share of each limit that is kept, and the last instruction."""

    reserve: float
    message: str = CLOSING_MESSAGE

    @property
    def most_tokens(self) -> int:
        """Return the most input tokens that the instruction can have."""
        size = len(self.message.encode("utf-8", "surrogatepass")) + _MOST_DIGITS * self.message.count(_PLACEHOLDER)
        return size // _BYTES_PER_TOKEN + _FRAME

    def instruction(self, output_tokens: int | None) -> str:
        """Return the instruction for a response of at most so many tokens; None if nothing limits them."""
        number = "many" if output_tokens is None else f"{min(output_tokens, 10**_MOST_DIGITS - 1)}"
        return self.message.replace(_PLACEHOLDER, number)


def closing_claims(claims: tuple[Claim, ...], session: AccountKey) -> tuple[Claim, ...]:
    """Return the claims of a closing call. It may use what is kept of its own session's budget only."""
    return tuple([replace(claim, is_closing=True) if claim.key == session else claim for claim in claims])


def closing_balances(balances: tuple[Balance, ...], session: AccountKey) -> tuple[Balance, ...]:
    """Return the balances of these claims, as they were read for a normal call."""
    return tuple([replace(one, closing_share=0.0) if one.key == session else one for one in balances])
