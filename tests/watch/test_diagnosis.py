"""Who waits where for whom, from what was seen of the ranks."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

import shardwise
from shardwise.watch.diagnosis import Kind, Sighting, Verdict, ranks, verdict_on
from shardwise.watch.failures import RankError
from shardwise.watch.heartbeats import Beat, Phase
from shardwise.watch.stacks import NOWHERE, Frame, Stack, parse_stack

TORCH = "/venv/lib/python3.11/site-packages/torch"
OURS = str(Path(shardwise.__file__).parent)
NOW = 1000.0

USERS = Stack(
    (Frame("/home/me/project/tasks/chess.py", 120, "evaluate"), Frame(f"{OURS}/engine/evaluate.py", 40, "run"))
)
ALL_REDUCE = Stack(
    (
        Frame(f"{TORCH}/distributed/distributed_c10d.py", 3000, "all_reduce"),
        Frame(f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper"),
        Frame(f"{OURS}/parallel/world.py", 66, "sum"),
        Frame(f"{OURS}/engine/step.py", 88, "run_step"),
    )
)
BARRIER = Stack(
    (
        Frame(f"{TORCH}/distributed/distributed_c10d.py", 5000, "barrier"),
        Frame("/home/me/project/tasks/chess.py", 77, "loss"),
        Frame(f"{OURS}/engine/step.py", 120, "run_step"),
    )
)
BACKWARD = Stack(
    (
        Frame(f"{TORCH}/autograd/graph.py", 865, "_engine_run_backward"),
        Frame(f"{TORCH}/_tensor.py", 625, "backward"),
        Frame(f"{OURS}/engine/step.py", 121, "run_step"),
    )
)

LAYING_OUT = Stack(  # DDP, in the second step, agrees on the order of gradients
    (
        Frame(f"{TORCH}/nn/parallel/distributed.py", 1775, "_pre_forward"),
        Frame(f"{TORCH}/nn/parallel/distributed.py", 1886, "forward"),
        Frame(f"{TORCH}/nn/modules/module.py", 1789, "_call_impl"),
        *USERS.frames,
    )
)


def seen(rank: int, phase: Phase, step: int, stack: Stack = NOWHERE, *, world: int = 4, **more: Any) -> Sighting:
    beat = Beat(rank, world, 100 + rank, "node1", 7, phase, step, NOW - 62.0, 0.0)
    return Sighting(rank, beat, stack, **more)


def judged(*sightings: Sighting, world: int = 4) -> Verdict:
    return verdict_on(sightings, world, NOW)


def test_a_hang_in_the_users_code_names_rank_place_and_time_and_who_waits_where() -> None:
    waiting = [seen(rank, Phase.AGREE, 41, ALL_REDUCE) for rank in (0, 2, 3)]
    verdict = judged(*waiting, seen(1, Phase.EVALUATE, 40, USERS))
    assert verdict.sentence == (
        "rank 1 is in evaluation (tasks/chess.py:120) for 62 s; ranks 0, 2, 3 wait in all_reduce of step 41"
    )
    assert (verdict.kind, verdict.guilty) == (Kind.HANG, (1,))


def test_ddp_waits_for_gradients_within_backward_unless_it_uses_the_processor() -> None:
    stuck = seen(0, Phase.COMPUTE, 5, USERS, world=2)
    verdict = judged(stuck, seen(1, Phase.COMPUTE, 5, BACKWARD, world=2), world=2)
    assert verdict.sentence.endswith("rank 1 waits in the reduction of gradients of step 5")
    working = seen(1, Phase.COMPUTE, 5, BACKWARD, world=2, busy=True)
    waiting = seen(0, Phase.COMPUTE, 5, BACKWARD, world=2)
    assert judged(waiting, working, world=2).guilty == (1,)


def test_what_ddp_and_fully_shard_do_around_the_model_is_no_computation() -> None:
    waiting = seen(0, Phase.COMPUTE, 2, LAYING_OUT, world=2)
    verdict = judged(waiting, world=2)
    assert verdict.sentence.startswith(
        "rank 0 waits in an exchange of step 2 for rank 1, of which nothing is seen here"
    )
    assert (verdict.kind, verdict.guilty) == (Kind.LOST, (1,))
    assert judged(waiting, seen(1, Phase.COMPUTE, 2, USERS, world=2), world=2).guilty == (1,)
    gathering = Stack(
        (Frame(f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py", 430, "wait"), *USERS.frames)
    )
    assert judged(seen(0, Phase.COMPUTE, 2, gathering, world=2), world=2).kind is Kind.LOST
    reading = Stack((Frame(f"{TORCH}/distributed/checkpoint/filesystem.py", 700, "read_data"), *USERS.frames))
    assert judged(seen(0, Phase.COMPUTE, 2, reading, world=2), world=2).kind is Kind.HANG
    model = Stack((Frame(f"{TORCH}/nn/modules/linear.py", 134, "forward"), *LAYING_OUT.frames))
    assert judged(seen(0, Phase.COMPUTE, 2, model, world=2), world=2).kind is Kind.HANG


def test_a_process_that_was_stopped_is_told_from_a_hang() -> None:
    paused = seen(1, Phase.COMPUTE, 9, state="T", world=2)
    verdict = judged(seen(0, Phase.COMPUTE, 9, BACKWARD, world=2), paused, world=2)
    assert verdict.sentence.startswith("rank 1 was stopped by a signal (SIGSTOP or Ctrl-Z) in step 9 (computing)")
    assert (verdict.kind, verdict.guilty) == (Kind.PAUSED, (1,))


def test_a_rank_that_waits_for_a_disk_is_said_to() -> None:
    verdict = judged(seen(0, Phase.SAVE, 9, USERS, state="D", world=1), world=1)
    assert "rank 0 is in saving of step 9" in verdict.sentence and "in a disk wait of the kernel" in verdict.sentence


def test_ranks_in_different_collectives_took_different_branches() -> None:
    verdict = judged(
        *[seen(rank, Phase.AGREE, 42, ALL_REDUCE) for rank in (0, 2, 3)], seen(1, Phase.COMPUTE, 41, BARRIER)
    )
    assert verdict.kind is Kind.MISMATCH and verdict.guilty == (1,)
    assert "rank 1 waits in barrier of step 41 (tasks/chess.py:77)" in verdict.sentence
    assert "ranks 0, 2, 3 wait in all_reduce of step 42 (parallel/world.py:66)" in verdict.sentence
    assert "Rank 1 is not in all_reduce of step 42" in verdict.sentence


def test_of_two_that_differ_the_one_that_called_from_the_users_code_is_the_odd_one() -> None:
    verdict = judged(seen(0, Phase.COMPUTE, 6, BACKWARD, world=2), seen(1, Phase.COMPUTE, 6, BARRIER, world=2), world=2)
    assert verdict.guilty == (1,)
    other = judged(seen(0, Phase.COMPUTE, 6, BARRIER, world=2), seen(1, Phase.COMPUTE, 6, BACKWARD, world=2), world=2)
    assert other.guilty == (0,)


def test_when_all_of_this_machine_wait_another_machine_is_missed() -> None:
    verdict = judged(seen(0, Phase.AGREE, 41, ALL_REDUCE), seen(1, Phase.AGREE, 41, ALL_REDUCE))
    assert verdict.kind is Kind.LOST and verdict.guilty == (2, 3)
    assert verdict.sentence.startswith(
        "ranks 0, 1 wait in all_reduce of step 41 for ranks 2, 3, of which nothing is seen"
    )


def test_when_all_ranks_wait_at_one_place_nobody_is_blamed() -> None:
    verdict = judged(*[seen(rank, Phase.AGREE, 41, ALL_REDUCE) for rank in range(4)])
    assert (verdict.kind, verdict.guilty) == (Kind.LOST, ())
    assert "ranks 0 to 3 wait in all_reduce of step 41, and none of them is late" in verdict.sentence


def test_a_rank_that_left_alone_took_another_branch() -> None:
    verdict = judged(seen(0, Phase.AGREE, 9, ALL_REDUCE, world=2), seen(1, Phase.END, 8, world=2), world=2)
    assert verdict.kind is Kind.MISMATCH and verdict.guilty == (1,)
    assert verdict.sentence.startswith("rank 1 has come to the end; rank 0 waits in all_reduce of step 9")
    held_up = judged(seen(0, Phase.SAVE, 9, USERS, world=2), seen(1, Phase.END, 9, world=2), world=2)
    assert held_up.guilty == (0,)


def test_a_host_that_waits_for_its_gpu_waits_for_the_others() -> None:
    own = Stack((Frame(f"{OURS}/engine/step.py", 140, "run_step"),))
    verdict = judged(
        seen(0, Phase.UPDATE, 5, own, world=2, busy=True), seen(1, Phase.COMPUTE, 5, USERS, world=2), world=2
    )
    assert verdict.guilty == (1,)
    assert verdict.sentence.endswith("rank 0 waits in the work of its device of step 5")


def test_a_rank_that_has_not_begun_is_no_riddle() -> None:
    verdict = judged(Sighting(0, None, Stack()), Sighting(1, None, Stack()), world=2)
    assert verdict.guilty == (0, 1) and "rank 0 is in start-up" in verdict.sentence


def error(rank: int, message: str, *, when: float = 10.0, lost: bool = False, for_user: bool = False) -> RankError:
    trace = 'Traceback:\n  File "/home/me/project/tasks/chess.py", line 12, in loss\n  File "/x/torch/nn/f.py", line 3, in f\n'
    return RankError(rank, when, message, trace, for_user, lost)


PEER = "RuntimeError: Connection closed by peer"


def test_an_exception_is_the_cause_and_losing_a_peer_never_is() -> None:
    lost = seen(0, Phase.AGREE, 3, exit_code=1, error=error(0, PEER, when=9.0, lost=True), died_at=11.0)
    raised = seen(1, Phase.COMPUTE, 2, exit_code=1, error=error(1, "ValueError: the cause"), died_at=11.2)
    verdict = judged(lost, raised, world=2)
    assert verdict.sentence == "rank 1 failed in step 2 (computing): ValueError: the cause (tasks/chess.py:12)"
    assert (verdict.kind, verdict.guilty, verdict.step) == (Kind.ERROR, (1,), 2)


def test_a_kill_goes_before_whatever_the_others_say_after_it() -> None:
    killed = seen(1, Phase.COMPUTE, 8, exit_code=-signal.SIGKILL, died_at=10.1)
    puzzled = seen(0, Phase.COMPUTE, 8, exit_code=1, error=error(0, "RuntimeError: odd words", when=10.0), died_at=10.2)
    verdict = judged(puzzled, killed, world=2)
    assert verdict.guilty == (1,) and verdict.kind is Kind.KILLED
    assert "the kernel says nothing of memory, so somebody did it" in verdict.sentence
    early = seen(0, Phase.COMPUTE, 8, exit_code=1, error=error(0, "ValueError: mine", when=2.0), died_at=10.2)
    assert judged(early, killed, world=2).guilty == (0,)


def test_a_kill_for_want_of_memory_carries_the_kernels_word() -> None:
    verdict = judged(seen(1, Phase.COMPUTE, 8, exit_code=-9, memory="memory.events counts 1 more"), world=2)
    assert verdict.kind is Kind.MEMORY
    assert "was killed by the kernel in step 8 (computing), because memory ran out (memory.events" in verdict.sentence


def test_a_crash_names_its_signal_and_place() -> None:
    verdict = judged(seen(1, Phase.COMPUTE, 8, USERS, exit_code=-signal.SIGSEGV), world=2)
    assert verdict.kind is Kind.CRASH
    assert verdict.sentence == "rank 1 crashed with SIGSEGV in step 8 (computing) at tasks/chess.py:120"
    ended = judged(seen(1, Phase.PREPARE, 0, exit_code=-signal.SIGTERM), world=2)
    assert ended.sentence == "rank 1 was ended by SIGTERM while preparing model and data"
    silent = judged(seen(0, Phase.START, 0, exit_code=3), world=2)
    assert silent.sentence == "rank 0 ended without a word in start-up, exit code 3"


def test_ranks_that_only_lost_others_say_whom() -> None:
    lost = [seen(rank, Phase.AGREE, 3, exit_code=1, error=error(rank, PEER, lost=True)) for rank in (0, 1)]
    verdict = judged(*lost)
    assert verdict.sentence == "ranks 0, 1 lost the connection to ranks 2, 3, whose machine or link is gone"
    assert verdict.guilty == (2, 3)
    assert judged(*lost, world=2).guilty == ()


def test_the_main_thread_of_the_last_dump_is_read() -> None:
    text = """Thread 0x1 (most recent call first):
  File "/x/torch/other.py", line 1 in loop

