"""Nothing that is shipped replaces a method to look inside: observers are the seam."""

from __future__ import annotations

import re

from tests.conftest import REPOSITORY

SOURCE = REPOSITORY / "src" / "shardwise"
PATCHES = re.compile(
    r"unittest\.mock|type: ignore\[[^]]*method-assign|setattr\((Session|\w*[Ss]ession\b|\w*[Ww]orld\b|type\()"
)


def test_nothing_shipped_patches_methods() -> None:
    found = [
        f"{file.relative_to(SOURCE)}: {line.strip()}"
        for file in sorted(SOURCE.rglob("*.py"))
        for line in file.read_text().splitlines()
        if PATCHES.search(line)
    ]
    assert found == []
