"""Reading a cluster's environment: what torchrun and srun tell a process about its place."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping

from shardwise.errors import LaunchError

ATTEMPT = "SHARDWISE_ATTEMPT"
"""How many times the launcher has started the ranks of this job before, also because machines came or went."""


def adopt_environment(environ: MutableMapping[str, str] | None = None) -> bool:
    """Whether this process is already a rank. Slurm's variables are translated into torchrun's, which PyTorch reads."""
    environ = os.environ if environ is None else environ
    if "RANK" in environ and "WORLD_SIZE" in environ:
        environ.setdefault("LOCAL_RANK", "0" if environ["WORLD_SIZE"] == "1" else environ["RANK"])
        return True
    if not _inside_srun(environ):
        return False
    try:
        environ["RANK"] = environ["SLURM_PROCID"]
        environ["WORLD_SIZE"] = environ["SLURM_STEP_NUM_TASKS"]
        environ["LOCAL_RANK"] = environ["SLURM_LOCALID"]
        hosts = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
    except KeyError as missing:
        raise LaunchError(f"this looks like a Slurm step, but {missing} is not set; start it with srun") from None
    if "," not in environ.get("CUDA_VISIBLE_DEVICES", ","):
        environ["LOCAL_RANK"] = "0"  # --gpus-per-task=1: each task sees one GPU, its own, as the first
    environ.setdefault("MASTER_ADDR", first_host(hosts))
    # Any port outside the ephemeral range, the same on every rank, different for jobs, and steps of a job, that share a
    # machine. 101 leaves room for the steps between one job and the next, and has no factor in common with 15000.
    step = int(environ.get("SLURM_JOB_ID", "0")) * 101 + int(environ["SLURM_STEP_ID"])
    environ.setdefault("MASTER_PORT", str(15000 + step % 15000))
    return True


def attempt(environ: Mapping[str, str] | None = None) -> int:
    """How many times the ranks of this job were started before, by our launcher or by torchrun."""
    environ = os.environ if environ is None else environ
    return int(environ.get(ATTEMPT) or environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def first_host(nodelist: str) -> str:
    """The first machine of a Slurm list: node[01-04,07] → node01."""
    head = re.split(r",(?![^\[]*\])", nodelist.strip())[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", head)


def _inside_srun(environ: Mapping[str, str]) -> bool:
    """A batch script has most of Slurm's variables too; only the tasks that srun starts have a step of several."""
    return (
        "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ and int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    )
