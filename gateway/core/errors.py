"""Define all errors of the gateway, with HTTP status, code, and whether a retry helps.

An adapter that catches an exception of a library translates it into one of these, once. The dialect decides how an
error is written in a response (`Dialect.error`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class GatewayError(Exception):
    """Base class. `message` says what happened, the number, the limit and the remedy."""

    status: int = 500
    code: ClassVar[str] = "internal_error"
    openai_type: ClassVar[str] = "api_error"
    anthropic_type: ClassVar[str] = "api_error"
    retry: bool = False
    #: seconds a client should wait before the next try; sent as `Retry-After`
    retry_after: int | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        #: facts besides the message, for programs
        self.details: Mapping[str, object] = {}


class InternalError(GatewayError):
    """A bug in the gateway. The log has the details."""


class RequestFault(GatewayError):
    """The caller has to change something."""

    status = 400
    code = "invalid_request"
    openai_type = "invalid_request_error"
    anthropic_type = "invalid_request_error"


class InvalidRequest(RequestFault):
    """The body or a header is invalid."""


class SessionRequired(RequestFault):
    """The call names no session, but needs one because of `sessions.on_missing` or of what it asks for."""

    code = "session_required"


class Unauthenticated(RequestFault):
    """The client key is missing or unknown."""

    status = 401
    code = "invalid_api_key"
    openai_type = "authentication_error"
    anthropic_type = "authentication_error"


class Forbidden(RequestFault):
    """The caller is known, but may not do this."""

    status = 403
    code = "forbidden"
    openai_type = "permission_error"
    anthropic_type = "permission_error"


class UnknownModel(RequestFault):
    """No route and no default provider for this model, or the client key may not use it."""

    status = 404
    code = "model_not_found"
    anthropic_type = "not_found_error"


class NotFound(RequestFault):
    """No such path, session or call."""

    status = 404
    code = "not_found"
    anthropic_type = "not_found_error"


class MethodNotAllowed(RequestFault):
    """The path does not accept this method. No path accepts TRACE and CONNECT."""

    status = 405
    code = "method_not_allowed"


class NoWebSocket(RequestFault):
    """The client asks for a WebSocket on a path without one; only /v1/responses has one."""

    # Codex switches to HTTP at once at this status. At any other status it retries for seconds.
    status = 426
    code = "websocket_unsupported"


class SocketExpired(RequestFault):
    """A WebSocket has been open for the longest allowed time; the next message needs a new one."""

    # At this code of OpenAI clients open another connection.
    code = "websocket_connection_limit_reached"


class SocketFull(RequestFault):
    """Too many responses are requested at once on one WebSocket."""

    code = "websocket_stream_limit_reached"


class PreviousNotFound(RequestFault):
    """The previous response of a request over a WebSocket is unknown; send the whole input."""

    # At this code of OpenAI clients send the whole input.
    code = "previous_response_not_found"


class RequestTimeout(RequestFault):
    """The client stopped sending its body; the connection is closed."""

    # Not 408, because SDKs retry on 408, and a stalled body is no reason to retry.
    code = "body_timeout"


class PayloadTooLarge(RequestFault):
    """The body exceeds `server.max_body_mb`, as sent or after decompression."""

    status = 413
    code = "request_too_large"
    anthropic_type = "request_too_large"


class CompactionUnknown(RequestFault):
    """A compaction item cannot be opened: another gateway made it, or it has expired or was deleted."""

    # OpenAI's code for items that it cannot read.
    code = "invalid_encrypted_content"


class ToolNotAllowed(RequestFault):
    """The request offers tools that the active step, or its sequence, does not allow."""

    code = "tool_not_allowed"


class SessionStopped(RequestFault):
    """The agent repeats itself, or works for too long without user input. `finding`, in the details, says which."""

    code = "session_stopped"

    def __init__(self, message: str, finding: Mapping[str, object]) -> None:
        super().__init__(message)
        self.details = {"runaway": finding}


class BudgetFault(RequestFault):
    """A budget does not allow the call. `budget`, also in the details, holds the arithmetic."""

    def __init__(self, message: str, budget: Mapping[str, int | str | None]) -> None:
        super().__init__(message)
        self.budget = budget
        self.details = {"budget": budget}


class BudgetExhausted(BudgetFault):
    """The budget is too small for this call, even if running calls release all that they reserved."""

    code = "budget_exhausted"
    openai_type = "budget_exceeded"
    anthropic_type = "billing_error"


class BudgetBusy(BudgetFault):
    """Running calls have reserved what is left of the budget; they may release some of it."""

    status = 429
    code = "budget_busy"
    openai_type = "rate_limit_error"
    anthropic_type = "rate_limit_error"
    retry = True
    retry_after = 1


class RateLimited(BudgetFault):
    """A client key has made its allowed number of requests in this minute."""

    status = 429
    code = "rate_limit_exceeded"
    openai_type = "rate_limit_error"
    anthropic_type = "rate_limit_error"
    retry = True


class PriceUnknown(RequestFault):
    """A budget in USD is in force, and the price of the model is unknown."""

    code = "price_unknown"


class NotMetered(RequestFault):
    """A budget is in force, and the call would be billed later, where the gateway cannot see it."""

    code = "not_metered"


class UpstreamFault(GatewayError):
    """The provider could not be reached or did not speak HTTP."""

    status = 502
    code = "upstream_unreachable"
    retry = True
    #: Nothing of the request reached the provider, so a retry costs nothing and may help.
    is_retryable: ClassVar[bool] = False
    #: The whole time for connecting was used, so that the next provider is asked if there is one.
    took_long: ClassVar[bool] = False
    #: The provider was silent after it got the request, so it may work on it and bill it.
    was_silent: ClassVar[bool] = False
    #: The circuit breaker counts it. False if only this request or connection failed.
    is_providers: ClassVar[bool] = True


class UpstreamUnreachable(UpstreamFault):
    """The connection was refused or reset, or the name could not be resolved, before a response began."""


class UpstreamRefused(UpstreamUnreachable):
    """No connection could be made, so nothing was sent."""

    is_retryable = True


class UpstreamHungUp(UpstreamUnreachable):
    """A pooled connection had ended when it was used; the circuit breaker does not count it."""

    is_providers = False


class UpstreamBusy(UpstreamFault):
    """All allowed connections to the provider are in use, and none became free in time. Nothing was sent."""

    status = 503
    code = "upstream_busy"
    openai_type = "overloaded_error"
    anthropic_type = "overloaded_error"
    retry_after = 1
    is_providers = False


class UpstreamOpenCircuit(UpstreamFault):
    """The provider failed repeatedly, so its circuit is open for a while."""

    status = 503
    code = "upstream_open_circuit"
    openai_type = "overloaded_error"
    anthropic_type = "overloaded_error"
    retry_after = 1


class UpstreamProtocolError(UpstreamFault):
    """The provider's response is not valid HTTP, or broke off."""

    code = "upstream_protocol_error"


