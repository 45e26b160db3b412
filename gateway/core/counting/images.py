"""Count the tokens of an image by its provider's published rule.

The numbers of a rule belong to a family (`families.py`).

tiles    OpenAI before GPT-5 mini: fit into 2048 x 2048, then the short side to 768, then 512-pixel tiles.
patches  OpenAI from GPT-4.1 mini on, Anthropic, Mistral: squares of `patch` pixels, the image shrunk to at most `cap`
         of them; `base` on top.
fixed    the same for every image.
"""

from __future__ import annotations

import math
from typing import Final

from gateway.core.counting.media import Media
from gateway.core.values import dataclass

_FIT: Final = 2048
_SHORT: Final = 768
_TILE: Final = 512
#: For an image of which only the address is known. Of 19 such images in recorded requests half cost less than one of
#: this size; what it may cost above that is the estimate's doubt, and goes into the safety margin.
_UNKNOWN_EDGES: Final = (512, 512)
_LARGE_EDGES: Final = (1024, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRule:
    """How models count images.

    Attributes:
        rule: `tiles`, `patches` or `fixed`, see above.
        base: tokens of every image.
        tile: tokens of a tile.
        patch: pixels along one side of a patch.
        cap: the most patches that an image has; a larger one is shrunk.
        edge: pixels that the longer side is shrunk to before; 0: it is not.
        scale: tokens of a patch.
        low: tokens of an image with `detail: low`; 0 where that makes no difference.
    """

    rule: str = "tiles"
    base: float = 0
    tile: float = 0
    patch: int = 32
    cap: int = 1536
    edge: int = 0
    scale: float = 1.0
    low: float = 0


#: for models no rule names: as OpenAI documents gpt-4o
COMMON_RULE: Final = ImageRule(rule="tiles", base=85, tile=170, low=85)


def image_tokens(image: Media, rule: ImageRule) -> float:
    """Tokens of one image; a common size is taken for one whose size is not known."""
    return _of_size(*((image.width, image.height) if image.width else _UNKNOWN_EDGES), image.detail, rule)


def image_doubt(image: Media, rule: ImageRule) -> float:
    """How many tokens more an image may well cost whose size is not known."""
    return 0.0 if image.width else _of_size(*_LARGE_EDGES, image.detail, rule) - image_tokens(image, rule)


def _of_size(width: int, height: int, detail: str, rule: ImageRule) -> float:
    if detail == "low" and rule.low:
        return rule.low
    if rule.rule == "tiles":
        return _tiles(width, height, rule)
    if rule.rule == "patches":
        return _patches(width, height, rule)
    return rule.base


def _tiles(width: int, height: int, rule: ImageRule) -> float:
    shrink = min(1.0, _FIT / max(width, height))
    shrink *= min(1.0, _SHORT / (min(width, height) * shrink))
    count = math.ceil(round(width * shrink, 3) / _TILE) * math.ceil(round(height * shrink, 3) / _TILE)
    return rule.base + rule.tile * count


def _patches(width: float, height: float, rule: ImageRule) -> float:
    if rule.edge and max(width, height) > rule.edge:
        shrink = rule.edge / max(width, height)
        width, height = width * shrink, height * shrink
    count = math.ceil(width / rule.patch) * math.ceil(height / rule.patch)
    if count > rule.cap:
        # Shrunk until the patches fit, and then so that whole patches fill one side.
        shrink = math.sqrt(rule.cap * rule.patch**2 / (width * height))
        across, down = width * shrink / rule.patch, height * shrink / rule.patch
        shrink *= min(max(1, math.floor(across)) / across, max(1, math.floor(down)) / down)
        count = min(rule.cap, math.ceil(width * shrink / rule.patch) * math.ceil(height * shrink / rule.patch))
    return rule.base + count * rule.scale
