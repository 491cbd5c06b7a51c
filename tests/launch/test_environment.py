"""What torchrun and srun say about a process's place, read from their variables."""

from __future__ import annotations

import os

import pytest

from shardwise.errors import LaunchError
from shardwise.launch.clusters.slurm import first_host
from shardwise.launch.environment import adopt_environment
from tests.conftest import REPOSITORY

PLUGIN = REPOSITORY / "tests" / "fixtures" / "plugin"
# What srun gives the sixth of eight tasks on two machines.
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
# What a batch script has before it calls srun: nearly all of that, and it is no rank.
BATCH = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_NTASKS": "8",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


def test_a_process_that_nobody_placed_is_no_rank() -> None:
    environ: dict[str, str] = {}
    assert not adopt_environment(environ)
    assert environ == {}


def test_torchruns_variables_are_taken_as_they_are() -> None:
    given = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu07", "MASTER_PORT": "29500"}
    environ = dict(given)
    assert adopt_environment(environ)
    assert environ == given


def test_torchruns_variables_go_before_slurms() -> None:
    """torchrun inside srun: one srun task per machine, and torchrun's ranks below it."""
    given = {**SRUN, "RANK": "13", "WORLD_SIZE": "16", "LOCAL_RANK": "5", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    environ = dict(given)
    assert adopt_environment(environ)
    assert environ == given


@pytest.mark.parametrize(("rank", "world", "local"), [("0", "1", "0"), ("3", "4", "3")])
def test_a_rank_without_a_local_one_is_on_one_machine(rank: str, world: str, local: str) -> None:
    environ = {"RANK": rank, "WORLD_SIZE": world}
    assert adopt_environment(environ)
    assert environ["LOCAL_RANK"] == local


@pytest.mark.parametrize("only", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_half_of_torchruns_variables_make_no_rank(only: str) -> None:
    assert not adopt_environment({only: "0"})


def test_sruns_variables_are_translated_into_torchruns() -> None:
    environ = dict(SRUN)
    assert adopt_environment(environ)
    added = {name: value for name, value in environ.items() if name not in SRUN}
    port = added.pop("MASTER_PORT")
    assert added == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu07"}
    assert 15000 <= int(port) < 30000, "below the ephemeral range, above what services use"
    assert {name: environ[name] for name in SRUN} == SRUN


def port_of(**changed: str) -> str:
    environ = {**SRUN, **changed}
    assert adopt_environment(environ)
    return environ["MASTER_PORT"]


def test_all_ranks_of_a_step_agree_on_a_port_and_other_jobs_and_steps_have_another() -> None:
    assert port_of() == port_of(SLURM_PROCID="0", SLURM_LOCALID="0")
    jobs_and_steps = [(str(job), str(step)) for job in range(4700, 4720) for step in range(5)]
    ports = {port_of(SLURM_JOB_ID=job, SLURM_STEP_ID=step) for job, step in jobs_and_steps}
    assert len(ports) == len(jobs_and_steps)


def test_an_address_that_the_user_gave_is_kept() -> None:
    environ = {**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    assert adopt_environment(environ)
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("10.0.0.1", "1234")


def test_the_machines_of_the_step_count_and_not_those_of_the_job() -> None:
    environ = {**SRUN, "SLURM_JOB_NODELIST": "gpu[01-08]"}
    assert adopt_environment(environ)
    assert environ["MASTER_ADDR"] == "gpu07"
    del environ["SLURM_STEP_NODELIST"], environ["RANK"], environ["MASTER_ADDR"]
    assert adopt_environment(environ)
    assert environ["MASTER_ADDR"] == "gpu01"


@pytest.mark.parametrize(
    "environ",
    [
        BATCH,
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        # an interactive allocation: a step of one task, under a number that no srun of the user has
        {**BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
        {name: value for name, value in SRUN.items() if name != "SLURM_STEP_NUM_TASKS"},
    ],
    ids=["batch script", "srun of one task", "interactive", "no number of tasks"],
)
def test_slurms_variables_outside_of_srun_make_no_rank(environ: dict[str, str]) -> None:
    changed = dict(environ)
    assert not adopt_environment(changed)
    assert changed == environ


@pytest.mark.parametrize("missing", ["SLURM_LOCALID", "SLURM_JOB_NODELIST"])
def test_a_variable_that_is_missing_is_named(missing: str) -> None:
    environ = {name: value for name, value in SRUN.items() if name not in (missing, "SLURM_STEP_NODELIST")}
    with pytest.raises(LaunchError) as caught:
        adopt_environment(environ)
    assert str(caught.value) == f"this looks like a Slurm step, but '{missing}' is not set; start it with srun"


def test_without_an_argument_it_is_the_environment_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not adopt_environment()
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "")  # so that what is added is taken away again
    monkeypatch.delenv("LOCAL_RANK")
    assert adopt_environment()
    assert os.environ["LOCAL_RANK"] == "2"


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[1-4]", "node1"),
        ("node[01-04,07]", "node01"),
        ("node[001,003-005]", "node001"),
        ("node[12]", "node12"),
        ("node[3,1]", "node3"),
        ("login,node[1-4]", "login"),
        ("node[1-4],login", "node1"),
        ("a[1-2],b[3-4]", "a1"),
        ("node[1-2]-ib", "node1-ib"),
        ("rack[1-2]-node[01-04]", "rack1-node01"),
        ("rack[1,2]node[3,4],other", "rack1node3"),
        ("gpu-a100-[08-09]", "gpu-a100-08"),
        ("node-7.cluster.example.org", "node-7.cluster.example.org"),
        ("node[1-2].cluster,other", "node1.cluster"),
        ("  node[1-2]\n", "node1"),
    ],
)
def test_the_first_machine_of_a_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_a_cluster_of_another_package_places_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PLUGIN)
    environ = {"ABACUS": "3/8@node1", "MASTER_PORT": "31000"}
    assert adopt_environment(environ)
    place = {name: environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    assert list(place.values()) == ["3", "8", "0", "node1", "31000"], "the port that was set already stays"
    assert not adopt_environment({}), "it is asked, and has not started this one"
