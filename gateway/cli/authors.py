"""Name the user of a command in the audit log."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.core.audit import Author

#: the actor of changes by commands, which need no key but access to the store
COMMAND_LINE = "command line"


def command_author() -> Author:
    """Return the author of changes by this command: the user of this process and the machine."""
    from gateway.core.audit import Author

    return Author(COMMAND_LINE, f"{_user()}@{platform.node() or 'unknown host'}")


def _user() -> str:
    """Return the name of the user from the system's table, not from the environment, which the user can change."""
    import pwd

    number = os.getuid()
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # usual in containers
        return f"uid {number}"
