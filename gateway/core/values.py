"""Provide a `dataclass` that mypy checks as frozen, and that is as fast as an ordinary one.

A frozen dataclass of the standard library sets each field through `object.__setattr__`, which took a sixth of the time
of a small call. To mypy this is the standard decorator, so mypy finds assignments to frozen classes. At run time a
class declared `frozen` is an ordinary dataclass with a hash of its fields. In Python's development mode (`python -X
dev`) it is really frozen.
"""

from __future__ import annotations

import dataclasses
import reprlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.flags.dev_mode:
    from dataclasses import dataclass
else:

    def dataclass(*, frozen: bool = False, eq: bool = True, repr: bool = True, **options: Any) -> Any:  # noqa: A002
        """Make a dataclass, with the options of `dataclasses.dataclass`."""
        make = dataclasses.dataclass(eq=eq, repr=False, unsafe_hash=frozen and eq, **options)

        def made(cls: type) -> type:
            if repr and "__repr__" not in vars(cls):
                cls.__repr__ = _shown
            return make(cls)

        return made


@reprlib.recursive_repr()
def _shown(self: Any) -> str:
    """Return the text of a dataclass. The standard library compiles one such function for each class, at the start."""
    shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


__all__ = ["dataclass"]
