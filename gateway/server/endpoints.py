"""Forward requests: from an ASGI request to `Gateway.handle` and back.

Each call runs in its own task, which the application keeps. So the call outlives the connection, and is settled even if
the client leaves. The request's task listens for the client to leave, because `send` does not report it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any, Final, Literal

from gateway.call.routing import is_listing
from gateway.call.types import NO_DIRECTIVES, Caller, ClientResponse, Incoming
from gateway.core.errors import (
    GatewayError,
    InternalError,
    InvalidRequest,
    NoWebSocket,
    Overloaded,
    ShuttingDown,
)
from gateway.core.http.headers import BODILESS, EVENTS, Headers, content_type, header
from gateway.core.identity import ID_FORM, is_valid
from gateway.core.record import SHUT_DOWN, STALLED
from gateway.core.values import dataclass
from gateway.dialects import Endpoint, endpoint
from gateway.pipeline.exchange import Gateway
from gateway.pipeline.model_fields import model_fields
from gateway.pipeline.model_list import ModelList
from gateway.server import headers as ours
from gateway.server.auth import Authenticator
from gateway.server.body import BODIES_AT_ONCE, BodyMemory, Disconnected, MemoryPool, discard, read_body
from gateway.server.cycle import WRITE
from gateway.server.keyring import KeyRing
from gateway.server.paths import PathRequest, split_path
from gateway.server.unrecorded import UnrecordedRefusals
from gateway.upstream.read_timeout import ReadTimeout

logger = logging.getLogger("gateway")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

#: the only path that has a WebSocket
SOCKET_PATH: Final = "responses"
#: header of every WebSocket handshake (RFC 6455, section 4.1)
_WEBSOCKET_KEY: Final = b"sec-websocket-key"
#: number of conversations of the largest size that WebSockets may remember at the same time
_LASTING_BODIES: Final = BODIES_AT_ONCE // 4
#: methods for which browsers send no `Origin` to the page's own origin
_READ_METHODS: Final = frozenset({"GET", "HEAD"})
#: after an incomplete body, the next request on the connection could not be read
_CLOSE: Final = (b"connection", b"close")
#: seconds for a call that is cut at shutdown to notify its client and to settle
_CUT_TIMEOUT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of one worker, in bytes and seconds."""

    max_body: int = 64 * 1024 * 1024
    max_concurrency: int = 1024
    body_timeout_s: float = 30.0
    on_disconnect: Literal["drain", "cancel"] = "drain"
    drain_s: float = 30.0
    shutdown_grace_s: float = 30.0
    write_timeout_s: float = 60.0


@dataclass(slots=True)
class _Connection:
    """The state that the task of a call shares with the listener.

    Attributes:
        send: ASGI's `send`.
        listener: the request's task, which listens for the client to leave.
        memory: memory of the request's body.
        has_left: the client has left.
        is_started: the head of the response was sent, or is being sent.
        is_finished: nothing more will be sent.
        is_broken: the response has no end mark, so that the server breaks the connection.
        cut: why the gateway ended the call; an error for the client.
        task: the task of the call.
        is_busy: a provider may be working on the call.
        is_events: the response is a stream of events.
        failure_events: returns the events that end the stream with an error; None if its state is unknown.
        notify_left: notifies the exchange that the client has left.
    """

    send: Send
    listener: asyncio.Task[None] | None
    memory: BodyMemory
    has_left: bool = False
    is_started: bool = False
    is_finished: bool = False
    is_broken: bool = False
    cut: GatewayError | None = None
    task: asyncio.Task[None] | None = None
    is_busy: bool = False
    is_events: bool = False
    failure_events: Callable[[GatewayError], bytes] | None = None
    notify_left: Callable[[], None] | None = None

    def at_work(self, *, is_so: bool) -> None:
        """Note whether a provider may be working on the call. If the client has left, no other provider is called."""
        self.is_busy = is_so
        if self.has_left and not is_so and self.task is not None:
            self.task.cancel()

    def break_off(self) -> None:
        """End the request without an end mark, so that the server breaks the connection.

        An incomplete response must not look complete.
        """
        self.is_finished = self.is_broken = True
        if self.listener is not None:
            self.listener.cancel()


