"""/api/keys: list, create, change, rotate and revoke client keys."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Path

from gateway.core import errors
from gateway.core.audit import Action, Author
from gateway.core.ports import Store
from gateway.core.stored import KeyChange, StoredKey
from gateway.server.audit import author_of
from gateway.server.auth import Access, require_admin
from gateway.server.client_keys import changed, current, new_key, new_secret, rotated, rows_of, shared_rows
from gateway.server.handling import Handler, ServerRules, json_body, json_handler
from gateway.server.key_changes import add_key, change_key, revoke_key

#: bodies of a POST, a PATCH and a rotation
_NEW: Final = '{"name": "bob", "budget": {"usd": 5, "window": "1d"}}'
_CHANGE: Final = '{"budget": {"usd": 10}, "expires": "30d"}'
_ROTATE: Final = '{"overlap": "24h"}'
_NO_STORE: Final = {"cache-control": "no-store"}


class KeysApi:
    """The handlers of client keys.

    Args:
        store: where the client keys and their accounts are stored.
        rules: returns the rules in force.
        clock: returns Unix time in seconds.
    """

    def __init__(self, store: Store, rules: Callable[[], ServerRules], clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._rules = rules
        self._clock = clock

    def paths(self) -> list[Path]:
        """Return the routes."""
        return [
            Path("/api/keys", self._wrap(self.keys), methods=["GET", "POST"]),
            Path("/api/keys/{name}", self._wrap(self.key), methods=["PATCH", "DELETE"]),
            Path("/api/keys/{name}/rotate", self._wrap(self.rotate), methods=["POST"]),
        ]

    def _wrap(self, handler: Callable[[Request, Access], Awaitable[Any]]) -> Handler:
        return json_handler(self._rules, handler)

    async def keys(self, request: Request, access: Access) -> Any:
        """GET /api/keys: return the client keys that the caller may see. POST: create one."""
        if request.method == "POST":
            require_admin(access)
            return await self._create(await _object(request, _NEW), author_of(request, access))
        configured, now = self._rules().configured_keys, self._clock()
        stored = [current(key, now) for key in await self._store.keys()]
        seen = [key for key in (*configured, *stored) if access.namespace in (None, key.name)]
        return {
            "keys": await rows_of(self._store, seen, configured),
            "shared": await shared_rows(self._store, self._rules().key_context.shared) if access.admin else [],
            "calls_need_key": self._rules().authenticator.needs_key,
            "may_change": access.admin,
        }

    async def _create(self, asked: dict[str, Any], author: Author) -> Response:
        name = asked.pop("name", None)
        if not isinstance(name, str):
            raise errors.InvalidRequest(f"Send the name of the client key, such as {_NEW}.", param="name")
        secret = new_secret()
        with _invalid_settings():
            key = new_key(name, asked, secret, self._clock(), self._rules().key_context)
        self._refuse_configured(name)
        # It is read first, because it can fail: a secret that is stored must also be shown.
        (row,) = await rows_of(self._store, [key], ())
        if not await add_key(self._store, key, author):
            raise errors.InvalidRequest(
                f'A client key "{name}" already exists. Change it with PATCH /api/keys/{name}, or revoke it first.',
                param="name",
            )
        return Response(msgspec.json.encode({**row, "key": secret}), 201, _NO_STORE, "application/json")

    async def key(self, request: Request, access: Access) -> Any:
        """PATCH /api/keys/{name}: change settings, and keep the secret. DELETE: revoke the key."""
        require_admin(access)
        name = request.path_params["name"]
        if request.method == "DELETE":
            if not await revoke_key(self._store, name, author_of(request, access)):
                self._refuse_configured(name)
                raise _no_key(name)
            return {"name": name, "revoked": True}
        asked = await _object(request, _CHANGE)
        if not asked:
            raise errors.InvalidRequest(f"Send what to change, such as {_CHANGE}.")
        now, context = self._clock(), self._rules().key_context
        author = author_of(request, access)
        return await self._changed(name, lambda key: changed(key, asked, now, context), author)

    async def rotate(self, request: Request, access: Access) -> Any:
        """POST /api/keys/{name}/rotate: make a new secret. The present one is accepted for the overlap."""
        require_admin(access)
        asked = await _object(request, _ROTATE)
        if set(asked) != {"overlap"}:
            raise errors.InvalidRequest(
                f'Send how long the present secret is still accepted, such as {_ROTATE}, or "0".', param="overlap"
            )
        secret, now = new_secret(), self._clock()
        name, author = request.path_params["name"], author_of(request, access)
        row = await self._changed(name, lambda key: rotated(key, secret, now, asked["overlap"]), author, "key.rotate")
        return {**row, "key": secret}

    async def _changed(
        self, name: str, change: KeyChange, author: Author, action: Action = "key.change"
    ) -> dict[str, Any]:
        """Change a client key, and return it as JSON."""
        with _invalid_settings():
            key = await change_key(self._store, name, change, author, action)
        if key is None:
            self._refuse_configured(name)
            raise _no_key(name)
        return await self._row(key)

    async def _row(self, key: StoredKey) -> dict[str, Any]:
        (row,) = await rows_of(self._store, [current(key, self._clock())], ())
        return row

    def _refuse_configured(self, name: str) -> None:
        if any(key.name == name for key in self._rules().configured_keys):
            raise errors.InvalidRequest(
                f'The client key "{name}" is in the configuration. Change it in auth.keys and reload.', param="name"
            )


@contextlib.contextmanager
def _invalid_settings() -> Iterator[None]:
    """Raise `InvalidRequest` for settings that are not valid."""
    try:
        yield
    except errors.ConfigError as error:
        param = error.problems[0].partition(":")[0]
        raise errors.InvalidRequest("; ".join(error.problems), param=param) from None


async def _object(request: Request, example: str) -> dict[str, Any]:
    """Return the body of a request, which must be a JSON object.

    Raises:
        InvalidRequest: it is not.
    """
    asked = await json_body(request, example)
    if not isinstance(asked, dict):
        raise errors.InvalidRequest(f"The body must be a JSON object, such as {example}.")
    return asked


def _no_key(name: str) -> errors.NotFound:
    return errors.NotFound(f'The store has no client key "{name[:100]}".')
