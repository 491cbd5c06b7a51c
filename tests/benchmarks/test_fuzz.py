"""A thousand wrong manifests, indexes, headers, configs and folders of runs: each is answered by one error or a right result."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reliability import fuzz_cases
from benchmarks.reliability.fuzz_cases import KINDS, TENSORS, answer, sealed, write_originals
from benchmarks.reliability.fuzz_runner import MEMORY, SECONDS, WarmProcess, cases
from shardwise.checkpoint import state as state_room
from shardwise.data.manifest import Condition
from shardwise.errors import ShardwiseError

NUMBER = 1002
"""Of each kind as many."""


def test_a_thousand_mutations_are_answered_as_they_should_be(tmp_path: Path) -> None:
    # By processor time: tests run side by side, and wait for each other.
    results = list(WarmProcess(tmp_path, patience=60.0).results(cases(KINDS, 1_000_000, NUMBER)))
    assert [f"{each.kind} {each.seed}: {each.what}" for each in results if each.what not in ("refused", "right")] == []
    assert max(each.processor for each in results) <= SECONDS
    assert max(each.memory for each in results) <= MEMORY
    counts = Counter((each.kind, each.what) for each in results)
    assert len(results) == NUMBER and all(counts[kind, what] > 5 for kind in KINDS for what in ("refused", "right"))


# ---------------------------------------------------------------- the fuzzer itself would find what is wrong


@pytest.fixture
def originals(tmp_path: Path) -> Path:
    (tmp_path / "originals").mkdir()
    write_originals(tmp_path / "originals")
    return tmp_path / "originals"


def asked(originals: Path, monkeypatch: pytest.MonkeyPatch, kind: str, change: Callable[[Path], Any]) -> str:
    """What is answered where `change` is what is made wrong."""
    sources = {"manifest": "checkpoints", "config": "config", "run": "run"}

    def make(folder: Path, scratch: Path, rng: Any) -> str:
        if kind == "config":
            (scratch / "fuzzed.yaml").write_text((folder / "config" / "fuzzed.yaml").read_text())
        else:
            shutil.copytree(folder / sources[kind], scratch / sources[kind])
        change(scratch)
        return "this"

    monkeypatch.setitem(KINDS, kind, (make, KINDS[kind][1]))
    return answer(kind, 0, originals, originals.parent / "scratch").what


@pytest.mark.parametrize("kind", ["manifest", "config", "run"])
def test_what_is_not_changed_is_right(originals: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    assert asked(originals, monkeypatch, kind, lambda scratch: None) == "right"


def test_an_exception_is_wrong(originals: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(originals, monkeypatch, "run", lambda scratch: 1 / 0) == "ZeroDivisionError: division by zero"


def test_a_checkpoint_that_is_loaded_without_a_look_is_wrong(originals: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flipped(scratch: Path) -> None:
        file = next(scratch.glob("checkpoints/step-*")) / TENSORS[0]
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)

    assert asked(originals, monkeypatch, "manifest", flipped) == "refused"
    monkeypatch.setattr(state_room, "condition_of_checkpoint", lambda folder, part: Condition([], []))
    assert asked(originals, monkeypatch, "manifest", flipped) == "loaded, though verify says that it is damaged"


def test_other_values_than_those_of_the_files_are_wrong(originals: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fuzz_cases._plainly_read
    monkeypatch.setattr(fuzz_cases, "_plainly_read", lambda path: {key: each + 1 for key, each in real(path).items()})
    assert asked(originals, monkeypatch, "manifest", lambda scratch: None).startswith(
        "other values than the files have: "
    )


def test_an_error_that_cannot_be_printed_is_wrong(originals: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(scratch: Path) -> None:
        raise ShardwiseError("\ud800")

    assert asked(originals, monkeypatch, "run", refuse).startswith("an error that cannot be printed")


def test_a_mutation_that_hangs_is_ended_and_the_next_one_answered(
    tmp_path: Path, originals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is asked for a kind that waits, as one that opens a pipe would."""
    waiting = (
        "import sys, pathlib, time; from benchmarks.reliability import fuzz_cases, fuzz_runner; "
        "fuzz_cases.KINDS = {'run': fuzz_cases.KINDS['run'], "
        "'hang': (lambda *_: 'this', lambda _: time.sleep(99) if pathlib.Path(sys.argv[1], 'ready').exists() else 'right'), "
        "'grow': (lambda *_: 'this', lambda _: [bytearray(2**28) for _ in range(4)] and 'right')}; "
        "fuzz_runner.serve(pathlib.Path(sys.argv[1]))"
    )
    monkeypatch.setattr("benchmarks.reliability.fuzz_runner._SERVE", waiting)
    process = WarmProcess(tmp_path, patience=2.0)
    results = process.results([("run", 1), ("grow", 1), ("hang", 1), ("run", 1)])
    first, grown = next(results), next(results)
    (tmp_path / "ready").touch()
    hung = next(results)
    (tmp_path / "ready").unlink()
    assert (hung.what, hung.is_right) == ("no answer in 2 s", False)
    assert grown.what.startswith("MemoryError")
    assert next(results).what == first.what
    results.close()  # type: ignore[attr-defined]


def test_a_manifest_that_is_sealed_anew_passes_its_checksum(originals: Path) -> None:
    file = next(originals.glob("checkpoints/step-*")) / "manifest.json"
    content = json.loads(file.read_text())
    del content["sha256"]
    assert sealed(json.dumps(content, indent=1).encode()) == file.read_bytes()