class Forwarder:
    """The ASGI endpoint of all forwarded requests. `close` ends the calls that are still running."""

    def __init__(
        self,
        gateway: Gateway,
        authenticator: Authenticator,
        keys: KeyRing,
        bounds: Bounds,
        unrecorded: UnrecordedRefusals,
    ) -> None:
        self._gateway = gateway
        self._unrecorded = unrecorded
        self._listing = ModelList(
            gateway.routes, gateway.handle, lambda route: model_fields(gateway.facts(route), gateway.planner.policy)
        )
        self._keys = keys
        self._authenticator = authenticator
        self._bounds = bounds
        self._running: dict[asyncio.Task[None], _Connection] = {}
        self._reading = 0
        self._pool = MemoryPool(BODIES_AT_ONCE * bounds.max_body)
        #: a separate pool: memory that is held for an hour must not reduce the memory for calls
        self._lasting = MemoryPool(_LASTING_BODIES * bounds.max_body)
        self._closing = False

    @property
    def running(self) -> int:
        """Return the number of running requests, including those that are read, or drained after the client left."""
        return len(self._running) + self._reading

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        # From here on, a reload waits for this request.
        self._reading += 1
        try:
            received = await self._read_request(scope, receive, send)
        finally:
            self._reading -= 1
        if received is not None:
            await self._run(*received, receive, send)

    async def _read_request(self, scope: Scope, receive: Receive, send: Send) -> tuple[Incoming, BodyMemory] | None:
        """Read the request, and return it with its memory. Return None if it was refused, or the client left."""
        headers: Headers = scope["headers"]
        call_id = self._gateway.new_id()
        request_id = ours.request_id(headers) or call_id
        method, anthropic = scope["method"], b"anthropic-version" in dict(headers)
        target: Endpoint | None = None
        try:
            asked = split_path(scope["raw_path"], method)
            session, path = asked.session, asked.path
            target = endpoint(method, path, anthropic=anthropic)
            if method == "GET" and header(headers, _WEBSOCKET_KEY):
                raise _no_websocket(path)
            caller = await self._caller(scope, session, reads=method in _READ_METHODS)
        except Exception as error:  # noqa: BLE001  # `error_for_client` logs bugs
            await discard(receive, headers)
            target, fault = target or endpoint(method, ""), error_for_client(error, request_id)
            self._unrecorded.note(fault, headers, call_id, target.dialect.name, target.operation)
            await send_error(send, target, fault, request_id)
            return None
        body, decompressed, refused, directives = b"", False, None, NO_DIRECTIVES
        memory = BodyMemory(self._pool)
        try:
            await self._admit(receive, headers)
            bounds = self._bounds
            body, decompressed = await read_body(receive, headers, bounds.max_body, bounds.body_timeout_s, memory)
            requested = target
            if asked.deployment is not None or target.wire is None:
                # The path names the model, or the body says what is asked for.
                read = partial(_body_and_endpoint, asked, method, body, anthropic=anthropic)
                body, requested = await self._gateway.planner.read(len(body), read)
            directives, target = ours.directives(headers), requested
        except Disconnected:
            return None
        except Exception as error:  # noqa: BLE001  # `error_for_client` logs bugs
            # Other requests can use the memory while the error is sent.
            memory.release()
            body, refused = b"", error_for_client(error, request_id)
        except BaseException:
            memory.release()
            raise
        incoming = Incoming(
            call_id, request_id, method, path, asked.query(scope["query_string"]), headers, body,
            decompressed, target, caller, session, self._gateway.clock(), refused, directives,
        )  # fmt: skip
        return incoming, memory

    async def _caller(self, scope: Scope, session: str | None, *, reads: bool) -> Caller:
        if session is not None and not is_valid(session):
            raise InvalidRequest(f"The session id in the path is not valid. An id is {ID_FORM}.")
        if scope.get("client") is None:
            # The connection was reset before it was accepted, so the address of the caller is unknown.
            raise InvalidRequest("The connection was closed before the request was read.")
        await self._keys.ready()
        await self._authenticator.verify_tokens(scope["headers"])
        return self._authenticator.caller(scope["headers"], scope["client"][0], reads=reads)

    async def check_socket(self, scope: Scope, others: int) -> None:
        """Check that a WebSocket may be opened. Each of its calls is checked again.

        `others`: number of other open WebSockets.

        Raises:
            GatewayError: the WebSocket is refused.
        """
        try:
            await self._check_socket(scope, others)
        except GatewayError as fault:
            target = endpoint("GET", SOCKET_PATH)
            call_id = self._gateway.new_id()
            self._unrecorded.note(fault, scope["headers"], call_id, target.dialect.name, target.operation)
            raise

    async def _check_socket(self, scope: Scope, others: int) -> None:
        asked = split_path(scope["raw_path"])
        if asked.path != SOCKET_PATH:
            raise _no_websocket(asked.path)
        self._refuse_if_closing()
        if others >= self._bounds.max_concurrency:
            raise Overloaded(
                f"The limit of {self._bounds.max_concurrency} open WebSockets (server.max_concurrency) is reached. "
                "Try again shortly."
            )
        # Browsers let any page open a WebSocket, and send the origin of the page.
        await self._caller(scope, asked.session, reads=False)

    def memory(self, *, lasting: bool = False) -> BodyMemory:
        """Return memory of the shared pool for a body. `lasting`: of the pool for data that outlasts a call."""
        return BodyMemory(self._lasting if lasting else self._pool)

    def _refuse_if_closing(self) -> None:
        if self._closing:
            raise ShuttingDown("The gateway is stopping. Try again shortly.")

    @property
    def is_stopping(self) -> bool:
        """Return True if all new calls are refused."""
        return self._closing

    def stop_accepting(self) -> None:
        """Refuse all new calls from now on. Running calls continue."""
        self._closing = True

    async def _admit(self, receive: Receive, headers: Headers) -> None:
        if self._closing:
            await discard(receive, headers)
            self._refuse_if_closing()
        if self.running > self._bounds.max_concurrency:
            await discard(receive, headers)
            raise Overloaded(
                f"The limit of {self._bounds.max_concurrency} running calls (server.max_concurrency) is reached. "
                "Try again shortly."
            )

    async def _run(self, incoming: Incoming, memory: BodyMemory, receive: Receive, send: Send) -> None:
        connection = _Connection(send, asyncio.current_task(), memory)
        task = asyncio.get_running_loop().create_task(self._serve(incoming, connection))
        self._running[task] = connection
        connection.task = task
        task.add_done_callback(self._call_ended)
        try:
            if incoming.refused is not None:
                # `receive` would make a client that waits for 100 Continue send its body.
                await asyncio.wait({task})
            while (await receive())["type"] != "http.disconnect":
                pass
        except asyncio.CancelledError:
            if connection.is_broken:
                return
            # The grace period of the server is over. The client gets an error, and this request ends afterwards.
            await self._cut_calls(
                {task}, ShuttingDown("The gateway is stopping and ended this call. Try again shortly.")
            )
            return
        if not connection.is_finished:
            self._client_left(task, connection)

    def _call_ended(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task).memory.release()
        if not task.cancelled() and task.exception() is not None:
            logger.error("a call failed because of a bug", exc_info=task.exception())

    def _client_left(self, task: asyncio.Task[None], connection: _Connection) -> None:
        connection.has_left = True
        if connection.notify_left is not None:
            connection.notify_left()
        if self._bounds.on_disconnect == "cancel" or not connection.is_busy:
            task.cancel()
        else:
            timer = asyncio.get_running_loop().call_later(self._bounds.drain_s, task.cancel)
            task.add_done_callback(lambda _: timer.cancel())

    async def _serve(self, incoming: Incoming, connection: _Connection) -> None:
        try:
            if is_listing(incoming):
                exchange = self._listing.handle(incoming)
            else:
                exchange = self._gateway.handle(incoming, connection.at_work)
                connection.notify_left = exchange.client_left
            async with exchange as reply:
                await self._send_response(reply, incoming, connection)
        except asyncio.CancelledError:
            await self._send_cut(incoming, connection)
            if connection.is_started and not connection.has_left:
                connection.break_off()
        except Exception as error:  # noqa: BLE001  # `error_for_client` logs bugs
            await self._send_bug(incoming, connection, error_for_client(error, incoming.request_id))
        finally:
            connection.is_finished = True
            # Break the reference cycle with the exchange, which would last until the garbage collector runs.
            connection.notify_left = None

    async def _send_response(self, reply: ClientResponse, incoming: Incoming, connection: _Connection) -> None:
        headers = reply.headers + ours.response_headers(reply, incoming.request_id)
        if incoming.refused is not None:
            headers.append(_CLOSE)
        send, body = connection.send, reply.body
        if isinstance(body, bytes):
            if reply.status not in BODILESS:
                headers.append((b"content-length", b"%d" % len(body)))
            await send({"type": "http.response.start", "status": reply.status, "headers": headers})
            connection.is_started = connection.is_finished = True
            await send({"type": "http.response.body", "body": body})
            return
        start: dict[str, Any] = {"type": "http.response.start", "status": reply.status, "headers": headers}
        await send(start)
        connection.is_started, connection.failure_events = True, reply.failure_events
        if reply.direct is not None and WRITE in start:
            reply.direct.write = start[WRITE]
        connection.is_events = reply.is_event_stream or content_type(reply.headers) == EVENTS
        # A client that reads nothing would keep its place among the running calls for ever.
        task = asyncio.current_task()
        stall = ReadTimeout(self._bounds.write_timeout_s, lambda: task and task.cancel(STALLED))
        try:
            async for piece in body:
                # After the client has left, the response is read only for its usage.
                if not connection.has_left:
                    stall.begin()
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    stall.end()
        finally:
            stall.stop()
        if not reply.is_incomplete:
            connection.is_finished = True
            await send({"type": "http.response.body", "body": b""})
            return
        connection.break_off()

    @staticmethod
    async def _send_bug(incoming: Incoming, connection: _Connection, fault: GatewayError) -> None:
        if not connection.is_started:
            try:
                await send_error(connection.send, incoming.endpoint, fault, incoming.request_id)
            except Exception:
                # Sending the head of the response failed. The client must not wait for ever for the rest.
                logger.exception("the error of call %s cannot be sent", incoming.request_id)
            else:
                return
        connection.break_off()

    async def _send_cut(self, incoming: Incoming, connection: _Connection) -> None:
        fault = connection.cut
        if fault is None or connection.has_left:
            return
        if not connection.is_started:
            # If the head of a response was just being sent, the server accepts no second head.
            with contextlib.suppress(RuntimeError):
                await send_error(connection.send, incoming.endpoint, fault, incoming.request_id)
        elif connection.is_events:
            # Only for events: in a file or an image, the error would be treated as a part of it.
            made = connection.failure_events
            events = made(fault) if made else incoming.endpoint.dialect.error_event(fault, incoming.request_id)
            await connection.send({"type": "http.response.body", "body": events, "more_body": True})

    async def _cut_calls(self, tasks: set[asyncio.Task[None]], fault: GatewayError) -> None:
        for task in tasks:
            if task in self._running:
                self._running[task].cut = fault
                task.cancel(SHUT_DOWN)
        if tasks:
            await asyncio.wait(tasks, timeout=_CUT_TIMEOUT_S)

    async def close(self) -> None:
        """End the running calls. When this returns, each call is settled, or has used its time to settle."""
        self.stop_accepting()
        abandoned = {task for task, connection in self._running.items() if connection.has_left}
        if abandoned:
            # The server did not wait for calls whose clients have left. Wait here, to read their usage.
            await asyncio.wait(abandoned, timeout=min(self._bounds.shutdown_grace_s, self._bounds.drain_s))
        await self._cut_calls(
            set(self._running), ShuttingDown("The gateway is stopping and ended this call. Try again shortly.")
        )


