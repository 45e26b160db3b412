"""Tokens of a text without a tokenizer: characters and scripts. Used where a provider reported nothing.

Four characters a token is the usual rule for English and code. Scripts without spaces take about a token a character in
the current OpenAI vocabularies, other alphabets about half a token a character; both are rounded up on purpose, since
a call that is charged by estimate should not be a way to pay less.
"""

from __future__ import annotations

import re
from typing import Final

#: CJK ideographs, kana, hangul, and everything beyond the basic plane (emoji, rare ideographs)
_DENSE: Final = re.compile("[\u2e80-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\uff00-\uffef\U00010000-\U0010ffff]")


def estimate_tokens(text: str) -> float:
    """Estimated tokens of a text; a float, so that the parts of a stream add up without rounding each."""
    length = len(text)
    if text.isascii():
        return length / 4
    dense = len(_DENSE.findall(text))
    plain = len(text.encode("ascii", "ignore"))
    return plain / 4 + dense + (length - plain - dense) / 2
