"""Count the tokens of an image by the published rule of its provider.

The numbers of a rule belong to a model family (`families.py`).

- tiles: OpenAI before GPT-5 mini. The image is shrunk to 2048 x 2048, then its short side to 768 pixels, then divided
  into tiles of 512 pixels.
- patches: OpenAI from GPT-4.1 mini on, Anthropic, Mistral. The image is divided into squares of `patch` pixels and
  shrunk to at most `cap` of them; `base` is added.
- fixed: each image costs the same.
"""

from __future__ import annotations

import math
from typing import Final

from gateway.core.counting.media import Media
from gateway.core.values import dataclass

_FIT: Final = 2048
_SHORT: Final = 768
_TILE: Final = 512
#: Sizes for an image of which only the address is known. Of 19 such images in recorded requests, half cost less than
#: one of `_UNKNOWN_EDGES`. The difference to `_LARGE_EDGES` is the doubt of the estimate and is added to the safety
#: margin.
_UNKNOWN_EDGES: Final = (512, 512)
_LARGE_EDGES: Final = (1024, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRule:
    """How models count the tokens of images.

    Attributes:
        rule: `tiles`, `patches` or `fixed`, see above.
        base: tokens of every image.
        tile: tokens of a tile.
        patch: side length of a patch in pixels.
        cap: maximum number of patches of an image; larger images are shrunk.
        edge: pixels to which the longer side is shrunk first; 0 if it is not shrunk.
        scale: tokens of a patch.
        low: tokens of an image with `detail: low`; 0 if that makes no difference.
    """

    rule: str = "tiles"
    base: float = 0
    tile: float = 0
    patch: int = 32
    cap: int = 1536
    edge: int = 0
    scale: float = 1.0
    low: float = 0


#: for models without a rule: the numbers that OpenAI documents for gpt-4o
COMMON_RULE: Final = ImageRule(rule="tiles", base=85, tile=170, low=85)


def image_tokens(image: Media, rule: ImageRule) -> float:
    """Return the tokens of one image; an image of unknown size counts as one of a common size."""
    return _of_size(*((image.width, image.height) if image.width else _UNKNOWN_EDGES), image.detail, rule)


def image_doubt(image: Media, rule: ImageRule) -> float:
    """Return the tokens by which an image of unknown size may exceed its estimate."""
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
        # Shrink until the patches fit, then further so that whole patches fill one side.
        shrink = math.sqrt(rule.cap * rule.patch**2 / (width * height))
        across, down = width * shrink / rule.patch, height * shrink / rule.patch
        shrink *= min(max(1, math.floor(across)) / across, max(1, math.floor(down)) / down)
        count = min(rule.cap, math.ceil(width * shrink / rule.patch) * math.ceil(height * shrink / rule.patch))
    return rule.base + count * rule.scale
