"""What filled the memory, and what to do about it."""

from __future__ import annotations

import re

import pytest
import torch

from shardwise.config import Batching, Training
from shardwise.engine.host_memory import host_memory
from shardwise.engine.out_of_memory import Held, Situation, _size_in, explain, ran_out, remedies
from shardwise.errors import OutOfMemory
from shardwise.parallel import strategy_class
from shardwise.parallel.memory import ModelSizes

GIB = 2**30
LLAMA_1B = ModelSizes(parameters=10**9, trained=10**9, largest_block=5 * 10**7)
FULL = Held(
    weights=4e9, gradients=4e9, optimizer=8e9, activations=40 * GIB, fragments=1 * GIB, asked=4 * GIB, free=1 * GIB,
    capacity=80 * GIB,
)  # fmt: skip
MESSAGE = (
    "CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total capacity of 139.80 GiB of which 12.00 MiB is free. "
    "Process 77 has 139.7 GiB memory in use. Of the allocated memory 120.25 GiB is allocated by PyTorch, and 5.50 GiB is "
    "reserved by PyTorch but unallocated."
)


def situation(
    strategy: str = "ddp", ranks: int = 8, batch: int = 8, accumulation: int = 1, **options: object
) -> Situation:
    training = Training(strategy=strategy, **options)  # type: ignore[arg-type]
    return Situation(
        strategy_class(strategy)(training), ranks, Batching(ranks, batch, accumulation), LLAMA_1B, blocks=16
    )


def test_the_message_says_what_filled_the_memory_where_and_what_was_asked() -> None:
    said = explain(FULL, situation(), "step 41, rank 3")
    assert "step 41, rank 3: out of memory: 4 GiB were asked for and 1 GiB were free, of 80 GiB." in said
    assert (
        "weights 3.73 GiB, gradients 3.73 GiB, optimizer state 7.45 GiB, activations and other 40 GiB, fragments 1 GiB"
        in said
    )
    assert "at least 3 GiB are missing" in said


def test_the_remedies_come_in_the_documented_order_and_each_says_whether_it_is_enough() -> None:
    found = remedies(FULL, situation())
    words = ["batch_size: 4", "activation_checkpointing", "bf16-mixed", "zero1 over 8", "fsdp over 8", "cpu_offload"]
    assert len(found) == len(words)
    for remedy, word in zip(found, words, strict=True):
        assert word in remedy.what
    assert found[0].saves == (FULL.activations + FULL.asked) / 2
    assert found[3].saves == pytest.approx(8e9 * 7 / 8), "the optimizer state, but for an eighth"
    said = explain(FULL, situation(), "step 1")
    assert re.search(r"batch_size: 4 .*saves about 22 GiB, enough by itself", said)
    tight = Held(weights=4e9, gradients=4e9, optimizer=8e9, activations=1e9, asked=20e9, free=1e9)
    assert "enough with those above" in explain(tight, situation(), "step 1")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (
            situation(batch=8, accumulation=1),
            "batch_size: 4 (training.gradient_accumulation: 2 keeps the numbers the same)",
        ),
        (situation(batch=5, accumulation=3), "batch_size: 1 (training.gradient_accumulation: 15 keeps"),
        (situation(batch=6, accumulation=1), "batch_size: 3 (training.gradient_accumulation: 2"),
        (situation(batch=8, total_batch_size=64), "batch_size: 4 (training.total_batch_size stays 64)"),
    ],
)
def test_a_smaller_batch_keeps_the_global_batch(given: Situation, kept: str) -> None:
    assert kept in remedies(FULL, given)[0].what


def test_what_is_done_already_or_cannot_be_is_not_advised() -> None:
    done = situation(
        "fsdp", batch=1, precision="bf16-mixed", fsdp={"activation_checkpointing": True, "cpu_offload": True}
    )
    assert remedies(FULL, done) == []
    assert "what to do" not in explain(FULL, done, "step 1")
    alone = [remedy.what for remedy in remedies(FULL, situation("single", ranks=1))]
    assert not any("zero1" in what for what in alone)
    assert any("fsdp over 2 devices" in what for what in alone)


def test_fragments_are_named_as_a_remedy_only_where_there_are_many() -> None:
    many = Held(activations=10 * GIB, fragments=5 * GIB, asked=4 * GIB)
    assert remedies(many, situation())[-1].what.startswith("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    few = Held(activations=10 * GIB, fragments=0.5 * GIB, asked=4 * GIB)
    assert not any("expandable" in remedy.what for remedy in remedies(few, situation()))


def test_pytorchs_message_is_read() -> None:
    assert _size_in(MESSAGE, r"[Tt]ried to allocate ([\d.]+) (\w+)") == 20.5 * GIB
    assert _size_in(MESSAGE, r"of which ([\d.]+) (\w+) is free") == 12 * 2**20
    assert _size_in(MESSAGE, r"([\d.]+) (\w+) is allocated by PyTorch") == 120.25 * GIB
    assert _size_in("something else", r"([\d.]+) (\w+) is allocated by PyTorch") is None


def test_errors_of_memory_are_told_from_others() -> None:
    assert ran_out(torch.OutOfMemoryError(MESSAGE)) and ran_out(MemoryError())
    assert ran_out(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    with pytest.raises(RuntimeError) as failure:
        torch.empty(2**60, dtype=torch.uint8)
    assert ran_out(failure.value)
    assert not ran_out(RuntimeError("shapes do not match")) and not ran_out(OutOfMemory("said already: out of memory"))


def test_the_hosts_memory_is_known() -> None:
    available, total = host_memory()
    assert 0 < available <= total
