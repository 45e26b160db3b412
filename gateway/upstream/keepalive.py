"""Detect that the other side of a connection is gone.

There are two signs:

- No reply to probes, which the operating system sends while a connection is quiet. Probes also keep the connection in
  the tables of firewalls and NATs while a model thinks.
- No acknowledgement of sent data. The operating system sends the data again for a quarter of an hour, which is too long
  for a call. So the number of these tries is checked.
"""

from __future__ import annotations

import contextlib
import math
import socket
import sys
from dataclasses import dataclass
from typing import Any, Final

#: Retransmissions before a connection is given up: about 13 s for a nearby host, otherwise more.
_MOST_RETRANSMISSIONS: Final = 6
#: The counters since the last sign of life: `tcpi_retransmits` and `tcpi_probes` of `tcp_info`. The second counts
#: probes for data that the other side had no room for, or that did not even leave this machine.
_COUNTS: Final = slice(2, 4)


@dataclass(frozen=True, slots=True)
class KeepaliveSettings:
    """Keepalive settings of a connection.

    Attributes:
        after_s: seconds without traffic until the first probe.
        every_s: seconds between two probes.
        times: unanswered probes until the connection ends.
    """

    after_s: int
    every_s: int
    times: int

    def begin(self, sock: socket.socket) -> None:
        """Turn on probes for this connection, or for the connections that this listener accepts."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        idle = "TCP_KEEPALIVE" if sys.platform == "darwin" else "TCP_KEEPIDLE"
        for name, value in ((idle, self.after_s), ("TCP_KEEPINTVL", self.every_s), ("TCP_KEEPCNT", self.times)):
            with contextlib.suppress(AttributeError, OSError):  # without this option the system's default applies
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def bound_unacknowledged(sock: socket.socket, seconds: float) -> None:
    """End this connection, or those that this listener accepts, after this time without a sign of life.

    This includes a connection whose other side had no room for so long. Only Linux supports it.
    """
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(seconds * 1000))


def is_unacknowledged(sock: Any) -> bool:
    """Return True if sent data was sent again several times and never acknowledged. Only Linux reports it.

    A busy host that reads nothing still acknowledges.
    """
    if sys.platform != "linux":
        return False
    counts = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTS.stop)[_COUNTS]
    return bool(max(counts) >= _MOST_RETRANSMISSIONS)
