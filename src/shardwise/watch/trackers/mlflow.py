"""MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.config import Config
from shardwise.config.by_key import by_dotted_key
from shardwise.errors import MissingExtra

try:
    import mlflow
    from mlflow.entities import Metric, Param
except ImportError:
    raise MissingExtra("training.logger: mlflow needs the package 'mlflow': pip install mlflow") from None

AT_ONCE = 100
"""Parameters in one request, at most; MLflow takes no more."""
LONGEST = 500
"""Characters of a parameter's value that every version of MLflow takes."""


class MLflow:
    """A database in the run folder, unless the environment names a server (MLFLOW_TRACKING_URI): nothing leaves the machine by
    default. The experiment is that of MLFLOW_EXPERIMENT_NAME; a run that is resumed is a new one in it."""

    def __init__(self, config: Config, folder: Path) -> None:
        where = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder / 'mlflow.db').resolve()}"
        self.client: Any = mlflow.MlflowClient(tracking_uri=where)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "shardwise"
        known = self.client.get_experiment_by_name(name)
        experiment = self.client.create_experiment(name) if known is None else known.experiment_id
        self.run: str = self.client.create_run(experiment, run_name=config.name).info.run_id
        values = by_dotted_key(config.model_dump(mode="json"))
        given = [Param(key, str(value)[:LONGEST]) for key, value in values.items() if value is not None]
        for first in range(0, len(given), AT_ONCE):
            self.client.log_batch(self.run, params=given[first : first + AT_ONCE])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self.client.log_batch(self.run, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def close(self) -> None:
        self.client.set_terminated(self.run)
