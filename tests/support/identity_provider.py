"""An identity provider of the tests: keys, tokens, and a real HTTP server with the public keys."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tests.support.timing import LIMIT_S

ISSUER, AUDIENCE = "https://login.example/", "llm-gateway"


@functools.cache
def rsa_key(name: str) -> rsa.RSAPrivateKey:
    """Return the RSA key of this name. `small…`: with 1,024 bits."""
    return rsa.generate_private_key(65537, 1024 if name.startswith("small") else 2048)


@functools.cache
def ec_key(name: str) -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1() if name.startswith("p384") else ec.SECP256R1())


def jwk(key: Any, **members: object) -> dict[str, Any]:
    """Return the public key as a member of a JWKS."""
    method = jwt.algorithms.RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else jwt.algorithms.ECAlgorithm
    shown = method.to_jwk(key.public_key(), as_dict=True)
    shown.pop("key_ops", None)
    return {**shown, **members}


def pem(key: Any) -> bytes:
    found: bytes = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return found


def encoded(value: object) -> str:
    """Return a part of a token."""
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(text).rstrip(b"=").decode()


def claims_of(name: str = "alice", **changes: object) -> dict[str, Any]:
    """Return valid claims; None removes one."""
    now = int(time.time())
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": name, "iat": now, "exp": now + 600, **changes}
    return {key: value for key, value in claims.items() if value is not None}


def token(
    name: str = "alice", *, kid: str | None = "one", key: Any = None, alg: str = "RS256", **changes: object
) -> str:
    """Return a token, signed with the key `one` unless another one is given. `changes`: other claims."""
    headers = {"kid": kid} if kid is not None else {}
    return jwt.encode(claims_of(name, **changes), key or rsa_key("one"), alg, headers=headers)


def bearer(value: str) -> dict[str, str]:
    return {"authorization": f"Bearer {value}"}


@dataclass
class IdentityProvider:
    """A server of public keys. `respond` writes another response; `gate` holds all responses back while it is closed.

    `requests`: number of requests for the keys.
    """

    keys: list[dict[str, Any]] = field(default_factory=lambda: [jwk(rsa_key("one"), kid="one", alg="RS256", use="sig")])
    respond: Callable[[BaseHTTPRequestHandler], None] | None = None
    gate: threading.Event = field(default_factory=threading.Event)
    requests: int = 0
    url: str = ""

    def __post_init__(self) -> None:
        self.gate.set()

    def settings(self, **changes: object) -> Mapping[str, dict[str, object]]:
        """Return the settings under `auth.jwt`; None removes one."""
        block = {"issuer": ISSUER, "audience": AUDIENCE, "jwks_url": f"{self.url}/keys", **changes}
        return {"auth.jwt": {key: value for key, value in block.items() if value is not None}}


def send_body(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, **headers: str) -> None:
    handler.send_response(status)
    for name, value in {"content-length": str(len(body)), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


@contextmanager
def serving_keys(provider: IdentityProvider) -> Iterator[IdentityProvider]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            provider.requests += 1
            provider.gate.wait(LIMIT_S)
            if provider.respond is not None:
                provider.respond(self)
            else:
                send_body(self, json.dumps({"keys": provider.keys}).encode())

        def log_message(self, *_: Any) -> None:
            pass

        def handle(self) -> None:
            with contextlib.suppress(OSError):  # the gateway stopped reading
                super().handle()

    class Server(ThreadingHTTPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        provider.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield provider
        finally:
            provider.gate.set()
            server.shutdown()
            thread.join()
