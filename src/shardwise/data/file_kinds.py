"""What a file is that was not meant as data: what systems leave behind, by its name; a pointer, a web page, an archive, by its
first bytes, with what to do with it."""

from __future__ import annotations

import shlex
from pathlib import Path

_BINARY = {b"PAR1": "a Parquet file", b"ARROW1": "an Arrow file", b"\x89HDF": "an HDF5 file", b"%PDF": "a PDF file",
           b"SQLite format 3": "an SQLite database"}  # fmt: skip
_ARCHIVES = {b"PK\x03\x04": ("a zip archive", "unzip"), b"7z\xbc\xaf": ("a 7z archive", "7z x"),
             b"Rar!": ("a rar archive", "unrar x")}  # fmt: skip
_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ\0")
_PAGES = (b"<!doctype", b"<html", b"<head", b"<?xml")


_LEFT_BY_SYSTEMS = {"thumbs.db", "desktop.ini", "__macosx", "@eadir", "#recycle", "$recycle.bin", "lost+found"}


def is_left_by_a_system(name: str) -> bool:
    """Of a file or folder. Hidden ones are: .DS_Store, .ipynb_checkpoints, which holds copies."""
    return name.startswith(".") or name.lower() in _LEFT_BY_SYSTEMS


def foreign_kind(path: Path, head: bytes, read: str) -> str | None:
    """`head`: its first bytes, 512 or more, as they are after decompression. None: it may be text. `read`: what is read
    instead, where there is no other advice."""
    if head.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS, not the data itself: fetch the data (git lfs pull)"
    page = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1024].lower()
    if page.startswith(_PAGES) or (page.startswith(b"<!--") and b"<html" in page):
        return (
            "a web page, not data: a download was answered with a page (of an error, or of a login). Download it again"
        )
    if head[257:262] == b"ustar":
        return f"a tar archive: unpack it (tar xf {shlex.quote(str(path))}) and name what is in it"
    for magic, (what, unpack) in _ARCHIVES.items():
        if head.startswith(magic):
            return f"{what}: unpack it ({unpack} {shlex.quote(str(path))}) and name what is in it"
    if head.startswith(_PACKED):
        return "compressed twice: decompress it once, and name what comes of it"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16 text: save it as UTF-8"
    return next((f"{what}: {read}" for magic, what in _BINARY.items() if head.startswith(magic)), None)
