"""Provide a `dataclass` that mypy checks as frozen, and that is as fast as an ordinary one.

A frozen dataclass of the standard library sets each field through `object.__setattr__`, which took a sixth of the time
of a small call. To mypy this is the standard decorator, so mypy finds assignments to frozen classes. At run time a
class declared `frozen` is an ordinary dataclass with a hash of its fields. In Python's development mode (`python -X
dev`) it is really frozen.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.flags.dev_mode:
    from dataclasses import dataclass
else:

    def dataclass(*, frozen: bool = False, eq: bool = True, **options: Any) -> Any:
        """Make a dataclass, with the options of `dataclasses.dataclass`."""
        return dataclasses.dataclass(eq=eq, unsafe_hash=frozen and eq, **options)


__all__ = ["dataclass"]
