"""A connection that goes silent without an end, as where a host vanishes or a firewall forgets it."""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
from typing import Any

import pytest

#: only there can a program have its own packets dropped
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="packets are dropped by a filter of Linux")

_SO_ATTACH_FILTER = 26
_SO_DETACH_FILTER = 27
#: a program of one instruction: of each packet 0 bytes are kept
_NOTHING_PASSES = struct.pack("HBBI", 0x06, 0, 0, 0)


def mute(sock: Any) -> None:
    """Have the system drop whatever comes for this socket, or for those that this listener would accept.

    The other side gets no acknowledgement, and no word of it.
    """
    program = ctypes.create_string_buffer(_NOTHING_PASSES)
    filters = struct.pack("HL", 1, ctypes.addressof(program))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filters)


def unmute(sock: Any) -> None:
    """Let packets through again."""
    sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
