"""Which class names tell left from right: a flip along that axis would make one of the other.

A word counts wherever it stands by itself ("left lung", "KidneyRight", "rene_sinistro"). An abbreviation counts where the
same name with the other side is there, too ("femur_l" and "femur_r", "LV" and "RV"), or where nothing speaks against it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence


def sided_names(names: Sequence[str]) -> list[str]:
    """Those that name a side, in their order."""
    words = [_words(name) for name in names]
    known = {tuple(word.lower() for word in each) for each in words}
    return [
        name
        for name, each in zip(names, words, strict=True)
        if any(_is_side(each, place, known) for place in range(len(each)))
    ]


def _plain(text: str) -> str:
    """Without accents."""
    return "".join(letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))


WORDS = frozenset(
    _plain(
        "left right leftmost rightmost lefthand righthand leftsided rightsided "
        "sinister sinistra sinistrum sinistri sinistrae dexter dextra dextrum dextri dextrae "  # Latin
        "sinistro sinistre destro destra destri destre "  # Italian
        "links rechts linke linker linkes linken rechte rechter rechtes rechten "  # German, Dutch
        "gauche gauches droit droite droits droites "  # French
        "izquierda izquierdo izquierdas izquierdos derecha derecho derechas derechos "  # Spanish
        "esquerda esquerdo direita direito "  # Portuguese
        "esquerra esquerre dreta dret "  # Catalan
        "vanster hoger venstre hojre høyre højre "  # Swedish, Danish, Norwegian
        "vasen oikea "  # Finnish
        "lewa lewy lewe lewej prawa prawy prawe prawej leva levy leve prava pravy prave "  # Polish, Czech
        "левый левая левое левого левой правый правая правое правого правой"
    )
    .lower()
    .split()
)
IDEOGRAMS = "左右"
PAIRS = ("l r", "lt rt", "lft rgt", "lh rh", "sx dx", "sin dex", "sin dx", "li re", "g d", "izq der", "esq dir")
"""Abbreviations of which each says nothing by itself."""
OTHER: dict[str, set[str]] = {}
for _left, _right in (pair.split() for pair in PAIRS):
    OTHER.setdefault(_left, set()).add(_right)
    OTHER.setdefault(_right, set()).add(_left)
ALONE = frozenset({"l", "r", "lt", "rt", "lh", "rh"})
"""Those that are meant even if the other side is not there, where they stand beside a name."""


def _words(name: str) -> list[str]:
    """`LeftKidney_2` → Left, Kidney, 2. Accents are left out."""
    parts = re.split(r"[\W_]+", name)
    found = [word for part in parts for word in re.findall(r"[^\W\d_]+\d*|\d+", _apart(part))]
    return [_plain(word) for word in found]


def _apart(part: str) -> str:
    """CamelCase, with blanks: `LKidney` → L Kidney, `kidneyLeft` → kidney Left, `LV` as it is."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", part)


def _is_side(name: Sequence[str], place: int, known: set[tuple[str, ...]]) -> bool:
    words = [word.lower() for word in name]
    word = words[place]
    bare = word.rstrip("0123456789")
    if bare in WORDS or any(sign in word for sign in IDEOGRAMS):
        return not (bare == "left" and words[place + 1 : place + 2] == ["over"])
    row = _row(words, place, known)
    if any((*words[:place], other, *words[place + 1 :]) in known for other in _mirrored(name[place])):
        return len(bare) > 1 or row <= 3  # L, M and R are sides, A to Z are not
    if word.startswith(("left", "right")) and not word.startswith(("leftover", "righteous", "rightful")):
        return True  # leftlung
    beside_a_name = any(len(other) > 2 and not other.isdigit() for other in (*words[:place], *words[place + 1 :]))
    return word in ALONE and beside_a_name and row == 1


def _mirrored(written: str) -> set[str]:
    """The same on the other side, if it names one."""
    word = written.lower()
    bare = word.rstrip("0123456789")
    number = word[len(bare) :]
    found = {other + number for other in OTHER.get(bare, ())}
    found |= {word.replace(a, b) for a, b in (("left", "right"), ("right", "left")) if a in word}  # lungleft, lungright
    # LV and RV, LUL and RUL, lkid and rkid, but not led and red.
    if len(bare) <= 2 or (len(bare) <= 4 and (written.isupper() or bare[1] not in "aeiouy")):
        found |= {b + word[1:] for a, b in ("lr", "rl") if word.startswith(a)}
        found |= {bare[:-1] + b + number for a, b in ("lr", "rl") if bare.endswith(a)}
    return found


def _row(words: Sequence[str], place: int, known: set[tuple[str, ...]]) -> int:
    """How many names differ in this abbreviation alone: `spine T`, `spine L` and `spine S` are three."""
    number = words[place].lstrip("abcdefghijklmnopqrstuvwxyz")
    short = re.compile(r"[^\W\d_]{1,2}" + re.escape(number))
    rest = (*words[:place], *words[place + 1 :])
    return sum(
        len(other) == len(words)
        and (*other[:place], *other[place + 1 :]) == rest
        and short.fullmatch(other[place]) is not None
        for other in known
    )
