from __future__ import annotations

import pytest

from gateway.core.counting.families import TokenizerFamilies
from gateway.core.counting.images import COMMON_RULE, ImageRule, image_doubt, image_tokens
from gateway.core.counting.media import Media


@pytest.mark.parametrize(
    ("model", "size", "detail", "tokens"),
    [
        # the examples of OpenAI's documentation
        ("gpt-4o", (1024, 1024), "high", 765),
        ("gpt-4o", (2048, 4096), "high", 1105),
        ("gpt-4o", (4096, 8192), "low", 85),
        ("gpt-4.1-mini", (1024, 1024), "", 1024 * 1.62),
        ("gpt-4.1-mini", (1800, 2400), "", 1452 * 1.62),
        ("gpt-4o-mini", (512, 512), "", 8500),
        # as providers reported them
        ("gpt-4o", (1, 1), "auto", 255),
        ("gpt-5", (50, 50), "", 210),
        ("gpt-5-nano", (128, 128), "", 24),
        ("claude-haiku-4-5", (128, 128), "", 28),
        ("claude-3-5-sonnet-20240620", (228, 148), "", 57),
        ("claude-sonnet-4-5", (166, 282), "", 69),
        ("grok-4.3", (128, 128), "", 20),
        ("grok-4-1-fast", (239, 178), "", 256),
        ("granite3.2-vision", (239, 178), "auto", 770),
        # Anthropic's documentation: shrunk to 1,568 tokens; 4,784 from Opus 4.7 on
        ("claude-sonnet-4-6", (4000, 3000), "", pytest.approx(1568, rel=0.05)),
        ("claude-opus-4-8", (4000, 3000), "", pytest.approx(4784, rel=0.05)),
        ("gemini-2.5-flash", (128, 128), "", 258),
    ],
)
def test_images_cost_what_providers_document(
    families: TokenizerFamilies, model: str, size: tuple[int, int], detail: str, tokens: float
) -> None:
    rule = families.find(model, "openai", "chat").image
    assert image_tokens(Media("image", *size, detail), rule) == tokens


def test_image_patches_never_exceed_the_cap() -> None:
    rule = ImageRule(rule="patches", base=0, patch=32, cap=1536)
    for width, height in ((65_535, 1), (1, 65_535), (9000, 9000), (1249, 1250), (33, 60_000)):
        assert 1 <= image_tokens(Media("image", width, height), rule) <= 1536


def test_image_of_unknown_size_counts_as_a_common_size_with_doubt() -> None:
    rule = COMMON_RULE
    assert image_tokens(Media("image"), rule) == 255
    assert image_doubt(Media("image"), rule) == 765 - 255
    assert image_doubt(Media("image", 10, 10), rule) == 0
