"""Track whether the store of a worker is available, so that no call waits for an unavailable one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from gateway.core.bounded import BoundedDict
from gateway.core.errors import StoreConflict, StoreDamaged, StoreUnavailable
from gateway.core.ports import RecordRefused

logger = logging.getLogger("gateway")

#: messages about damage to remember, so that each is logged once
_MOST_DAMAGES: Final = 1_000


class Availability:
    """Knows whether the store is unavailable.

    It counts as unavailable from its first failure until the settler has written all waiting records.

    Args:
        accepts_without_store: accept calls while the store is unavailable (`store.on_failure: open`).
        waiting: returns the number of ended calls that wait for the store.
        on_failure: called at each failure, so that the store is tried again.

    Attributes:
        failures: how often the store could not be used.
        on_available: called when the store is available again.
    """

    def __init__(
        self,
        *,
        accepts_without_store: bool = False,
        waiting: Callable[[], int] = lambda: 0,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.accepts_without_store = accepts_without_store
        self.failures = 0
        self.on_available: Callable[[], None] = lambda: None
        self._waiting = waiting
        self._on_failure = on_failure
        self._is_unavailable = False
        self._damages = BoundedDict[str, None](_MOST_DAMAGES)

    @property
    def is_unavailable(self) -> bool:
        """Return True while the store cannot be used."""
        return self._is_unavailable

    def error(self) -> StoreUnavailable:
        """Return the error for a call that needs the store."""
        return StoreUnavailable(
            f"The store is unavailable. Ended calls that wait for it: {self._waiting()}. Try again shortly."
        )

    def check(self) -> None:
        """Refuse a new call at once while the store is unavailable, unless `accepts_without_store`.

        Raises:
            StoreUnavailable: the store is unavailable.
        """
        if self._is_unavailable:
            self.check_accepts_without_store()

    def check_accepts_without_store(self) -> None:
        """Refuse a call whose use of the store failed, unless `accepts_without_store`.

        Raises:
            StoreUnavailable: calls are not accepted without the store.
        """
        if not self.accepts_without_store:
            raise self.error()

    def report(self, error: StoreUnavailable) -> None:
        """Mark the store as unavailable after an error, so that no call waits for it until it is available again.

        Damage is only logged, as the store still works for other calls. Conflicts and refused records are ignored: in
        both cases the store works.
        """
        if isinstance(error, (StoreConflict, RecordRefused)):
            return
        self.failures += 1
        if isinstance(error, StoreDamaged):
            self._log_damage(error)
            return
        if not self._is_unavailable:
            consequence = "calls continue and are journaled" if self.accepts_without_store else "calls are refused"
            logger.error("store unavailable, %s: %s", consequence, error.message)
            self._is_unavailable = True
        self._on_failure()

    def _log_damage(self, error: StoreDamaged) -> None:
        if error.message not in self._damages:
            self._damages[error.message] = None
            logger.error("store damaged, calls are refused: %s", error.message)

    def restore(self) -> None:
        """Mark the store as available again, after all waiting records were written."""
        if self._is_unavailable:
            self._is_unavailable = False
            logger.warning("store available again, all settlements written")
            self.on_available()
