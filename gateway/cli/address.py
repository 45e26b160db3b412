"""Format the URL at which a user reaches a host and port."""

from __future__ import annotations

import contextlib
import socket
from ipaddress import ip_address
from typing import Final

#: Addresses for documentation (RFC 5737, RFC 3849). The source address that the system chooses to reach them is its own
#: address in the network. Nothing is sent to them.
_OTHER_MACHINES: Final = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


def url_of(host: str, port: int) -> str:
    """Return the URL to open.

    `0.0.0.0` and `::` mean every address and cannot be called; loopback replaces them.
    """
    bare = host.removeprefix("[").removesuffix("]")
    try:
        address = ip_address(bare or "0.0.0.0")  # an empty host also means every address
    except ValueError:
        return f"http://{bare}:{port}"  # a host name
    if address.version == 4:  # noqa: PLR2004
        return f"http://{'127.0.0.1' if address.is_unspecified else address}:{port}"
    # A socket on `::` accepts no IPv4 connections. In a URL, the % of a zone (fe80::1%eth0) is percent-encoded.
    zoned = "::1" if address.is_unspecified else str(address).replace("%", "%25")
    return f"http://[{zoned}]:{port}"


def network_url_of(host: str, port: int) -> str | None:
    """Return the URL for other machines if `host` means every address, or None if it is unknown."""
    bare = host.removeprefix("[").removesuffix("]")
    with contextlib.suppress(ValueError, OSError):  # a host name, or a machine without a network
        if ip_address(bare or "0.0.0.0").is_unspecified:
            family = socket.AF_INET6 if ":" in bare else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((_OTHER_MACHINES[family], port))
                own = probe.getsockname()[0]
            return None if ip_address(own).is_loopback else url_of(own, port)
    return None
