"""Forward requests: from an ASGI request to `Gateway.handle` and back.

Each call runs in a task of its own that the application keeps, so that it outlives the connection: a client that leaves
must not take the settlement with it. The request's own task meanwhile listens for the client to leave, since `send`
says nothing of it.
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
from gateway.pipeline.model_list import ModelList
from gateway.server import headers as ours
from gateway.server.auth import Authenticator
from gateway.server.body import BODIES_AT_ONCE, BodyMemory, Disconnected, MemoryPool, discard, read_body
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
#: what every opening handshake has (RFC 6455, section 4.1)
_WEBSOCKET: Final = b"sec-websocket-key"
#: conversations of the size of the largest body that WebSockets may remember at the same time
_LASTING_AT_ONCE: Final = BODIES_AT_ONCE // 4
#: methods with which browsers send no `Origin` to the page's own origin
_READING: Final = frozenset({"GET", "HEAD"})
#: a body that was not read to its end would stand in front of the next request
_CLOSE: Final = (b"connection", b"close")
#: how long a call that is cut at shutdown may take to tell its client and to settle
_CUT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of one worker. Bytes and seconds."""

    max_body: int = 64 * 1024 * 1024
    max_concurrency: int = 1024
    body_timeout_s: float = 30.0
    on_disconnect: Literal["drain", "cancel"] = "drain"
    drain_s: float = 30.0
    shutdown_grace_s: float = 30.0
    write_timeout_s: float = 60.0


@dataclass(slots=True)
class _Connection:
    """What the task of a call and the listener share.

    Attributes:
        listener: the request's own task, which listens for the client to leave.
        memory: what the request's body takes.
        gone: the client has left.
        started: the head of the answer went out, or is on its way.
        finished: nothing more will be sent.
        broken: the answer ends without its end mark, so that the server breaks the connection.
        cut: why the gateway ended the call, for its client.
        task: that of the call.
        busy: a provider may be at work on the call.
        is_events: the answer is a stream of events.
        failure_events: makes the events that end the stream with an error; None where nothing is known of its state.
        left: tells the exchange that the client has left.
    """

    send: Send
    listener: asyncio.Task[None] | None
    memory: BodyMemory
    gone: bool = False
    started: bool = False
    finished: bool = False
    broken: bool = False
    cut: GatewayError | None = None
    task: asyncio.Task[None] | None = None
    busy: bool = False
    is_events: bool = False
    failure_events: Callable[[GatewayError], bytes] | None = None
    left: Callable[[], None] | None = None

    def at_work(self, *, is_so: bool) -> None:
        """Note whether a provider may be at work on the call. If the client has left, no other provider is asked."""
        self.busy = is_so
        if self.gone and not is_so and self.task is not None:
            self.task.cancel()

    def break_off(self) -> None:
        """Let the request return without an end, so that the server breaks the connection.

        What is incomplete must not look complete.
        """
        self.finished = self.broken = True
        if self.listener is not None:
            self.listener.cancel()


