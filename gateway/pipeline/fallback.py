"""Remember what earlier routes returned, and choose the response or error to report."""

from __future__ import annotations

from gateway.core.errors import GatewayError, UpstreamFault
from gateway.upstream.body import AlreadyRead


class EarlierFailures:
    """What the providers that were tried before said instead of an answer: the last thing that its caller can use."""

    def __init__(self) -> None:
        self.answer: AlreadyRead | None = None
        self._fault: UpstreamFault | None = None
        self._was_silent = False

    def heard(self, said: AlreadyRead | GatewayError) -> None:
        """Keep a provider's refusal as it was read, or its fault where it gave none; faults of others are ignored."""
        if isinstance(said, AlreadyRead):
            self.answer, self._fault = said, None
        elif isinstance(said, UpstreamFault):
            self.answer, self._fault = None, said
            self._was_silent = self._was_silent or said.was_silent

    def is_enough(self, fault: GatewayError) -> bool:
        """Whether nobody else is asked after this fault: two providers may be at work, and bill what nobody gets."""
        return isinstance(fault, UpstreamFault) and fault.was_silent and self._was_silent

    def instead_of(self, fault: GatewayError) -> AlreadyRead:
        """What the caller is told where the last provider ended in this fault.

        If that provider failed, its fault. If the request only does not fit its model, which says nothing of the other
        models, what an earlier provider said, if one said anything.

        Raises:
            GatewayError: the fault, or an earlier one.
        """
        if not isinstance(fault, UpstreamFault):
            if self.answer is not None:
                return self.answer
            fault = self._fault or fault
        raise fault
