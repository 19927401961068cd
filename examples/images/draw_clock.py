"""Draws `clock.jpg`, the image of the quick start: python -m examples.images.draw_clock.

The image is drawn by this program, so no third party holds rights to it. The ImageNet classes include "analog clock" (409) and
"wall clock" (892).
"""

import math
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter, ImageFont

SIZE = 1000
"""Width and height of the drawing in pixels; the file has half of each, which smooths the edges."""
CENTRE = SIZE // 2, SIZE // 2 - 10


def _at(angle_deg: float, radius: float) -> tuple[float, float]:
    angle = math.radians(angle_deg - 90)
    return CENTRE[0] + radius * math.cos(angle), CENTRE[1] + radius * math.sin(angle)


def _disc(draw: ImageDraw.ImageDraw, radius: float, fill: str | tuple[int, int, int]) -> None:
    x, y = CENTRE
    draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)


def draw_clock() -> Image.Image:
    """Return a round clock with black hands on a plaster wall, RGB [500, 500]."""
    wall = Image.effect_noise((SIZE // 4, SIZE // 4), 12).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
    image = Image.merge(
        "RGB", [wall.point([max(0, min(255, value + shift)) for value in range(256)]) for shift in (82, 74, 58)]
    )
    shadow = Image.new("L", (SIZE, SIZE), 0)
    ImageDraw.Draw(shadow).ellipse((CENTRE[0] - 360, CENTRE[1] - 320, CENTRE[0] + 400, CENTRE[1] + 440), fill=150)
    image.paste((70, 62, 50), mask=shadow.filter(ImageFilter.GaussianBlur(24)))
    draw = ImageDraw.Draw(image)
    _disc(draw, 380, (35, 32, 30))
    _disc(draw, 366, (92, 86, 80))
    _disc(draw, 346, (30, 28, 26))
    _disc(draw, 338, (250, 248, 240))
    for minute in range(60):
        inner, width = (300, 10) if minute % 5 == 0 else (316, 4)
        draw.line((*_at(minute * 6, inner), *_at(minute * 6, 328)), fill=(20, 20, 20), width=width)
    font = ImageFont.load_default(64)
    for hour in range(1, 13):
        draw.text(_at(hour * 30, 254), str(hour), fill=(20, 20, 20), font=font, anchor="mm")
    draw.line((*_at(125, 40), *_at(305, 180)), fill=(15, 15, 15), width=22)
    draw.line((*_at(228, 50), *_at(48, 276)), fill=(15, 15, 15), width=14)
    draw.line((*_at(30, 60), *_at(210, 296)), fill=(190, 30, 25), width=5)
    _disc(draw, 18, (15, 15, 15))
    return image.resize((SIZE // 2, SIZE // 2), Image.Resampling.LANCZOS)


if __name__ == "__main__":
    draw_clock().save(Path(__file__).with_name("clock.jpg"), quality=88)
