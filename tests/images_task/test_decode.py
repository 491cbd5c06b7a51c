"""A stored image becomes what a person would see of it."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shardwise.errors import DataError
from shardwise.tasks.images import decode as module
from shardwise.tasks.images.config import ImagesData
from shardwise.tasks.images.decode import Trait, decode, inspect
from shardwise.tasks.images.sources import load_images
from tests.images_task.made import task_of, write_images
from tests.images_task.test_sources import own_hub_cache  # noqa: F401

RED, GREEN, BLUE, GREY = (255, 0, 0), (0, 255, 0), (0, 0, 255), (128, 128, 128)
LOSSLESS: dict[str, dict[str, Any]] = {
    "JPEG": {"quality": 100, "subsampling": 0},
    "PNG": {},
    "WEBP": {"lossless": True},
    "TIFF": {},
}


def stored(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def seen(content: bytes, background: tuple[int, int, int] = (255, 255, 255)) -> np.ndarray:
    image = decode(content, "it", background)
    assert image.mode == "RGB"
    return np.asarray(image)


# ---------------------------------------------------------------- which way up


def quarters() -> Image.Image:
    """32 wide and 16 high; red, green, blue and grey at top left, top right, bottom left and bottom right."""
    image = Image.new("RGB", (32, 16), RED)
    for colour, box in ((GREEN, (16, 0, 32, 8)), (BLUE, (0, 8, 16, 16)), (GREY, (16, 8, 32, 16))):
        image.paste(colour, box)
    return image


STANDING = {  # as the EXIF standard has it: what lies in row 0 and column 0 of the stored image
    1: (RED, GREEN, BLUE, GREY),
    2: (GREEN, RED, GREY, BLUE),
    3: (GREY, BLUE, GREEN, RED),
    4: (BLUE, GREY, RED, GREEN),
    5: (RED, BLUE, GREEN, GREY),
    6: (BLUE, RED, GREY, GREEN),
    7: (GREY, GREEN, BLUE, RED),
    8: (GREEN, GREY, RED, BLUE),
}


def rotated(orientation: int, kind: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return stored(quarters(), kind, exif=exif, **LOSSLESS[kind])


def corners(pixels: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(pixels[row, column].tolist()) for row in (2, -3) for column in (2, -3)]


@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_stands_as_its_orientation_says(orientation: int, kind: str) -> None:
    pixels = seen(rotated(orientation, kind))
    assert pixels.shape == ((16, 32, 3) if orientation < 5 else (32, 16, 3))
    np.testing.assert_allclose(corners(pixels), STANDING[orientation], atol=3)


@pytest.mark.parametrize("orientation", [0, 9, 255])
def test_an_orientation_that_means_nothing_changes_nothing(orientation: int) -> None:
    np.testing.assert_allclose(corners(seen(rotated(orientation, "PNG"))), STANDING[1])


def test_exif_that_is_damaged_does_not_keep_an_image_from_being_used() -> None:
    content = stored(quarters(), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\x7fgarbage", **LOSSLESS["JPEG"])
    np.testing.assert_allclose(corners(seen(content)), STANDING[1], atol=3)


@pytest.mark.parametrize("source", ["folder", "hub"])
def test_training_and_validation_see_images_upright_from_every_source(
    tmp_path: Path,
    source: str,
    own_hub_cache: None,  # noqa: F811
) -> None:
    root = tmp_path / "set"
    for part in ("train", "valid"):
        for name in ("cat", "dog"):
            (root / part / name).mkdir(parents=True)
            for orientation in (1, 6):
                (root / part / name / f"{orientation}.jpg").write_bytes(rotated(orientation, "JPEG"))
    options: dict[str, Any] = {
        "folder": {"root": str(root)},
        "hub": {"dataset": str(root), "valid_split": "validation"},
    }
    images = load_images(ImagesData.model_validate({"source": source, **options[source]}), 0, 32)
    for pictures in (images.train, images.valid):
        sizes = sorted(pictures.open(index).size for index in range(len(pictures)))
        assert sizes == [(16, 32), (16, 32), (32, 16), (32, 16)]
    look = ["data.min_crop_area=1.0", "data.flip=false", "data.crop_pct=1.0", "data.image_size=16"]
    task = task_of(
        f"task: images\ndata: {{source: {source}}}",
        *look,
        *(f"data.{key}={value}" for key, value in options[source].items()),
    )
    for data in (task.train_data(), task.valid_data()):
        lying, upright = (data[index][0].numpy() for index in (0, 1))
        assert np.abs(lying[2, 2].astype(int) - upright[2, -3]).max() < 30, (
            "what was at the top left is at the top right"
        )


# ---------------------------------------------------------------- what is transparent


def half_transparent(mode: str) -> bytes:
    """Black everywhere; opaque on the left, transparent on the right."""
    black = Image.new("RGBA", (8, 4), (0, 0, 0, 255))
    black.paste((0, 0, 0, 0), (4, 0, 8, 4))
    if mode in ("RGBA", "LA"):
        return stored(black.convert(mode))
    if mode == "16-bit":
        return png_16_bit(6, (0, 0, 0, 65535), (0, 0, 0, 0))
    if mode == "16-bit with tRNS":
        return png_16_bit(2, (0, 0, 0), (0x1234, 0, 0x00FF), transparent=(0x1234, 0, 0x00FF))
    colours = np.zeros((4, 8), np.uint8)
    colours[:, 4:] = 1
    if mode == "palette with tRNS":
        image = Image.new("P", (8, 4))
        image.putdata(colours.ravel().tolist())
        image.putpalette([0, 0, 0, 0, 0, 0])
        return stored(image, transparency=bytes([255, 0]))
    if mode == "GIF":
        image = Image.new("P", (8, 4))
        image.putdata(colours.ravel().tolist())
        image.putpalette([0, 0, 0, 1, 1, 1])
        return stored(image, "GIF", transparency=1)
    if mode == "L with tRNS":
        return stored(Image.fromarray(colours), transparency=1)
    return stored(Image.fromarray(np.repeat(colours[..., None], 3, axis=2)), transparency=(1, 1, 1))


def png_16_bit(colours: int, left: tuple[int, ...], right: tuple[int, ...], transparent: tuple[int, ...] = ()) -> bytes:
    """Sixteen bits per value, which Pillow reads and does not write. `colours`: the type of the PNG standard."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    def values(colour: tuple[int, ...]) -> bytes:
        return struct.pack(f">{len(colour)}H", *colour)

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 4, 16, colours, 0, 0, 0))
    if transparent:
        header += chunk(b"tRNS", values(transparent))
    row = b"\x00" + values(left) * 4 + values(right) * 4
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(row * 4)) + chunk(b"IEND", b"")


