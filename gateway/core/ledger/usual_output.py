"""Learn how many output tokens responses usually have, so that a stream without a limit reserves no more at first.

| known are | usual output |
|---|---|
| responses of this model in this session | an upper quantile of their lengths |
| too few of them, but responses of this model | an upper quantile of their lengths, in all sessions |
| too few of these too | unknown: the stream reserves as much as any other (`output_limit.STREAM_STEP`) |
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Final

#: Responses whose lengths are remembered, of a model and of a session.
MAX_LENGTHS: Final = 16
#: Fewer lengths say too little. Those of a session vary less than those of all sessions.
LEAST_OF_SESSION: Final = 4
LEAST_OF_MODEL: Final = 8
#: This share of the responses was not longer.
_QUANTILE: Final = 0.9
#: A provider that sends a response in one piece has sent at least this share of it at the end.
_LAST_SHARE: Final = 0.5
#: Seconds from the first to the last part of a response that was not sent in one piece.
_LEAST_FLOW_S: Final = 0.05


def usual_output(lengths: Sequence[int], least: int) -> int | None:
    """Return the output tokens that most responses do not exceed; None if fewer than `least` lengths are known."""
    if len(lengths) < max(1, least):
        return None
    return sorted(lengths)[ceil(len(lengths) * _QUANTILE) - 1]


def arrived_gradually(total_bytes: int, last_bytes: int, seconds: float) -> bool:
    """Return whether a stream arrived while it was made, so that one like it can be ended in the middle.

    A proxy that collects a response sends all of it at the end, when the provider has billed all of it.

    Args:
        total_bytes: bytes of the stream.
        last_bytes: bytes that arrived together with its end.
        seconds: from its first to its last part.
    """
    return seconds >= _LEAST_FLOW_S and last_bytes <= _LAST_SHARE * total_bytes
