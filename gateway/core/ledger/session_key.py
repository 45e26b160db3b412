"""Define the key of a session: its namespace and id."""

from __future__ import annotations

from typing import Final, Self

from gateway.core.identity import is_valid
from gateway.core.ledger.arithmetic import AccountKey
from gateway.core.values import dataclass

#: the namespace of callers on this machine, if no client keys are required
OPEN_NAMESPACE: Final = "default"
#: The namespace of other callers without a client key. A caller that sends a provider's credential has this prefix and
#: a digest of the credential instead.
ANONYMOUS: Final = "anonymous"
CREDENTIAL_PREFIX: Final = "cred-"
#: The namespace of a caller with a token of the identity provider has this prefix and the name in the token.
BEARER_PREFIX: Final = "jwt:"


def is_reserved(name: str) -> bool:
    """Return whether a client key of this name would see the sessions of callers that have no client key."""
    return name in (OPEN_NAMESPACE, ANONYMOUS) or name.startswith((CREDENTIAL_PREFIX, BEARER_PREFIX))


@dataclass(frozen=True, slots=True)
class SessionKey:
    """Identify a session in the store. Clients choose session ids, so each client key has its own namespace."""

    namespace: str
    id: str

    @classmethod
    def parse(cls, text: str, namespace: str | None = None) -> Self | None:
        """Return the session that a reader calls by this name, or None if the text cannot be a name.

        Args:
            text: `ID` or `KEY/ID`. Only readers of all namespaces may use `KEY/ID`.
            namespace: the namespace that the reader sees. None: all; then `ID` alone means `OPEN_NAMESPACE`.
        """
        own, slash, name = text.rpartition("/")
        if not is_valid(name) or (slash and (namespace is not None or not is_valid(own))):
            return None
        return cls(own if slash else namespace or OPEN_NAMESPACE, name)

    def shown(self, namespace: str | None = None) -> str:
        """Return the name that `parse` reads. Readers of all namespaces (None) see the namespace before the id."""
        is_bare = namespace is not None or self.namespace == OPEN_NAMESPACE
        return self.id if is_bare else f"{self.namespace}/{self.id}"

    @property
    def account(self) -> AccountKey:
        """Return the account of its budget."""
        return AccountKey("session", self.namespace, self.id)

    def agent_account(self, agent: str) -> AccountKey:
        """Return the account of the budget of a subagent. `agent`: its id."""
        return AccountKey("agent", self.namespace, f"{self.id}/{agent}")
