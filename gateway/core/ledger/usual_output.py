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
#: Seconds from the first output that was seen to the end of a stream that arrives while it is made. A proxy may
#: gather a response and send it all at once. The provider has billed it then, and it cannot be ended in the middle.
LEAST_FLOW_S: Final = 0.02


def usual_output(lengths: Sequence[int], least: int) -> int | None:
    """Return the output tokens that most responses do not exceed; None if fewer than `least` lengths are known."""
    if len(lengths) < max(1, least):
        return None
    return sorted(lengths)[ceil(len(lengths) * _QUANTILE) - 1]
