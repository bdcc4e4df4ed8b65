"""A contact sheet: thumbnails of a split, each above the name of its class.

In: a source and how many images to show. Out: a PNG. A corrupt image is a red square, so that it is seen.
"""

from __future__ import annotations

import io

from PIL import Image, ImageDraw, ImageFont

from paceline.core.errors import DataError
from paceline.data.decoding.decode import CorruptImage, decode
from paceline.data.inspection.inspect_split import chosen
from paceline.data.sources.source_protocol import Source

_SIDE = 112
_TEXT_HEIGHT = 16
_GAP = 4
_COLUMNS = 10
_LETTERS = 17
_PAPER, _INK, _ALARM = (255, 255, 255), (30, 30, 30), (200, 30, 30)


def contact_sheet(source: Source, images: int) -> bytes:
    """At most `images` thumbnails, by class, drawn by hash: the same ones every time."""
    indices = chosen(len(source), images).tolist()
    indices.sort(key=lambda i: (int(source.labels[i]), i))
    columns = min(_COLUMNS, len(indices))
    rows = -(-len(indices) // columns)
    cell_width, cell_height = _SIDE + _GAP, _SIDE + _TEXT_HEIGHT + _GAP
    sheet = Image.new("RGB", (columns * cell_width + _GAP, rows * cell_height + _GAP), _PAPER)
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default()
    for place, index in enumerate(indices):
        row, column = divmod(place, columns)
        left, top = column * cell_width + _GAP, row * cell_height + _GAP
        thumbnail = _thumbnail(source, index)
        # In the middle of its square, at the bottom, right above its name.
        sheet.paste(
            thumbnail, (left + (_SIDE - thumbnail.width) // 2, top + _SIDE - thumbnail.height)
        )
        draw.text((left, top + _SIDE + 1), _caption(source, index), fill=_INK, font=font)
    stream = io.BytesIO()
    sheet.save(stream, "PNG")
    return stream.getvalue()


def _thumbnail(source: Source, index: int) -> Image.Image:
    try:
        image = decode(source.read(index), 3)
    except (CorruptImage, DataError):
        return Image.new("RGB", (_SIDE, _SIDE), _ALARM)
    scale = _SIDE / max(image.size)
    width, height = (max(1, round(side * scale)) for side in image.size)
    # Small images are enlarged as they are, pixel by pixel; smoothing would hide what they hold.
    method = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BICUBIC
    return image.resize((width, height), method)


def _caption(source: Source, index: int) -> str:
    """The smallest font of Pillow knows Latin letters only."""
    name = source.classes[int(source.labels[index])]
    name = name.encode("latin-1", "replace").decode("latin-1")
    return name if len(name) <= _LETTERS else name[: _LETTERS - 2] + ".."
