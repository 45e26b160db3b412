"""Provide a `dataclass` that mypy checks as frozen, and that costs no more than an ordinary one.

A frozen dataclass sets each of its fields by a call of `object.__setattr__`, which was a sixth of what a small call
cost here. That nobody changes one is for mypy to see, which takes this for the decorator of the standard library; when
the program runs, what is declared `frozen` is made as any other and has the hash of its fields. In Python's
development mode (`python -X dev`) it is frozen then, too.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.flags.dev_mode:
    from dataclasses import dataclass
else:

    def dataclass(*, frozen: bool = False, eq: bool = True, **options: Any) -> Any:
        """`dataclasses.dataclass`, with its options."""
        return dataclasses.dataclass(eq=eq, unsafe_hash=frozen and eq, **options)


__all__ = ["dataclass"]
