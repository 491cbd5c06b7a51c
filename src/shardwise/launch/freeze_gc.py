"""Imported last by the server that ranks are forked from: what is there by then stays, and no collection of garbage in a rank
looks at it. A look writes to every object: it took half a second of a rank's start, and memory of its own for each rank."""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