def _body_and_endpoint(asked: PathRequest, method: str, body: bytes, *, anthropic: bool) -> tuple[bytes, Endpoint]:
    """Return the body with the model that the path names, and the endpoint of the request."""
    body = asked.named_in(body)
    return body, endpoint(method, asked.path, anthropic=anthropic, body=body)


def _no_websocket(path: str) -> NoWebSocket:
    if path == SOCKET_PATH:
        # A proxy between the client and the gateway did not forward `Upgrade`.
        return NoWebSocket(
            "This WebSocket handshake has no Upgrade header. Configure the proxy in front of the gateway to forward "
            "it, or send requests by POST, with stream: true for events."
        )
    return NoWebSocket("Only /v1/responses supports WebSockets. Send requests by POST.")


def error_for_client(error: Exception, request_id: str) -> GatewayError:
    """Return the error for the client. A bug is logged, and the error contains only the id to find it."""
    if isinstance(error, GatewayError):
        return error
    logger.error("call %s failed because of a bug", request_id, exc_info=error)
    return InternalError(f"The gateway failed. Its operator finds the reason in the log under {request_id}.")


async def send_error(send: Send, target: Endpoint, fault: GatewayError, request_id: str) -> None:
    """Send an error for a call that did not reach the pipeline, and close the connection."""
    body = target.dialect.error(fault, request_id)
    headers: Headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (ours.GATEWAY_REQUEST_ID, request_id.encode()),
        *ours.error_headers(fault),
        _CLOSE,
    ]
    await send({"type": "http.response.start", "status": fault.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
