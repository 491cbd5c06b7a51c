"""Text in the pictures of the docs: fonts differ from viewer to viewer, and none may leave its box or lie on other text."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

PICTURES = sorted((REPOSITORY / "docs").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
WIDE, WIDE_BOLD = 0.62, 0.72
"""The mean width of a character in fonts as wide as Verdana, in em."""
ABOVE, BELOW = 1.0, 0.3
"""How far letters reach from the line that they stand on, in em."""
GENERIC = {"serif", "sans-serif", "monospace"}


@dataclass(frozen=True)
class Area:
    name: str
    left: float
    top: float
    right: float
    bottom: float

    def holds(self, other: Area) -> bool:
        within = self.left <= other.left and other.right <= self.right
        return within and self.top <= other.top and other.bottom <= self.bottom

    def meets(self, other: Area) -> bool:
        beside = self.right <= other.left or other.right <= self.left
        return not (beside or self.bottom <= other.top or other.bottom <= self.top)


Styles = dict[str, str]


def drawn(element: ElementTree.Element, above: Styles) -> Iterator[tuple[ElementTree.Element, Styles]]:
    """Every element with what it has from those around it."""
    styles = {**above, **element.attrib}
    yield element, styles
    for each in element:
        yield from drawn(each, styles)


def texts(picture: Path) -> list[Area]:
    found = []
    for element, styles in drawn(ElementTree.parse(picture).getroot(), {}):
        if element.tag != f"{SVG}text":
            continue
        words, size = "".join(element.itertext()), float(styles["font-size"])
        width = len(words) * size * (WIDE_BOLD if styles.get("font-weight") == "bold" else WIDE)
        shift = {"middle": width / 2, "end": width}.get(styles.get("text-anchor", ""), 0.0)
        left, base = float(styles["x"]) - shift, float(styles["y"])
        found.append(Area(words, left, base - ABOVE * size, left + width, base + BELOW * size))
    return found


def boxes(picture: Path) -> list[Area]:
    """The rectangles but the first, which is the paper."""
    found = []
    for element, styles in drawn(ElementTree.parse(picture).getroot(), {}):
        if element.tag == f"{SVG}rect":
            left, top = float(element.get("x", 0)), float(element.get("y", 0))
            right, bottom = left + float(styles["width"]), top + float(styles["height"])
            found.append(Area(f"box at {left:g}, {top:g}", left, top, right, bottom))
    return found[1:]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_every_text_stays_in_one_box_in_a_wide_font(picture: Path) -> None:
    assert texts(picture)
    for text in texts(picture):
        around = [box.name for box in boxes(picture) if box.holds(text)]
        touched = [box.name for box in boxes(picture) if box.meets(text)]
        assert len(around) == 1 and touched == around, f"{text.name!r} is in {around} and reaches into {touched}"


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_no_text_lies_on_another(picture: Path) -> None:
    for one, other in itertools.combinations(texts(picture), 2):
        assert not one.meets(other), f"{one.name!r} and {other.name!r}"


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_a_picture_asks_for_no_font_that_a_viewer_may_not_have_and_needs_no_style_sheet(picture: Path) -> None:
    """Not every viewer reads style sheets: text that is to be small would be large."""
    root = ElementTree.parse(picture).getroot()
    families = {styles["font-family"] for element, styles in drawn(root, {}) if element.tag == f"{SVG}text"}
    assert families <= GENERIC
    assert not [
        element.tag for element, _ in drawn(root, {}) if element.tag == f"{SVG}style" or "style" in element.attrib
    ]


def test_the_estimate_finds_text_that_is_too_long(tmp_path: Path) -> None:
    picture = tmp_path / "a.svg"
    words = "ranks, torchrun, srun"
    picture.write_text(
        f'<svg xmlns="{SVG[1:-1]}"><rect width="400" height="100"/><rect x="20" y="10" width="150" height="50"/>'
        f'<text x="95" y="40" font-size="12" text-anchor="middle">{words}</text></svg>'
    )
    assert not boxes(picture)[0].holds(texts(picture)[0])
