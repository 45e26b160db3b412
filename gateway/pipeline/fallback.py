"""Remember what earlier routes returned, and choose the response or error to report."""

from __future__ import annotations

from gateway.core.errors import GatewayError, UpstreamFault
from gateway.upstream.body import AlreadyRead


class EarlierFailures:
    """The failures of the routes that were tried before, of which the caller gets the last useful one."""

    def __init__(self) -> None:
        self.refusal: AlreadyRead | None = None
        self._fault: UpstreamFault | None = None
        self._was_silent = False

    def add(self, failure: AlreadyRead | GatewayError) -> None:
        """Keep a provider's refusal, or its fault if it sent none. Errors of the gateway itself are ignored."""
        if isinstance(failure, AlreadyRead):
            self.refusal, self._fault = failure, None
        elif isinstance(failure, UpstreamFault):
            self.refusal, self._fault = None, failure
            self._was_silent = self._was_silent or failure.was_silent

    def is_enough(self, fault: GatewayError) -> bool:
        """Return True to stop falling back: a second silent provider may already be billing."""
        return isinstance(fault, UpstreamFault) and fault.was_silent and self._was_silent

    def instead_of(self, fault: GatewayError) -> AlreadyRead:
        """Return the refusal for the caller after the last route ended in this fault, or raise the fault.

        If the last provider failed, its fault is reported. If the request only exceeds the context budget of its model,
        which says nothing about the other models, the failure of an earlier provider is reported if there is one.

        Raises:
            GatewayError: the fault, or an earlier one.
        """
        if not isinstance(fault, UpstreamFault):
            if self.refusal is not None:
                return self.refusal
            fault = self._fault or fault
        raise fault
