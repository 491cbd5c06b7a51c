"""From the bytes of an image file to the RGB image that a person would see, and what is worth knowing about the file.

Pillow hands over what is stored: lying on its side where the camera was, with colours under what is transparent.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntFlag
from hashlib import blake2b
from pathlib import Path

from PIL import Image

from shardwise.errors import DataError

Background = tuple[int, int, int]
WHITE: Background = (255, 255, 255)
DEEP_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
"""More than eight bits per value: Pillow would cut them off at 255 without a word."""
TINY = 8
"""Pixels. An image with a shorter side is likely a placeholder or a failed download."""
HUGE = 80_000_000
"""Pixels. An image with more takes seconds whenever it is decoded."""

# Of an image above about 90 million pixels. It is told by name instead, once, when the images are checked.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
# Of EXIF that is damaged: the image is not.
warnings.filterwarnings("ignore", message="Corrupt EXIF data", category=UserWarning)

_DRAWN_SMALL = ("JPEG", "MPO")
"""Formats that are looked at in a smaller size, in which different pictures may be the same. Packed anew, they lose something: no
other file has the same pixels."""
_ALPHA_MODES = ("RGBA", "RGBa", "LA", "La", "PA")
_ORIENTATION = 0x0112
"""The EXIF tag: how the stored image must be turned or mirrored to stand upright."""
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class Trait(IntFlag):
    """What a person should hear of, though the image can be trained on."""

    NONE = 0
    SEVERAL_FRAMES = 1
    TRANSPARENT = 2
    TINY = 4
    HUGE = 8
    ONE_COLOUR = 16


@dataclass(frozen=True)
class Facts:
    """What a look at a stored image has found."""

    content: int
    """Equal numbers: of JPEG files equal bytes, of all others equal pixels."""
    traits: Trait


def decode(source: Path | bytes, name: str, background: Background = WHITE) -> Image.Image:
    """An image file as RGB, upright, decoded to its last byte; what is transparent shows the background."""
    with _opened(source, name) as image:
        return _flat(_upright(image, name), background)


def inspect(source: bytes, name: str) -> Facts:
    """Raises what `decode` would."""
    if not source:
        raise DataError(f"{name} cannot be read as an image: it is empty (0 bytes)")
    with _opened(source, name) as image:
        traits = Trait.TINY if min(image.size) < TINY else Trait.NONE
        if image.width * image.height > HUGE:
            traits |= Trait.HUGE
        image.draft("RGB", (1, 1))  # JPEG at an eighth of its size, which is faster: every byte is still read
        upright = _upright(image, name)
        alpha = _alpha(upright)
        if alpha is not None and alpha.getextrema()[0] < 255:
            traits |= Trait.TRANSPARENT
        flat = _flat(upright, WHITE)
        if all(low == high for low, high in flat.getextrema()):
            traits |= Trait.ONE_COLOUR
        if getattr(image, "is_animated", False):
            traits |= Trait.SEVERAL_FRAMES
        seen = source if image.format in _DRAWN_SMALL else repr(flat.size).encode() + flat.tobytes()
    return Facts(int.from_bytes(blake2b(seen, digest_size=8).digest()), traits)


@contextmanager
def _opened(source: Path | bytes, name: str) -> Iterator[Image.Image]:
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            yield image
    except DataError:
        raise
    except Exception as error:  # Pillow's plugins raise what they like: SyntaxError, zlib.error, struct.error
        raise DataError(f"{name} cannot be read as an image: {_reason(error)}") from None


def _upright(image: Image.Image, name: str) -> Image.Image:
    deep = image.mode if image.mode in DEEP_MODES else _deep_grey(image)
    image.load()  # which turns a TIFF by itself and removes its tag (Pillow 13)
    if deep or image.mode in DEEP_MODES:
        raise DataError(
            f"{name} cannot be read as an image: it has more than 8 bits per value (mode {deep or image.mode}); convert it to 8, "
            "so that you choose which of its values become black and white"
        )
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except Exception:  # EXIF that cannot be read says nothing
        return image
    turn = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)


def _deep_grey(image: Image.Image) -> str:
    """How the file has its values, if these are grey, transparent and of more than 8 bits: Pillow takes them down to 8 when it
    decodes them (13.0)."""
    stored = {
        str(part)
        for _, _, _, how in getattr(image, "tile", None) or ()
        for part in (how if isinstance(how, tuple) else [how])
    }
    return next((part for part in stored if part.startswith("LA;16")), "")


def _flat(image: Image.Image, background: Background) -> Image.Image:
    alpha = _alpha(image)
    if alpha is None:
        return image.convert("RGB")
    canvas = Image.new("RGB", image.size, background)
    canvas.paste(_straight(image).convert("RGB"), mask=alpha)
    return canvas


def _alpha(image: Image.Image) -> Image.Image | None:
    """How opaque each pixel is; None where all of them are."""
    palette = image.palette.mode if image.mode == "P" and image.palette is not None else ""
    if image.mode in _ALPHA_MODES or "transparency" in image.info or palette.endswith("A"):
        return _straight(image).getchannel("A")
    return None


def _straight(image: Image.Image) -> Image.Image:
    """In RGBA, with colours that are not multiplied with their opacity."""
    if image.mode == "La":
        image = image.convert("LA")
    colour = image.info.get("transparency")
    if (
        isinstance(colour, tuple) and max(colour) > 255
    ):  # of 16 bits, though Pillow has taken the pixels down to 8 (13.0)
        image.info["transparency"] = tuple(value >> 8 for value in colour)
    return image.convert("RGBA")


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "it is gone, or a link that leads nowhere"
    if isinstance(error, Image.DecompressionBombError):
        return f"it is too large to be decoded at every step ({str(error).partition(',')[0]}): make it smaller, or cut it up"
    text = str(error)
    if "cannot identify image file" in text:
        return "not a kind of image that Pillow knows"
    return text or repr(error)
