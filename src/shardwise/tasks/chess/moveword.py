"""One word of a game's text: the move, the number or the result that it says.

Imports nothing heavy: the processes that help to check games import this.
"""

from __future__ import annotations

import re

import chess


def read_move(board: chess.Board, word: str) -> chess.Move | None:
    """The legal move that a word says, in UCI or SAN; None if it says none."""
    return move_of(board, spelled(word))


def first_move_of(text: str) -> str:
    """The first word of a continuation that could be a move."""
    for found in re.finditer(r"\S+", text):
        word = NUMBER.sub("", found.group())
        if word and word.translate(ALIKE) not in RESULTS:
            return word
    return ""


def is_a_move(word: str) -> bool:
    """Whether a word has the form of a move, on whatever board."""
    form = spelled(word)
    return UCI.match(form) is not None or CASTLES.match(form) is not None or chess.SAN_REGEX.match(form) is not None


def quoted(text: str) -> str:
    """For messages: what was written may be as long as the file."""
    return repr(text if len(text) <= QUOTED else f"{text[: QUOTED - 1]}…")


QUOTED = 80
NUMBER = re.compile(r"^(\d+)(\.+|…)|^(\d+)$|^(\.+|…)(?!\d)")
_SIGNS = "!?‼⁇⁈⁉±∓⩲⩱∞□⌓⨀⊙○⟳↑→⇆⇄⨁⊕∆△▽∇"
_BALANCE = r"\+/?-|-/?\+|\+/?=|=/?\+"
_SUFFIX = re.compile(rf"(\$\d+|[{_SIGNS}]+|{_BALANCE}|e\.?p\.?)$")
# Not in mixed case: B4c3 is a bishop's move in SAN.
UCI = re.compile(r"(?:([a-h][1-8])[-x]?([a-h][1-8])|([A-H][1-8])[-X]?([A-H][1-8]))(?:=?([qrbnQRBN]))?$")
PLAIN = re.compile(r"[a-h][1-8][a-h][1-8][qrbn]?$")
CASTLES = re.compile(r"[oO0]-?[oO0](-?[oO0])?(?![\w-])")
ALONE = re.compile(rf"\$\d+|=?[{_SIGNS}]+=?|=|{_BALANCE}|-\+-|--\+|\+--")
"""What stands for itself between moves and is none: assessments."""
ALIKE = str.maketrans({**dict.fromkeys("‐‑‒–—−", "-"), **dict.fromkeys("\u041e\u043e\u039f\u03bf", "O")})
"""What is written for a hyphen, and letters of other alphabets that look like the O of castling."""
_FIGURINES = str.maketrans(
    {**dict(zip("♔♚♕♛♖♜♗♝♘♞", "KKQQRRBBNN", strict=True)), **dict.fromkeys("♙♟\ufe0e\ufe0f", "")}
)
RESULTS = {
    "*": "",
    "1-0": "1-0",
    "0-1": "0-1",
    **dict.fromkeys(("1/2-1/2", "1/2", "½-½", "½", "0.5-0.5"), "1/2-1/2"),
}
"""As they are written with hyphens."""
_PASSES = {"--", "0000", "Z0", "@@@@", "null"}


def spelled(word: str) -> str:
    """A word as a move is written, without signs of assessment, letters for figurines, and castling in one way."""
    word = word.translate(_FIGURINES).translate(ALIKE)
    while len(shorter := _SUFFIX.sub("", word)) < len(word):
        word = shorter
    if castles := CASTLES.match(word):
        word = castled(castles) + word[castles.end() :]
    if word.startswith("P") and len(word) > 2:
        word = word[1:]
    return word[:-1] if word.endswith("++") else word


def castled(word: re.Match[str]) -> str:
    return "O-O-O" if word[1] else "O-O"


def move_of(board: chess.Board, word: str, plain: bool = False) -> chess.Move | None:
    """`plain`: known to be in UCI as it is."""
    try:
        if plain:
            return board.parse_uci(word)
        if uci := UCI.match(word):
            return board.parse_uci("".join(part or "" for part in uci.groups()).lower())
        # python-chess takes "--" for a move that passes, which chess does not have.
        return board.parse_san(word) or None
    except ValueError:
        return None


def why_not(board: chess.Board, word: str) -> str:
    """Why a word that says no legal move says none, where there is more to say."""
    form = spelled(word)
    if form in _PASSES:
        return "it says that a side passes (a null move), which no game of chess has"
    if form.startswith(";"):
        return "a comment that begins with ; ends with its line, and the text has no other: write it in braces"
    promoted = form.rstrip("+#") + ("q" if UCI.match(form) else "=Q")
    if move_of(board, promoted):
        return f"it does not say what the pawn becomes ({promoted})"
    try:
        board.parse_san(form)
    except chess.AmbiguousMoveError:
        return "it is ambiguous, more than one piece can move so: write where it comes from (Nbd2, N1d2)"
    except ValueError:
        pass
    return ""
