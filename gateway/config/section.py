"""Define the base class of all sections of gateway.yaml."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator

_DURATION: Final = re.compile(r"([0-9]{1,10})([smhd])\Z")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
#: a hundred years: a time that is further off may be none that a calendar has
_LONGEST_S: Final = 36_500 * 86_400
#: the name of an HTTP header
HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")

#: above all that anybody means, in seconds, MiB or whatever it is; numbers without a bound become infinite
LARGEST: Final = 10**9
#: of a number that is read as it stands
_MOST_BITS: Final = 4096
#: tokens, which are counted exactly
MOST_TOKENS: Final = 2**53
Positive = Annotated[float, Field(gt=0, le=LARGEST)]


#: what is said of a duration that is none
NO_DURATION: Final = "must be a duration like 90s, 15m, 12h or 30d, at most 36500d"


def duration(text: str) -> int:
    """Seconds of `90s`, `15m`, `12h`, `30d`.

    Raises:
        ValueError: it is none of these.
    """
    match = _DURATION.match(text)
    seconds = int(match[1]) * _SECONDS[match[2]] if match is not None else 0
    if not 0 < seconds <= _LONGEST_S:
        raise ValueError(NO_DURATION)
    return seconds


def at_home(path: str | Path) -> Path:
    """A path, with `~` as the folder that it means.

    Raises:
        ValueError: no file can have it.
    """
    if "\0" in str(path):
        raise ValueError("no path has a character NUL")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        name = Path(path).parts[0]
        raise ValueError(f"nobody knows which folder {name} is; write the path from / on") from None


def in_sight(value: Any) -> Any:
    """A value; infinity in the place of a number with more digits than Python writes (in hexadecimal it reads them)."""
    return math.inf if isinstance(value, int) and value.bit_length() > _MOST_BITS else value


class Section(BaseModel):
    """A block: unknown keys are refused, and what is left empty is as if it were not there."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, str_strip_whitespace=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, value: Any) -> Any:
        """Without blocks that hold nothing, such as a `server:` whose keys are all commented out; `off` as a word."""
        if not isinstance(value, dict):
            return value
        return {
            key: "off" if inner is False and cls._can_be_off(key) else inner
            for key, inner in value.items()
            if inner is not None or not cls._is_section(key)
        }

    @classmethod
    def _can_be_off(cls, key: object) -> bool:
        """YAML reads a bare `off` as false."""
        field = cls.model_fields.get(key) if isinstance(key, str) else None
        return field is not None and any(
            "off" in get_args(kind) for kind in (field.annotation, *get_args(field.annotation))
        )

    @classmethod
    def _is_section(cls, key: object) -> bool:
        field = cls.model_fields.get(key) if isinstance(key, str) else None
        kind = field.annotation if field is not None else None
        return get_origin(kind) in (dict, tuple) or (isinstance(kind, type) and issubclass(kind, Section))
