"""Parse Redis URLs: single server, sentinels and cluster.

Options follow a question mark, as in other URLs: for TLS, and the credentials of sentinels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from gateway.core.values import dataclass

Kind = Literal["single", "sentinel", "cluster"]

#: URL schemes
SCHEMES: Final[Mapping[str, Kind]] = {
    "redis": "single", "redis+sentinel": "sentinel", "redis+cluster": "cluster",
    "rediss": "single", "rediss+sentinel": "sentinel", "rediss+cluster": "cluster",
}  # fmt: skip
_PORTS: Final = {"single": 6379, "sentinel": 26379, "cluster": 6379}
#: files of trusted certificates, of the client certificate and its key; and whether host names must match
_TLS: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname")
_SENTINEL: Final = ("sentinel_username", "sentinel_password")


@dataclass(frozen=True, slots=True)
class Address:
    """The parsed URL of a Redis store.

    Attributes:
        hosts: names or addresses with their ports.
        shown: the URL without passwords and options.
        service: the service name of the sentinels; empty for other kinds.
        options: names and values.
    """

    kind: Kind
    hosts: tuple[tuple[str, int], ...]
    shown: str
    tls: bool = False
    username: str | None = None
    password: str | None = None
    db: int = 0
    service: str = ""
    options: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        return f"Address({self.shown})"

    @property
    def place(self) -> str:
        """Return a text that identifies the store: the same for every way to write its URL, with or without TLS."""
        scheme = next(name for name, kind in SCHEMES.items() if kind == self.kind)
        hosts = ",".join(sorted({f"{host}:{port}" for host, port in self.hosts}))
        return "/".join((f"{scheme}://{hosts}", *([self.service] if self.service else []), str(self.db)))


def parse(url: str) -> Address:
    """Parse a URL: hosts separated by commas, the service name of sentinels, the database number.

    Raises:
        ValueError: it is not a Redis URL. The message names the wrong part without repeating it, as it can be a secret.
    """
    scheme, _, rest = url.partition("://")
    location, _, query = rest.partition("?")
    authority, _, path = location.partition("/")
    userinfo, _, hosts = authority.rpartition("@")
    shown = f"{scheme}://{hosts}{'/' if path else ''}{path}"
    tls = scheme.startswith("rediss")
    kind = SCHEMES.get(scheme)
    if kind is None:
        raise ValueError("this is not a Redis URL")
    user, _, password = userinfo.partition(":")
    addresses = tuple(_host(text, _PORTS[kind]) for text in hosts.split(","))
    if kind == "single" and len(addresses) > 1:
        raise ValueError("several hosts need redis+sentinel:// or redis+cluster://")
    service, db = _service_and_database(kind, path)
    options = _options(query, (*(_TLS if tls else ()), *(_SENTINEL if kind == "sentinel" else ())))
    return Address(kind, addresses, shown, tls, unquote(user) or None, unquote(password) or None, db, service, options)


def _host(text: str, port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, own_port = parts.hostname, parts.port
    except ValueError:
        host, own_port = None, None
    if not host or parts.path or parts.query or own_port == 0:
        raise ValueError(
            "each host is a name or an address, optionally with a port from 1 to 65535; write / ? # in a password as "
            "%2F %3F %23"
        )
    return host, own_port or port


def _service_and_database(kind: Kind, path: str) -> tuple[str, int]:
    """Return the service name of sentinels, and the database number."""
    parts, service = path.split("/") if path else [], ""
    if kind == "sentinel":
        service = unquote(parts.pop(0)) if parts else ""
        if not service:
            raise ValueError("the name of the service must follow the sentinels, as in /mymaster/0")
    text = "/".join(parts) if parts else "0"
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError("after the hosts only a database number may follow, as in /0")
    if kind == "cluster" and int(text):
        raise ValueError("a cluster only has database 0")
    return service, int(text)


def _options(query: str, known: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    try:
        options = tuple(parse_qsl(query, strict_parsing=True)) if query else ()
    except ValueError:
        raise ValueError("each option after the question mark must be NAME=VALUE") from None
    names = [name for name, _ in options]
    if not set(names) <= set(known):
        raise ValueError(f"unknown option; known: {', '.join(known) or 'none without TLS (rediss://)'}")
    if len(set(names)) < len(names):
        raise ValueError("an option is given twice")
    if dict(options).get("ssl_check_hostname", "true") not in ("true", "false"):
        raise ValueError("ssl_check_hostname must be true or false")
    return options
