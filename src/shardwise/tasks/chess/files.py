"""Files of games: what a file holds, one text after the other, with the line where each begins.

JSON lines or PGN, as they are or compressed. What a file is, its first bytes say.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import shlex
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.data.file_kinds import foreign_kind
from shardwise.errors import DataError, MissingExtra, one_line
from shardwise.tasks.chess.examine import Text
from shardwise.tasks.chess.movetext import has_several_moves, same_position, stated_fen
from shardwise.tasks.chess.moveword import ALIKE, QUOTED, RESULTS, quoted

LONGEST_LINE = 2**26
_MAGIC = {"gz": b"\x1f\x8b", "zst": b"\x28\xb5\x2f\xfd", "bz2": b"BZh", "xz": b"\xfd7zXZ\0"}
_READ = "JSON lines and PGN are read, as text in UTF-8, also compressed (gz, zst, bz2, xz)"
_SKIPPABLE = {bytes([kind]) + b"\x2a\x4d\x18" for kind in range(0x50, 0x60)}
"""A zstd file may begin with a frame that holds no data, as those do that are written in parallel."""
_BOM = b"\xef\xbb\xbf"


class GamesFile:
    def __init__(self, path: Path, key: str, column: str, fen_column: str | None = None) -> None:
        """`key`: where the config names it, for messages."""
        self.path, self.column, self.fen_column = path, column, fen_column
        self.name, self.unit, self.is_pgn = str(path), "line", False
        if path.is_dir():
            inside = ", ".join(sorted(each.name for each in path.iterdir())[:3])
            raise DataError(
                f"{key}: {path} is a folder: name the files themselves{f' ({inside}, …)' if inside else ''}"
            )
        if path.is_symlink() and not path.exists():
            raise DataError(
                f"{key}: {path} is a link to {path.readlink()}, and that is not there: name the file itself"
            )
        if path.exists() and not path.is_file():
            raise DataError(
                f"{key}: {path} is a pipe or a device, not a file: write what comes from it to a file first"
            )
        if not path.is_file():
            pattern = ". Patterns are not filled in: name each file" if re.search(r"[*?\[]", str(path)) else ""
            raise DataError(f"{key}: there is no file {path}{pattern}")
        self._raw: BinaryIO | None = None
        self._has_fen, self._without_fen = False, ""

    def stamp(self) -> list[Any]:
        about = self.path.stat()
        # The time of the last change of the file's entry too: who sets the other back does not set back this one.
        file = [str(self.path.resolve()), about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino]
        return [*file, self.column, self.fen_column]

    def share_read(self) -> float:
        if self._raw is None or self._raw.closed:
            return 1.0
        return self._raw.tell() / max(1, self.path.stat().st_size)

    def texts(self) -> Iterator[Text]:
        try:
            with self.path.open("rb", buffering=2**20) as raw:
                self._raw = raw
                stream = io.BufferedReader(_Unpacked(self.path, raw), 2**20)
                head = stream.peek(2**16)[: 2**16]
                if kind := foreign_kind(self.path, head, _READ):
                    raise DataError(f"{self.path} is {kind}")
                self.is_pgn = _is_pgn(self.path, head)
                if self.is_pgn and _JSON.match(head.removeprefix(_BOM)):
                    raise DataError(f"{self.path}: its lines are JSON, not PGN: give the file a name with .jsonl")
                yield from self._pgn(stream) if self.is_pgn else self._json_lines(stream)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror or error}") from None

    # ---------------------------------------------------------------- JSON lines

    def _json_lines(self, stream: io.BufferedReader[Any]) -> Iterator[Text]:
        self._has_fen, self._without_fen = False, ""
        # Not str.splitlines, which breaks lines at characters that may stand within a JSON text, such as U+2028.
        for number, line in enumerate(iter(lambda: stream.readline(LONGEST_LINE), b""), start=1):
            where = f"{self.path}, line {number}"
            if len(line) == LONGEST_LINE:
                raise DataError(f"{where}: longer than {LONGEST_LINE // 2**20} MiB; each line is one game")
            try:
                content = line.removeprefix(_BOM).decode()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{self.path} is not a text file in UTF-8: {error.reason} at byte {error.start} of line {number}"
                ) from None
            if content.strip():
                yield Text(number, self._text_of(content, where, first=number == 1))
        # Many writers leave out a key that is null. One that no line has is misspelled.
        if self._without_fen and not self._has_fen:
            raise DataError(f"{self._without_fen}; data.fen_column names it")

    def _text_of(self, line: str, where: str, *, first: bool) -> str:
        shape = f'each line is an object like {{"{self.column}": …}}'
        try:
            record = json.loads(line, object_pairs_hook=_Pairs if line.count(f'"{self.column}"') > 1 else None)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            hint = _hint(line.strip()) if first else ""
            raise DataError(f"{where}: not valid JSON ({reason}); {shape}{hint}") from None
        if isinstance(record, _Pairs):
            if sum(key == self.column for key, _ in record) > 1:
                raise DataError(f"{where}: the key {self.column!r} stands there twice")
            record = dict(record)
        if not isinstance(record, dict):
            # A list of single words is the moves of one game.
            games = isinstance(record, list) and any(not isinstance(each, str) or " " in each for each in record)
            hint = _hint(line.strip()) if games and first else ""
            raise DataError(f"{where}: no object, but of type {type(record).__name__}; {shape}{hint}")
        if self.column not in record:
            raise DataError(
                f"{where}: no text under {self.column!r} (found: {_keys(record)}); data.text_column names the key"
            )
        return text_of(record[self.column], self._fen_of(record, where), where, self.column, self.fen_column)

    def _fen_of(self, record: dict[str, Any], where: str) -> Any:
        if self.fen_column is None:
            return None
        if self.fen_column in record:
            self._has_fen = True
        elif not self._without_fen:
            self._without_fen = f"{where}: no key {self.fen_column!r}, and in no other line (found: {_keys(record)})"
        return record.get(self.fen_column)

    # ---------------------------------------------------------------- PGN

    def _pgn(self, stream: io.BufferedReader[Any]) -> Iterator[Text]:
        """Games by their tags and results. Whatever is wrong inside one is found when its moves are read."""
        lines: list[str] = []
        tags: set[str] = set()
        began, moves, over, comment, all_over = 1, False, False, False, True
        for number, line in enumerate(_lines_of(stream, self.path), start=1):
            bare = line.strip()
            tag = _TAG.match(bare)
            # A comment that is not closed would swallow the rest of the file.
            if comment:
                starts = _EVENT.match(bare) is not None
            else:
                starts = (over and bool(bare)) or (tag is not None and (moves or tag[1] in tags))
            if starts:
                yield Text(began, "".join(lines))
                all_over = all_over and (over or not moves)
                lines, tags, began, moves, over, comment = [], set(), number, False, False, False
            if not lines and not bare:
                began = number + 1
                continue
            lines.append(line)
            if tag and not comment:
                tags.add(tag[1])
            elif bare and not (line.startswith("%") or (bare.startswith(";") and not comment)):
                moves = True
                if "{" in bare or "}" in bare:
                    comment = _in_comment(bare, comment)
                over = not comment and _ENDS.search(bare.translate(ALIKE).replace(" - ", "-")) is not None
        if tags or moves:
            cut = moves and not over and all_over and began > 1
            problem = (
                "the file ends before the result of this game, and all others have one: it is cut off" if cut else ""
            )
            # The line end is there for a comment that begins with ; and is the last of the file.
            yield Text(began, "".join(lines) + "\n", problem)


def text_of(value: Any, fen: Any, where: str, column: str, fen_column: str | None) -> str:
    """Two cells of a table as one text: a list of moves is a text, too. `where` names their row, for messages."""
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        _check_one_game(value, f"{where}: {column!r}")
        value = " ".join(value)
    if not isinstance(value, str):
        raise DataError(f"{where}: {column!r} is {_short(value)}: a text is expected, or a list of moves")
    if fen is not None and not isinstance(fen, str):
        raise DataError(f"{where}: {fen_column!r} is {_short(fen)}: a position in FEN is expected, as a text, or null")
    if not fen or not fen.strip() or not value.strip():
        return value
    if (said := stated_fen(value)) is None:
        return f'[FEN "{fen.strip()}"]\n{value}'
    if not same_position(said, fen):
        raise DataError(
            f"{where}: {column!r} says that the game starts from {quoted(said)}, and {fen_column!r} from {quoted(fen)}: "
            "correct one of the two"
        )
    return value


def _check_one_game(words: list[str], what: str) -> None:
    """Lines of one game may be a list: its numbers show that they belong together. Without them, nothing does."""
    if len(words) > 1 and (game := next((word for word in words if has_several_moves(word)), None)) is not None:
        raise DataError(
            f"{what} is a list of games ({quoted(game)} has several moves): write each game on a line of its own, or, if it is "
            "one game, one move in each place"
        )


def _hint(line: str) -> str:
    if _TAG.match(line):
        return ". This looks like PGN: give the file a name with .pgn"
    if line.startswith("["):
        return ". This looks like one JSON array: write each game on a line of its own"
    return "" if line.startswith("{") else ". Games of PGN are read from files named .pgn"


def _keys(record: dict[str, Any]) -> str:
    return one_line(", ".join(record), QUOTED)


def _short(value: Any) -> str:
    if value is None:
        return "null"
    return f"{type(value).__name__} {str(value)[:40]!r}"


class _Pairs(list[tuple[str, Any]]):
    """An object of JSON as it stands, with keys that come twice."""


_TAG = re.compile(r'\[\s*([A-Za-z]\w*)\s+".*"\s*\]$')
_EVENT = re.compile(r'\[\s*(Event|Site|Date|Round|White|Black|Result|FEN|SetUp|Variant)\s+"')
_JSON = re.compile(rb'\s*(\{\s*"[^"]*"\s*:|\[\s*[\[{"])')
"""How lines of JSON begin, and no PGN: neither a comment in braces nor a tag."""
_ENDS = re.compile(rf"(^|[\s)}}])({'|'.join(map(re.escape, RESULTS))})$")


def _is_pgn(path: Path, head: bytes) -> bool:
    suffixes = [each.lower() for each in path.suffixes]
    if ".pgn" in suffixes:
        return True
    if {".json", ".jsonl", ".ndjson"} & set(suffixes):
        return False
    return re.match(rb'\s*(%[^\n]*\s+)*\[\s*[A-Za-z]\w*\s+"', head.removeprefix(_BOM)) is not None


def _in_comment(line: str, inside: bool) -> bool:
    """Braces do not nest: within a comment, { is a character like any other."""
    for brace in re.findall(r"[{}]", line):
        inside = brace == "{"
    return inside


def _lines_of(stream: io.BufferedReader[Any], path: Path) -> Iterator[str]:
    """Lines that end with any of the three line ends; each in UTF-8, or else in Latin-1, as names of players often are."""
    # Latin-1 gives every byte back as it was.
    lines = io.TextIOWrapper(stream, encoding="latin-1", newline=None)
    for number, line in enumerate(iter(lambda: lines.readline(LONGEST_LINE), ""), start=1):
        if "\0" in line or len(line) == LONGEST_LINE:
            raise DataError(
                f"{path}, line {number}: this is no text (it has zero bytes or no lines): copy the file again"
            )
        content = line.encode("latin-1").removeprefix(_BOM)
        try:
            yield content.decode()
        except UnicodeDecodeError:
            yield content.decode("latin-1")


class _Unpacked(io.RawIOBase):
    """What a file holds, unpacked if it is compressed. A file that is damaged or ends too early is a DataError."""

    def __init__(self, path: Path, raw: BinaryIO) -> None:
        self.path = path
        head = raw.read(8)
        raw.seek(0)
        kind = next((kind for kind, magic in _MAGIC.items() if head.startswith(magic)), None)
        if head[:4] in _SKIPPABLE:
            kind = "zst"
        named = path.suffix.lower().removeprefix(".")
        named = {"gzip": "gz", "zstd": "zst"}.get(named, named)
        if named in _MAGIC and kind is None:
            what = "is empty" if not head else f"does not begin as a .{named} file does"
            raise DataError(f"{path} {what}: copy it again, or, if it is not compressed, give it another name")
        try:
            self.stream: Any = _opened(kind, raw)
        except _BROKEN as error:
            raise self._damaged(error) from None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            content = self.stream.read(len(buffer))
        except _BROKEN as error:
            raise self._damaged(error) from None
        buffer[: len(content)] = content
        return len(content)

    def _damaged(self, error: Exception) -> DataError:
        if "too much memory" in str(error):  # zstd's own words, seen with pyarrow 26: more than 128 MiB are not taken
            file, again = (shlex.quote(str(each)) for each in (self.path, self.path.with_name(f"new-{self.path.name}")))
            return DataError(
                f"{self.path} was compressed with a long window (zstd --long), which is not read. Compress it again: "
                f"zstd -dc --long=31 {file} | zstd -o {again}"
            )
        return DataError(f"{self.path} is damaged or cut off ({str(error) or type(error).__name__}): copy it again")


_BROKEN = (EOFError, OSError, zlib.error, lzma.LZMAError, ValueError)
"""What the readers of compressed files raise."""


def _opened(kind: str | None, raw: BinaryIO) -> Any:
    if kind == "gz":
        return gzip.GzipFile(fileobj=raw)
    if kind == "bz2":
        return bz2.BZ2File(raw)
    if kind == "xz":
        return lzma.LZMAFile(raw)
    if kind == "zst":
        try:
            import pyarrow
        except ImportError:
            raise MissingExtra.of("pyarrow", "lm", "reading a .zst file") from None
        return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")
    return raw
