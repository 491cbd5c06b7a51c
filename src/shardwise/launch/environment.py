"""Reading a cluster's environment: what torchrun, srun and others tell a process about its place."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from shardwise.launch.cluster import clusters

ATTEMPT = "SHARDWISE_ATTEMPT"
"""How many times the launcher has started the ranks of this job before, also because machines came or went."""


def adopt_environment(environ: MutableMapping[str, str] | None = None) -> bool:
    """Whether this process is already a rank. A cluster's variables are translated into torchrun's, which PyTorch reads; where
    those are there already, somebody has done so."""
    environ = os.environ if environ is None else environ
    if "RANK" in environ and "WORLD_SIZE" in environ:
        environ.setdefault("LOCAL_RANK", "0" if environ["WORLD_SIZE"] == "1" else environ["RANK"])
        return True
    cluster = next((each for each in clusters() if each.started(environ)), None)
    if cluster is None:
        return False
    place = cluster.variables(environ)
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    environ.update({name: value for name, value in place.items() if name in ours or name not in environ})
    return True


def attempt(environ: Mapping[str, str] | None = None) -> int:
    """How many times the ranks of this job were started before, by our launcher or by torchrun."""
    environ = os.environ if environ is None else environ
    return int(environ.get(ATTEMPT) or environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
