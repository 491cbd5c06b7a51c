"""The versions of PyTorch that shardwise is tested on: the workflow runs both ends."""

from __future__ import annotations

import re

import torch

OLDEST, NEWEST = (2, 11), (2, 15)
"""Both are tested, each with all of its patch releases."""


def untested_version(version: str = torch.__version__) -> str | None:
    """A sentence for the log where this version of PyTorch lies outside the tested range; None: it lies within."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST:
        return None
    oldest, newest = (".".join(map(str, end)) for end in (OLDEST, NEWEST))
    return (
        f"PyTorch {version} is outside the versions that shardwise is tested on ({oldest} to {newest}). If something breaks, "
        f"install one of those: pip install 'torch>={oldest},<{NEWEST[0]}.{NEWEST[1] + 1}'"
    )