KINDS = ["RGBA", "LA", "palette with tRNS", "GIF", "L with tRNS", "RGB with tRNS", "16-bit", "16-bit with tRNS"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("background", [(255, 255, 255), (10, 200, 30)])
def test_what_is_transparent_shows_the_background(kind: str, background: tuple[int, int, int]) -> None:
    pixels = seen(half_transparent(kind), background)
    assert np.abs(pixels[:, :4].astype(int)).max() <= 1 and (pixels[:, 4:] == background).all()
    assert Trait.TRANSPARENT in inspect(half_transparent(kind), "it").traits


def test_what_is_half_transparent_is_mixed_with_the_background() -> None:
    glass = Image.new("RGBA", (4, 4), (200, 0, 0, 128))
    assert seen(stored(glass), (0, 100, 0))[0, 0].tolist() == pytest.approx([100, 50, 0], abs=1)


def test_an_opaque_image_with_an_alpha_channel_is_not_called_transparent() -> None:
    assert Trait.TRANSPARENT not in inspect(stored(Image.new("RGBA", (9, 9), (1, 2, 3, 255))), "it").traits
    assert seen(stored(Image.new("RGBA", (9, 9), (1, 2, 3, 255))))[0, 0].tolist() == [1, 2, 3]


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("content", "colour"),
    [
        (stored(Image.new("1", (9, 9), 1)), [255, 255, 255]),
        (stored(Image.new("1", (9, 9), 0)), [0, 0, 0]),
        (stored(Image.new("L", (9, 9), 77)), [77, 77, 77]),
        (stored(Image.new("CMYK", (9, 9), (0, 255, 255, 0)), "TIFF"), [255, 0, 0]),
        (stored(Image.new("CMYK", (9, 9), (0, 0, 0, 255)), "TIFF"), [0, 0, 0]),
        (stored(Image.new("CMYK", (9, 9), (0, 255, 255, 0)), "JPEG", quality=100), [254, 0, 0]),
        (stored(Image.new("CMYK", (9, 9), (255, 0, 0, 0)), "JPEG", quality=100), [0, 255, 255]),
        (stored(Image.new("YCbCr", (9, 9), (76, 85, 255)), "TIFF"), [254, 0, 0]),
    ],
)
def test_other_kinds_of_pixels_become_the_right_colours(content: bytes, colour: list[int]) -> None:
    np.testing.assert_allclose(seen(content)[0, 0], colour, atol=2)


