"""Send a call to one provider, and again in another form if a refusal says how.

`pipeline/exchange.py` chooses the provider, and the next one if this one fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from gateway.call.recent_models import OutputRules, RecentModels
from gateway.call.state import CLIENT_CLOSED, CallState
from gateway.context.repair import Recomposer
from gateway.context.request import RequestComposer
from gateway.core.errors import UpstreamProtocolError
from gateway.core.http.headers import ProviderAddress, is_success, request_headers
from gateway.core.http.redirects import check_redirect
from gateway.core.http.request import Outgoing
from gateway.core.http.retry_policy import EXPLAINED, TOO_LARGE
from gateway.core.ports import ReadBody, Upstream, UpstreamReply
from gateway.dialects.base import Call
from gateway.dialects.closing import TASK_BUDGET_BETA, refused_field
from gateway.dialects.length_error import length_error
from gateway.dialects.limit_error import LimitRefusal, OutputRule, limit_refusal
from gateway.dialects.thinking_error import ThinkingRefusal, thinking_refusal
from gateway.dialects.thinking_fields import BINDING_BETA, with_beta
from gateway.dialects.tool_changes import TOOL_CHANGES_BETA
from gateway.pipeline.early_refusal import BegunResponse, is_event_stream, is_whole, looked_at, looked_at_whole
from gateway.pipeline.response import read_error
from gateway.steps.enforcement import Steps
from gateway.upstream.body import AlreadyRead, without_compression_headers

#: maximum number of other ways to set the output limit of a call: another field, and a lower number
_MOST_RULES: Final = 2


class Dispatcher:
    """Send calls to the provider of their current route. One instance serves all calls."""

    def __init__(
        self,
        *,
        providers: Mapping[str, ProviderAddress],
        upstreams: Mapping[str, Upstream],
        composer: RequestComposer,
        recomposer: Recomposer,
        read_body: ReadBody,
        steps: Steps,
        clock: Callable[[], float],
    ) -> None:
        self._providers = providers
        self._upstreams = upstreams
        self._composer = composer
        self._recomposer = recomposer
        self._read_body = read_body
        self._steps = steps
        self._clock = clock
        self._output_rules = OutputRules(clock)
        #: models that refused `stream_options.include_usage`
        self._no_stream_usage = RecentModels(clock)

    async def send(self, state: CallState, call: Call) -> UpstreamReply:
        """Send the call, and again for each change that a refusal asks for.

        The changes are:

        - leave out `stream_options`
        - restrict the tools in another way
        - use another field for the output limit, or a lower limit
        - trim the request further
        - leave out a field of a closing call
        - leave out thinking blocks that the provider does not accept
        """
        route = state.routing.route
        asked_usage = ask_usage = call.stream and not call.usage_asked and route not in self._no_stream_usage
        is_fitted, repaired, first = False, set[str](), None
        rules = [self._output_rules.of(route, is_stream=call.stream)]
        while True:
            state.dispatch.is_too_long, state.dispatch.output_rule = False, rules[-1]
            response = await self._looked_at(
                state, call, await self._attempt(state, call, ask_usage=ask_usage), is_fitted=is_fitted
            )
            answer = (
                response.refusal if isinstance(response, BegunResponse) and response.refusal is not None else response
            )
            if is_success(answer.status):
                self._learn(state, call, is_usage_refused=asked_usage and not ask_usage, has_rule=len(rules) > 1)
                if repaired:
                    await self._recomposer.accepted(state)
                return answer
            if answer.status not in EXPLAINED:
                return _passed_on(state, response, answer)
            body = await read_error(answer)
            refusal = AlreadyRead(answer.status, without_compression_headers(answer.headers), body)
            found = length_error(answer.status, body)
            state.dispatch.is_too_long = found is not None or answer.status == TOO_LARGE
            if ask_usage and (b"stream_options" in body or b"include_usage" in body):
                ask_usage = False
            elif _leaves_out(state, body) or await self._restricted_again(state, call, body):
                pass
            elif (rule := self._other_rule(state, call, limit_refusal(answer.status, body), len(rules))) is not None:
                rules.append(rule)
            elif found is not None and not is_fitted and await self._recomposer.trim_again(state, found):
                is_fitted = True
            elif await self._repaired(state, call, thinking_refusal(answer.status, body), repaired):
                first = first or refusal
            else:
                # If the repair was not accepted either, the client gets the first refusal.
                return _passed_on(state, response, first or refusal)
            await state.dispatch.hang_up()

    async def _restricted_again(self, state: CallState, call: Call, refusal: bytes) -> bool:
        """Restrict the tools in another way after a refusal; return False if the refusal is about something else."""
        if not await self._read_body(len(call.body), partial(self._steps.restrict_again, state, refusal)):
            return False
        # The restricted request has fewer tokens.
        await self._composer.compose(state, call, self._composer.last_try(state))
        return True

    def _learn(self, state: CallState, call: Call, *, is_usage_refused: bool, has_rule: bool) -> None:
        """Remember what the provider refused, after it accepted the call without it.

        Only the success proves that the gateway's own field was the reason. An error may also repeat words of the
        client.
        """
        route = state.routing.route
        if is_usage_refused:
            self._no_stream_usage.add(route)
            state.notes["stream_usage"] = "refused by the provider"
        if has_rule:
            self._output_rules.remember(route, state.dispatch.output_rule, is_stream=call.stream)
        self._steps.accepted(state)

    def _other_rule(self, state: CallState, call: Call, refusal: LimitRefusal | None, tries: int) -> OutputRule | None:
        """Return how to set the output limit after a refusal, or None if the gateway does not set it.

        `tries`: how often the call was sent with another rule, counting the first.
        """
        provider = self._providers[state.routing.route.provider]
        sent = self._composer.limit_to_send(state, call, provider) if refusal is not None else None
        is_other_format = refusal is not None and refusal.field_to_use and state.incoming.endpoint.wire != "chat"
        if refusal is None or sent is None or tries > _MOST_RULES or is_other_format:
            return None
        return state.dispatch.output_rule.after(refusal, sent.tokens)

    async def _repaired(self, state: CallState, call: Call, refusal: ThinkingRefusal | None, before: set[str]) -> bool:
        """Return whether to send again without refused thinking; once for each kind of refusal."""
        if refusal is None or refusal.kind in before:
            return False
        before.add(refusal.kind)
        return await self._recomposer.repair_thinking(state, call, refusal)

    async def _looked_at(
        self, state: CallState, call: Call, answer: UpstreamReply, *, is_fitted: bool
    ) -> UpstreamReply:
        """Return the response; read its first event, or its beginning, if a refusal in it could still be repaired.

        That is the case if another route is left, or the request can be trimmed further.
        """
        is_of_use = state.routing.has_next or (not is_fitted and self._recomposer.may_be_too_long(state))
        if is_of_use and is_event_stream(answer):
            reader = state.dialect.reader(call, drop_usage=False)
            return await looked_at(answer, reader, is_fetched_later=state.is_fetched_later)
        if is_of_use and is_whole(answer):
            return await looked_at_whole(answer, state.dialect.answer)
        return answer

    async def _attempt(self, state: CallState, call: Call, *, ask_usage: bool) -> UpstreamReply:
        incoming = state.incoming
        provider, thinking = self._providers[state.routing.route.provider], state.context.thinking
        headers = request_headers(
            incoming.headers,
            provider,
            client_key_headers=incoming.caller.key_headers,
            decompressed=incoming.decompressed,
        )
        if thinking is not None and thinking.provider_drops:
            headers = with_beta(headers, BINDING_BETA)
        if state.context.adds_tool_changes:
            headers = with_beta(headers, TOOL_CHANGES_BETA)
        if self._composer.adds_task_budget(state, call, provider):
            headers = with_beta(headers, TASK_BUDGET_BETA)
        compose = partial(self._composer.body, state, call, provider, ask_usage=ask_usage)
        outgoing = Outgoing(
            incoming.method,
            provider.url(incoming.path, incoming.query),
            headers,
            await self._read_body(len(call.body), compose),
            state.notes.__setitem__,
            state.dispatch.work,
            incoming.call_id,
            state.routing.has_next,
        )
        if state.dispatch.sent_at is None:
            state.dispatch.sent_at = self._clock()
        state.dispatch.head_at, state.response.status = None, CLIENT_CLOSED
        sending = self._upstreams[state.routing.route.provider].send(outgoing)
        answer = await sending.__aenter__()
        state.dispatch.open_request = sending
        state.dispatch.head_at = self._clock()
        if not 200 <= answer.status <= 599:  # noqa: PLR2004  # 1xx are no final responses, and nothing above 599 is a status
            raise UpstreamProtocolError(f"The provider sent the status {answer.status}, which HTTP does not define.")
        if incoming.endpoint.metered or incoming.body:
            check_redirect(provider.name, outgoing.url, answer.status, answer.headers)
        state.response.status = answer.status
        return answer


def _leaves_out(state: CallState, body: bytes) -> bool:
    """Leave out the field of a closing call that the provider refused; return False if it refused none."""
    closing = state.budget.closing
    field = refused_field(body, closing.refused) if closing is not None else None
    if closing is None or field is None:
        return False
    closing.refused |= {field}
    return True


def _passed_on(state: CallState, response: UpstreamReply, refusal: UpstreamReply) -> UpstreamReply:
    """Return the response to use after the provider refused the request.

    If another route is left, this is the refusal. Otherwise a response with status 200 that is a refusal, or begins
    with one, is passed on unchanged.
    """
    return refusal if state.routing.has_next or not isinstance(response, BegunResponse) else response
