"""Define the base class of all sections of gateway.yaml."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

_DURATION: Final = re.compile(r"([0-9]{1,10})([smhd])\Z")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
#: a hundred years, so that every resulting time is a valid date
_LONGEST_S: Final = 36_500 * 86_400
#: the name of an HTTP header
HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")

#: largest number of seconds, MiB and so on; without a bound a number can become infinite
LARGEST: Final = 10**9
#: bits of the largest number that is read unchanged
_MOST_BITS: Final = 4096
#: largest number of tokens, which JSON can hold exactly
MOST_TOKENS: Final = 2**53
Positive = Annotated[float, Field(gt=0, le=LARGEST)]


#: the message about an invalid duration
NO_DURATION: Final = "must be a duration like 90s, 15m, 12h or 30d, at most 36500d"


def duration(text: str) -> int:
    """Convert a duration like `90s`, `15m`, `12h` or `30d` to seconds.

    Raises:
        ValueError: the text is not a duration.
    """
    match = _DURATION.match(text)
    seconds = int(match[1]) * _SECONDS[match[2]] if match is not None else 0
    if not 0 < seconds <= _LONGEST_S:
        raise ValueError(NO_DURATION)
    return seconds


def _checked_duration(text: str) -> str:
    duration(text)
    return text


#: the type of a setting that is a duration, as text; `duration` converts it
Duration = Annotated[str, AfterValidator(_checked_duration)]


def expand_home(path: str | Path) -> Path:
    """Expand `~` in a path.

    Raises:
        ValueError: no file can have this path.
    """
    if "\0" in str(path):
        raise ValueError("a path cannot contain the character NUL")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        name = Path(path).parts[0]
        raise ValueError(f"the folder {name} is unknown; write an absolute path") from None


def without_huge_numbers(value: Any) -> Any:
    """Replace an integer that is too large to print by infinity. YAML can contain one in hexadecimal."""
    return math.inf if isinstance(value, int) and value.bit_length() > _MOST_BITS else value


class Section(BaseModel):
    """A block of gateway.yaml. Unknown keys are refused, and empty blocks are treated as absent."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, str_strip_whitespace=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, value: Any) -> Any:
        """Drop empty blocks, such as a `server:` whose keys are all commented out, and convert false to "off"."""
        if not isinstance(value, dict):
            return value
        return {
            key: "off" if inner is False and cls._can_be_off(key) else inner
            for key, inner in value.items()
            if inner is not None or not cls._is_section(key)
        }

    @classmethod
    def _can_be_off(cls, key: object) -> bool:
        """Return whether a key accepts the word `off`, which YAML reads as false."""
        field = cls.model_fields.get(key) if isinstance(key, str) else None
        return field is not None and any(
            "off" in get_args(kind) for kind in (field.annotation, *get_args(field.annotation))
        )

    @classmethod
    def _is_section(cls, key: object) -> bool:
        field = cls.model_fields.get(key) if isinstance(key, str) else None
        kind = field.annotation if field is not None else None
        return get_origin(kind) in (dict, tuple) or (isinstance(kind, type) and issubclass(kind, Section))
