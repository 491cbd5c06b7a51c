"""Loading a file makes the modules beside it importable: no test may find those of another."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def an_import_path_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