@pytest.mark.parametrize(
    ("pixels", "kind", "mode"),
    [
        (np.full((9, 9), 40000, np.uint16), "PNG", "I;16"),
        (np.full((9, 9), 40000, np.uint16), "TIFF", "I;16"),
        (np.full((9, 9), 0.5, np.float32), "TIFF", "F"),
        (np.full((9, 9), 70000, np.int32), "TIFF", "I"),
    ],
)
def test_values_that_do_not_fit_into_eight_bits_are_refused_and_not_cut_off(
    pixels: np.ndarray, kind: str, mode: str
) -> None:
    content = stored(Image.fromarray(pixels), kind)
    for look in (decode, inspect):
        with pytest.raises(DataError, match=rf"scan.tif .*more than 8 bits per value \(mode {mode}\); convert it to 8"):
            look(content, "scan.tif")


def test_grey_of_16_bits_is_refused_with_and_without_transparency() -> None:
    for look in (decode, inspect):
        with pytest.raises(DataError, match=r"scan.png .*more than 8 bits per value \(mode LA;16B\); convert it to 8"):
            look(png_16_bit(4, (300, 65535), (40000, 65535)), "scan.png")
        look(png_16_bit(6, (300, 0, 0, 65535), (40000, 0, 0, 65535)), "colour.png")


# ---------------------------------------------------------------- size, and further frames


def test_an_image_of_one_pixel_can_be_seen_and_is_mentioned() -> None:
    content = stored(Image.new("RGB", (1, 1), RED))
    assert seen(content).tolist() == [[list(RED)]]
    assert inspect(content, "it").traits & ~Trait.ONE_COLOUR == Trait.TINY
    assert inspect(stored(Image.new("RGB", (8, 8))), "it").traits & ~Trait.ONE_COLOUR == Trait.NONE
    assert inspect(stored(Image.new("RGB", (7, 90))), "it").traits & ~Trait.ONE_COLOUR == Trait.TINY


def test_huge_images_are_mentioned_and_those_beyond_all_measure_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    content = stored(Image.new("RGB", (100, 100)))
    monkeypatch.setattr(module, "HUGE", 9_999)
    assert inspect(content, "it").traits & ~Trait.ONE_COLOUR == Trait.HUGE
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4_000)
    with pytest.raises(
        DataError, match=r"map.png cannot be read as an image: it is too large to be decoded .*make it smaller"
    ):
        decode(content, "map.png")


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_several_frames_the_first_is_seen(kind: str) -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in (RED, GREEN, BLUE)]
    options = {"lossless": True} if kind == "WEBP" else {}
    content = stored(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert seen(content)[8, 8].tolist() == list(RED)
    assert inspect(content, "it").traits & ~Trait.ONE_COLOUR == Trait.SEVERAL_FRAMES
    assert inspect(stored(frames[0], kind), "it").traits & ~Trait.ONE_COLOUR == Trait.NONE


def test_a_file_is_read_by_what_it_holds_and_not_by_its_name(tmp_path: Path) -> None:
    write_images(tmp_path / "train", {"cat": 2, "dog": 2}, ".jpg")
    (tmp_path / "train" / "cat" / "0.jpg").rename(tmp_path / "train" / "cat" / "0.PNG")
    images = load_images(ImagesData(source="folder", root=str(tmp_path)), 0, 32)
    for part in (images.train, images.valid):
        assert all(part.open(index).size == (24, 20) for index in range(len(part)))