class UpstreamUnreadable(UpstreamProtocolError):
    """The provider's response has an encoding that the gateway cannot decode. The next one would be as well."""

    # Each try is billed.
    retry = False


class UpstreamUntranslated(UpstreamProtocolError):
    """The translation library failed on this call or on its response."""

    is_providers = False


class UpstreamRedirect(UpstreamFault):
    """The provider redirects the call to another address, which is not followed."""

    code = "upstream_redirect"
    # The next try would be redirected as well.
    retry = False
    is_providers = False


class UpstreamTimeout(UpstreamFault):
    """The provider was silent for longer than `timeout_s` allows."""

    status = 504
    code = "upstream_timeout"
    anthropic_type = "timeout_error"
    # Another try could be billed as well.
    retry = False
    was_silent = True


class UpstreamNotAccepted(UpstreamTimeout):
    """No connection was accepted in time, so nothing was sent."""

    retry = True
    is_retryable = True
    took_long = True
    was_silent = False


class UpstreamNotTaken(UpstreamTimeout):
    """The provider did not accept the whole request in time, so it cannot have processed it."""

    retry = True
    was_silent = False


class GatewayFault(GatewayError):
    """The gateway itself cannot serve right now."""

    status = 503
    retry = True
    retry_after: int | None = 1


class StoreUnavailable(GatewayFault):
    """The store did not respond in time, or reported an error."""

    code = "store_unavailable"


class StoreConflict(StoreUnavailable):
    """Other calls changed the same value in the store at each attempt."""

    code = "store_conflict"


class StoreDamaged(StoreUnavailable):
    """The store works, but its data of an account or a session cannot be read. A retry does not help."""

    code = "store_damaged"
    retry = False
    retry_after = None


class Overloaded(GatewayFault):
    """`server.max_concurrency` calls are already running."""

    code = "overloaded"
    openai_type = "overloaded_error"
    anthropic_type = "overloaded_error"


class SigningKeysUnavailable(GatewayFault):
    """A token cannot be checked, because the keys of the identity provider cannot be read."""

    code = "signing_keys_unavailable"
    retry_after = 10


class ShuttingDown(GatewayFault):
    """The gateway is stopping."""

    code = "shutting_down"
    openai_type = "overloaded_error"
    anthropic_type = "overloaded_error"


class ConfigError(Exception):
    """The configuration is wrong. One line per problem, each with its key path first. Never raised at run time."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
