"""Whose a session is: its identity, and the namespaces of callers that have no client key."""

from __future__ import annotations

from typing import Final

from gateway.core.ledger import AccountKey
from gateway.core.values import dataclass

#: the namespace of callers on this machine where no client keys are needed
OPEN_NAMESPACE: Final = "default"
#: The namespace of other callers without a client key: this one where they bring no credential of a provider, else this
#: prefix and a digest of that credential.
ANONYMOUS: Final = "anonymous"
CREDENTIAL_PREFIX: Final = "cred-"


def is_reserved(name: str) -> bool:
    """Whether a client key of this name would see the sessions of callers that have none."""
    return name in (OPEN_NAMESPACE, ANONYMOUS) or name.startswith(CREDENTIAL_PREFIX)


@dataclass(frozen=True, slots=True)
class SessionKey:
    """A session's identity in the store: ids are the client's to choose, so they live under their client key's name."""

    namespace: str
    id: str

    @property
    def account(self) -> AccountKey:
        """The account that its budget is kept on."""
        return AccountKey("session", self.namespace, self.id)
