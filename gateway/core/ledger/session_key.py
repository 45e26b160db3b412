"""Define the key of a session: its namespace and id."""

from __future__ import annotations

from typing import Final, Self

from gateway.core.identity import is_valid
from gateway.core.ledger.arithmetic import AccountKey
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

    @classmethod
    def parse(cls, text: str, namespace: str | None = None) -> Self | None:
        """The session that is named so by whoever sees this namespace, None: all. None where the text is no name.

        `ID` is one of that namespace, or of callers without a client key; `KEY/ID` only those know who see all.
        """
        own, slash, name = text.rpartition("/")
        if not is_valid(name) or (slash and (namespace is not None or not is_valid(own))):
            return None
        return cls(own if slash else namespace or OPEN_NAMESPACE, name)

    def shown(self, namespace: str | None = None) -> str:
        """Its name for whoever sees this namespace, None: all, who are told whose it is. The other way of `parse`."""
        is_bare = namespace is not None or self.namespace == OPEN_NAMESPACE
        return self.id if is_bare else f"{self.namespace}/{self.id}"

    @property
    def account(self) -> AccountKey:
        """The account that its budget is kept on."""
        return AccountKey("session", self.namespace, self.id)
