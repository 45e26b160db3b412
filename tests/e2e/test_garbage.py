"""A finished call is freed at once: reference cycles would need the garbage collector, which stops all other calls."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gateway.call.state import CallState
from gateway.call.types import ClientResponse, Incoming
from gateway.core.record import CallRecord
from gateway.mock import MockServer
from tests.conftest import StartGateway
from tests.support.conversations import agent
from tests.support.formats import Format
from tests.support.gateways import GatewayThread, until

CALLS = 12
#: types of which one always holds everything else of a call
OF_A_CALL = (CallRecord, Incoming, CallState, ClientResponse)


@contextmanager
def garbage() -> Iterator[Counter[str]]:
    """Yield a counter, by type, of the call objects that only the garbage collector found; filled at the end."""
    found = Counter[str]()
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found.update(type(one).__name__ for one in gc.garbage if isinstance(one, OF_A_CALL))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def make_calls(gateway: GatewayThread, form: Format, *, stream: bool) -> None:
    for number in range(CALLS):
        body = form.body([*agent(2), {"role": "user", "content": f"Go on with part {number}."}], stream=stream)
        assert gateway.web.post(form.path, body, {"x-session-id": f"s{number % 3}"}).status == 200
    # The last call is freed after its response was read.
    until(lambda: gateway.web.get("/healthz").status == 200)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("wire", ["chat", "responses", "messages"])
def test_a_call_leaves_nothing_for_the_garbage_collector(
    mock_server: MockServer, gateway_server: StartGateway, wire: str, stream: bool
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.tokens": 10_000_000})
    make_calls(gateway, Format(wire), stream=stream)
    with garbage() as found:
        make_calls(gateway, Format(wire), stream=stream)
    assert not found
