"""Pictures made of rectangles, the same wherever they are drawn: for a model's golden prompts, which keep no picture of
anybody's data.

As data URLs, which are their own file: what is read again is what was asked, whatever library wrote the PNG. May import
nothing of ours. Imported by golden.
"""

from __future__ import annotations

import base64
from io import BytesIO

from PIL import Image, ImageDraw

SIZE = (112, 84)
"""Width and height: of several patches, and not square."""
_COLOURS = ("white", "red", "blue", "green", "yellow", "black", "orange", "purple")


def drawn(number: int) -> str:
    """The ``number``-th picture, as a data URL: a ground and two rectangles, whose colours and places depend on it."""
    width, height = SIZE
    ground, large, small = (_COLOURS[(number + step) % len(_COLOURS)] for step in (0, 1, 2))
    shift = 7 * (number % 4)
    image = Image.new("RGB", SIZE, ground)
    pen = ImageDraw.Draw(image)
    pen.rectangle((8 + shift, 8, width // 2 + shift, height - 12), fill=large)
    pen.rectangle((width - 40, 20 + shift, width - 12, 40 + shift), fill=small)
    file = BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
