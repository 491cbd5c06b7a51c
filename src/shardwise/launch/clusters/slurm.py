"""Slurm: the tasks of an srun step."""

from __future__ import annotations

import re
from collections.abc import Mapping

from shardwise.errors import LaunchError
from shardwise.launch.cluster import Cluster


class Slurm(Cluster):
    name = "slurm"

    def started(self, environ: Mapping[str, str]) -> bool:
        """A batch script has most of Slurm's variables too; only the tasks that srun starts have a step of several."""
        several = int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1
        return "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ and several

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        try:
            place = {
                "RANK": environ["SLURM_PROCID"],
                "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
                "LOCAL_RANK": environ["SLURM_LOCALID"],
            }
            hosts = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
        except KeyError as missing:
            raise LaunchError(f"this looks like a Slurm step, but {missing} is not set; start it with srun") from None
        if "," not in environ.get("CUDA_VISIBLE_DEVICES", ","):
            place["LOCAL_RANK"] = "0"  # --gpus-per-task=1: each task sees one GPU, its own, as the first
        # Any port outside the ephemeral range, the same on every rank, different for jobs, and steps of a job, that share a
        # machine. 101 leaves room for the steps between one job and the next, and has no factor in common with 15000.
        step = int(environ.get("SLURM_JOB_ID", "0")) * 101 + int(environ["SLURM_STEP_ID"])
        return {**place, "MASTER_ADDR": first_host(hosts), "MASTER_PORT": str(15000 + step % 15000)}


def first_host(nodelist: str) -> str:
    """The first machine of a Slurm list: node[01-04,07] → node01."""
    head = re.split(r",(?![^\[]*\])", nodelist.strip())[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", head)
