"""What a cluster tells a process that it has started as a rank, in the variables that PyTorch reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from shardwise.config.registry import BUILT_IN, found, load, lookup
from shardwise.errors import ConfigError


class Cluster:
    name: ClassVar[str]

    def started(self, environ: Mapping[str, str]) -> bool:
        """Whether this process is a rank that it has started."""
        raise NotImplementedError

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. An address or a port that is set already stays."""
        raise NotImplementedError


def clusters() -> Iterator[Cluster]:
    """Those that come with shardwise first; then those of installed packages (entry point `shardwise.launchers`)."""
    for name in [*BUILT_IN["shardwise.launchers"], *found("shardwise.launchers")]:
        entry = lookup("shardwise.launchers", name)
        kind = load(entry) if entry is not None else None
        if not (isinstance(kind, type) and issubclass(kind, Cluster)):
            raise ConfigError(f"launcher {name} is not a subclass of shardwise.launch.cluster.Cluster")
        yield kind()