class Forwarder:
    """The ASGI endpoint of everything that is forwarded. `close` ends what is still running."""

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
        self._listing = ModelList(gateway.routes, gateway.handle)
        self._keys = keys
        self._authenticator = authenticator
        self._bounds = bounds
        self._running: dict[asyncio.Task[None], _Connection] = {}
        self._reading = 0
        self._pool = MemoryPool(BODIES_AT_ONCE * bounds.max_body)
        #: of its own: what rests for an hour must take no room from calls
        self._lasting = MemoryPool(_LASTING_AT_ONCE * bounds.max_body)
        self._closing = False

    @property
    def running(self) -> int:
        """Requests under way: being read, forwarded, or read to their end for a client that left."""
        return len(self._running) + self._reading

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        # From here on a reload waits for it.
        self._reading += 1
        try:
            begun = await self._begun(scope, receive, send)
        finally:
            self._reading -= 1
        if begun is not None:
            await self._run(*begun, receive, send)

    async def _begun(self, scope: Scope, receive: Receive, send: Send) -> tuple[Incoming, BodyMemory] | None:
        """The request, read to its end, and the memory it takes; None where there is nobody to serve any more."""
        headers: Headers = scope["headers"]
        call_id = self._gateway.new_id()
        request_id = ours.request_id(headers) or call_id
        method, anthropic = scope["method"], b"anthropic-version" in dict(headers)
        target: Endpoint | None = None
        try:
            asked = split_path(scope["raw_path"], method)
            session, path = asked.session, asked.path
            target = endpoint(method, path, anthropic=anthropic)
            if method == "GET" and header(headers, _WEBSOCKET):
                raise _no_socket(path)
            caller = await self._caller(scope, session, reads=method in _READING)
        except Exception as error:  # noqa: BLE001  # bugs are logged where they become faults
            await discard(receive, headers)
            target, fault = target or endpoint(method, ""), as_fault(error, request_id)
            self._unrecorded.note(fault, headers, call_id, target.dialect.name, target.operation)
            await send_fault(send, target, fault, request_id)
            return None
        body, decompressed, refused, directives = b"", False, None, NO_DIRECTIVES
        memory = BodyMemory(self._pool)
        try:
            await self._admit(receive, headers)
            bounds = self._bounds
            body, decompressed = await read_body(receive, headers, bounds.max_body, bounds.body_timeout_s, memory)
            read = partial(_named, asked, method, body, anthropic=anthropic)
            body, found = await self._gateway.planner.read(len(body), read)
            directives, target = ours.directives(headers), found
        except Disconnected:
            return None
        except Exception as error:  # noqa: BLE001  # bugs are logged where they become faults
            # Others may have its room while it is answered.
            memory.release()
            body, refused = b"", as_fault(error, request_id)
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
            raise InvalidRequest(f"A session id in the path is {ID_FORM}.")
        if scope.get("client") is None:
            # Reset before it was accepted: nobody waits for an answer, and who called cannot be told any more.
            raise InvalidRequest("The connection was closed before the request was read.")
        await self._keys.ready()
        return self._authenticator.caller(scope["headers"], scope["client"][0], reads=reads)

    async def check_socket(self, scope: Scope, others: int) -> None:
        """Whether a WebSocket may be opened for calls, each of which is checked again; `others`: that are open.

        Raises:
            GatewayError: it may not.
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
            raise _no_socket(asked.path)
        self._refuse_if_closing()
        if others >= self._bounds.max_concurrency:
            raise Overloaded(
                f"{self._bounds.max_concurrency} WebSockets are open (server.max_concurrency). Try again shortly."
            )
        # Browsers let any page open one, and say whose it is.
        await self._caller(scope, asked.session, reads=False)

    def memory(self, *, lasting: bool = False) -> BodyMemory:
        """A share of what all bodies together may take, for one beside its call; `lasting`: for what outlasts calls."""
        return BodyMemory(self._lasting if lasting else self._pool)

    def _refuse_if_closing(self) -> None:
        if self._closing:
            raise ShuttingDown("The gateway is stopping. Try again shortly.")

    @property
    def takes_no_more(self) -> bool:
        """Whether all calls that come are refused."""
        return self._closing

    def take_no_more(self) -> None:
        """Refuse all calls that come from now on; those under way go on."""
        self._closing = True

    async def _admit(self, receive: Receive, headers: Headers) -> None:
        if self._closing:
            await discard(receive, headers)
            self._refuse_if_closing()
        if self.running > self._bounds.max_concurrency:
            await discard(receive, headers)
            raise Overloaded(
                f"{self._bounds.max_concurrency} calls are under way (server.max_concurrency). Try again shortly."
            )

    async def _run(self, incoming: Incoming, memory: BodyMemory, receive: Receive, send: Send) -> None:
        connection = _Connection(send, asyncio.current_task(), memory)
        task = asyncio.get_running_loop().create_task(self._serve(incoming, connection))
        self._running[task] = connection
        connection.task = task
        task.add_done_callback(self._ended)
        try:
            if incoming.refused is not None:
                # Listening would ask a client that waits for 100 Continue to send its body.
                await asyncio.wait({task})
            while (await receive())["type"] != "http.disconnect":
                pass
        except asyncio.CancelledError:
            if connection.broken:
                return
            # The server's patience is over: the call is told why, and this request ends when it has.
            await self._cut({task}, ShuttingDown("The gateway is stopping and cut this answer. Try again shortly."))
            return
        if not connection.finished:
            self._client_left(task, connection)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task).memory.release()
        if not task.cancelled() and task.exception() is not None:
            logger.error("a call ended in a bug", exc_info=task.exception())

    def _client_left(self, task: asyncio.Task[None], connection: _Connection) -> None:
        connection.gone = True
        if connection.left is not None:
            connection.left()
        if self._bounds.on_disconnect == "cancel" or not connection.busy:
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
                connection.left = exchange.client_left
            async with exchange as reply:
                await self._answer(reply, incoming, connection)
        except asyncio.CancelledError:
            await self._tell_cut(incoming, connection)
            if connection.started and not connection.gone:
                connection.break_off()
        except Exception as error:  # noqa: BLE001  # bugs are logged where they become faults
            await self._tell_bug(incoming, connection, as_fault(error, incoming.request_id))
        finally:
            connection.finished = True
            # The exchange holds the connection: the two would keep each other until the garbage collector runs.
            connection.left = None

    async def _answer(self, reply: ClientResponse, incoming: Incoming, connection: _Connection) -> None:
        headers = reply.headers + ours.of_reply(reply, incoming.request_id)
        if incoming.refused is not None:
            headers.append(_CLOSE)
        send, body = connection.send, reply.body
        if isinstance(body, bytes):
            if reply.status not in BODILESS:
                headers.append((b"content-length", b"%d" % len(body)))
            await send({"type": "http.response.start", "status": reply.status, "headers": headers})
            connection.started = connection.finished = True
            await send({"type": "http.response.body", "body": body})
            return
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        connection.started, connection.failure_events = True, reply.failure_events
        connection.is_events = reply.is_events or content_type(reply.headers) == EVENTS
        # A client that takes nothing would keep its place among the calls under way for ever.
        task = asyncio.current_task()
        stall = ReadTimeout(self._bounds.write_timeout_s, lambda: task and task.cancel(STALLED))
        try:
            async for piece in body:
                # Once the client has left the answer is only read for its usage.
                if not connection.gone:
                    stall.begin()
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    stall.end()
        finally:
            stall.stop()
        if not reply.broken:
            connection.finished = True
            await send({"type": "http.response.body", "body": b""})
            return
        connection.break_off()

    @staticmethod
    async def _tell_bug(incoming: Incoming, connection: _Connection, fault: GatewayError) -> None:
        if not connection.started:
            try:
                await send_fault(connection.send, incoming.endpoint, fault, incoming.request_id)
            except Exception:
                # The head of an answer was what failed. Whoever waits for the rest of it must not wait for ever.
                logger.exception("call %s cannot be answered", incoming.request_id)
            else:
                return
        connection.break_off()

    async def _tell_cut(self, incoming: Incoming, connection: _Connection) -> None:
        fault = connection.cut
        if fault is None or connection.gone:
            return
        if not connection.started:
            # If it was cut while the head of its answer went out, the server takes no second one.
            with contextlib.suppress(RuntimeError):
                await send_fault(connection.send, incoming.endpoint, fault, incoming.request_id)
        elif connection.is_events:
            # Only there: in a file or an image the error would be taken for a part of it.
            made = connection.failure_events
            events = made(fault) if made else incoming.endpoint.dialect.error_event(fault, incoming.request_id)
            await connection.send({"type": "http.response.body", "body": events, "more_body": True})

    async def _cut(self, tasks: set[asyncio.Task[None]], fault: GatewayError) -> None:
        for task in tasks:
            if task in self._running:
                self._running[task].cut = fault
                task.cancel(SHUT_DOWN)
        if tasks:
            await asyncio.wait(tasks, timeout=_CUT_S)

    async def close(self) -> None:
        """End what is running; every call is settled when this returns, or was given its time to."""
        self.take_no_more()
        left = {task for task, connection in self._running.items() if connection.gone}
        if left:
            # Nobody is connected any more, so the server did not wait for them; their usage is worth a wait.
            await asyncio.wait(left, timeout=min(self._bounds.shutdown_grace_s, self._bounds.drain_s))
        await self._cut(
            set(self._running), ShuttingDown("The gateway is stopping and cut this answer. Try again shortly.")
        )


def _named(asked: PathRequest, method: str, body: bytes, *, anthropic: bool) -> tuple[bytes, Endpoint]:
    """Return the body with the model that the path names, and the endpoint that is asked for."""
    body = asked.named_in(body)
    return body, endpoint(method, asked.path, anthropic=anthropic, body=body)


def _no_socket(path: str) -> NoWebSocket:
    if path == SOCKET_PATH:
        # What stands between did not pass `Upgrade` on.
        return NoWebSocket(
            "This handshake came without its Upgrade header. Have the proxy in front of the gateway pass it on, or "
            "send requests by POST, with stream: true for events."
        )
    return NoWebSocket("There is a WebSocket under /v1/responses only. Send requests by POST.")


def as_fault(error: Exception, request_id: str) -> GatewayError:
    """What a client is told; of a bug, which is logged, no more than where its reason stands."""
    if isinstance(error, GatewayError):
        return error
    logger.error("call %s failed in a bug", request_id, exc_info=error)
    return InternalError(f"The gateway failed; the operator finds the reason under {request_id}.")


async def send_fault(send: Send, target: Endpoint, fault: GatewayError, request_id: str) -> None:
    """Answer a call that cannot be answered through the pipeline, and end the connection."""
    body = target.dialect.error(fault, request_id)
    headers: Headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (ours.GATEWAY_REQUEST_ID, request_id.encode()),
        *ours.of_fault(fault),
        _CLOSE,
    ]
    await send({"type": "http.response.start", "status": fault.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