Current thread 0x2 (most recent call first):
  File "/old/place.py", line 5 in f
Thread 0x1 (most recent call first):
  File "/x/torch/other.py", line 1 in loop

Current thread 0x2 (most recent call first):
  File "/home/me/project/tasks/chess.py", line 120 in evaluate
  File "/home/me/train.py", line 9 in <module>
"""
    stack = parse_stack(text)
    assert stack.place is not None and stack.place.place == "tasks/chess.py:120"
    assert len(stack.frames) == 2 and parse_stack("nothing").place is None


def test_a_collective_is_named_as_it_was_called() -> None:
    inner = Frame(f"{TORCH}/distributed/distributed_c10d.py", 1, "all_gather")
    outer = Frame(f"{TORCH}/distributed/distributed_c10d.py", 2, "all_gather_object")
    assert Stack((inner, outer, *USERS.frames)).collective == "all_gather_object"
    assert USERS.collective is None and not USERS.in_backward
    assert Stack((Frame(f"{TORCH}/distributed/rendezvous.py", 1, "f"),)).collective == "the rendezvous"


@pytest.mark.parametrize(
    ("numbers", "words"),
    [([1], "rank 1"), ([3, 0, 2], "ranks 0, 2, 3"), (range(8), "ranks 0 to 7"), ([0, 1, 2, 3, 9], "ranks 0 to 3, 9")],
)
def test_ranks_are_listed_briefly(numbers: list[int], words: str) -> None:
    assert ranks(numbers) == words


def test_gloo_breaks_off_where_ranks_make_different_collectives() -> None:
    aborted = seen(0, Phase.AGREE, 28, ALL_REDUCE, exit_code=-signal.SIGABRT)
    verdict = judged(aborted, seen(1, Phase.COMPUTE, 28), world=2)
    assert verdict.sentence == (
        "rank 0 broke off (SIGABRT) in step 28 (agreeing on the step), while rank 1 was in step 28 (computing): the ranks do "
        "not make the same collectives in the same order"
    )
    assert (verdict.kind, verdict.guilty) == (Kind.MISMATCH, (0, 1))
    assert judged(aborted, seen(1, Phase.AGREE, 28), world=2).kind is Kind.CRASH
