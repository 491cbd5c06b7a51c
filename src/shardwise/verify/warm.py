"""Imported by the server that ranks are forked from, so that none of them has to import it again."""

from __future__ import annotations

import contextlib
import importlib
import os

import shardwise.verify.rank  # noqa: F401

# Whatever is wrong with the task, its rank will say so.
with contextlib.suppress(Exception):
    if module := os.environ.get("SHARDWISE_VERIFY_TASK"):
        importlib.import_module(module)
