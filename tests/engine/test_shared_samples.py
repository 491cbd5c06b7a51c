"""No task trains on what it validates on without a word."""

from __future__ import annotations

import gzip
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from shardwise import Contents, SampleContents, Session
from shardwise.errors import DataError
from shardwise.tasks import Loss, Task
from shardwise.tasks.chess.movetext import read_game
from tests.cells_task.files import random_counts, write_cells
from tests.distributed import work
from tests.distributed.pool import RankFailure, RankPool
from tests.images_task.made import write_images
from tests.segmentation_task.files import write_folder, write_subject
from tests.tasks import Ragged, config_of

Prepare = Callable[..., None]
OPENINGS = [f"e2e4 e7e5 g1f3 b8c6 {a}2{a}3 {b}7{b}6" for a in "abdgh" for b in "abdgh"]


@pytest.fixture
def prepare(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Prepare:
    caplog.set_level(logging.INFO, "shardwise")

    def prepared(text: str, *overrides: str) -> None:
        config = config_of(text, [f"run_dir={tmp_path / 'run'}", "training.strategy=single", *overrides])
        with Session(config) as session:
            session.prepare()

    return prepared


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    words = "in the training data, too", "copies", "a copy of", "same content", "one file"
    return lambda: [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if any(word in record.getMessage() for word in words)
    ]


# ---------------------------------------------------------------- images

IMAGES = """
task: images
data: {source: folder, image_size: 16}
model: {architecture: resnet, depths: [1], widths: [8], extra: {embedding_size: 8}}
training: {batch_size: 4}
"""


@pytest.mark.parametrize("copied", [shutil.copy, lambda source, to: to.symlink_to(source)])
def test_an_image_in_both_folders_is_an_error_unless_it_is_allowed(
    tmp_path: Path, prepare: Prepare, said: Any, copied: Any
) -> None:
    root = tmp_path / "root"
    write_images(root / "train", {"cat": 5, "dog": 5})
    write_images(root / "valid", {"cat": 3, "dog": 3})
    prepare(IMAGES, f"data.root={root}")
    assert said() == []
    copied(root / "train" / "dog" / "3.png", root / "valid" / "dog" / "other.png")
    with pytest.raises(DataError) as caught:
        prepare(IMAGES, f"data.root={root}")
    assert str(caught.value) == (
        f"1 of 7 validation images (14%) is in the training data, too: {root}/valid/dog/other.png is the same as "
        f"{root}/train/dog/3.png. What is trained on cannot be used to validate: take them out of one of the two; or, if it is "
        "meant so, set data.allow_shared_samples: true"
    )
    prepare(IMAGES, f"data.root={root}", "data.allow_shared_samples=true")
    assert [level for level, _ in said()] == ["WARNING"]


def test_copies_of_images_in_one_pool_are_told_where_the_seed_parts_them(
    tmp_path: Path, prepare: Prepare, said: Any
) -> None:
    root = write_images(tmp_path / "root" / "train", {"cat": 10, "dog": 10}).parent
    for index in range(10):
        shutil.copy(root / "train" / "cat" / f"{index}.png", root / "train" / "cat" / f"copy-{index}.png")
    prepare(IMAGES, f"data.root={root}", "data.valid_fraction=0.3")
    ((level, line),) = said()
    assert (
        level == "WARNING"
        and "validation images" in line
        and "The seed held them out of data with copies in it: remove the copies" in line
    )
    assert "training images" in line and "copies of others" in line


def test_single_images_in_both_splits_of_a_data_set_are_a_warning_and_most_of_them_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Prepare, said: Any
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub-cache")
    root = tmp_path / "set"
    write_images(root / "train", {"cat": 5, "dog": 5})
    write_images(root / "test", {"cat": 3, "dog": 3})
    shutil.copy(root / "train" / "cat" / "0.png", root / "test" / "cat" / "9.png")
    source = "data.source=hub", f"data.dataset={root}"
    prepare(IMAGES, *source, "data.valid_split=test")
    ((level, line),) = said()
    assert level == "WARNING" and line.startswith("1 of 7 validation images (14%) is in the training data, too")
    assert f"{root} (test), row 3 is the same as {root} (train), row 0" in line
    with pytest.raises(DataError, match=r"^10 of 10 validation images \(100%\) are in the training data"):
        prepare(IMAGES, *source, "data.valid_split=train")


# ---------------------------------------------------------------- chess

CHESS = """
task: chess
data: {source: local}
model: {hidden_dim: 16, num_layers: 1, num_heads: 2}
training: {batch_size: 4}
"""


def games(file: Path, texts: list[str]) -> Path:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def test_single_games_in_both_files_are_a_warning_and_most_of_them_an_error(
    tmp_path: Path, prepare: Prepare, said: Any
) -> None:
    train = games(tmp_path / "train.jsonl", OPENINGS[:15])
    valid = games(tmp_path / "valid.jsonl", OPENINGS[13:20])
    files = f"data.paths=[{train}]", f"data.valid_paths=[{valid}]"
    prepare(CHESS, *files)
    ((level, line),) = said()
    assert level == "WARNING" and line.startswith("2 of 7 validation games (29%) are in the training data, too")
    assert f"validation game 0 ({OPENINGS[13]}) is the same as training game 13" in line
    games(valid, OPENINGS[9:17])
    with pytest.raises(DataError, match=r"^6 of 8 validation games \(75%\) are in the training data"):
        prepare(CHESS, *files)


@pytest.mark.parametrize("place", ["paths", "valid_paths"])
def test_a_file_of_games_under_two_names_is_an_error(tmp_path: Path, prepare: Prepare, place: str) -> None:
    train = games(tmp_path / "train.jsonl", OPENINGS[:15])
    other = games(tmp_path / "other.jsonl", OPENINGS[15:])
    again = Path(shutil.copy(train, tmp_path / "again.jsonl"))
    listed = {"paths": [train], "valid_paths": [other]}
    listed[place] = [*listed[place], again]
    overrides = [f"data.{key}=[{', '.join(map(str, files))}]" for key, files in listed.items()]
    with pytest.raises(DataError, match=rf"^data: {train} and {again} have the same content, so its samples would be"):
        prepare(CHESS, *overrides)


@pytest.mark.parametrize("place", ["paths", "valid_paths"])
@pytest.mark.parametrize("kind", ["compressed", "in another notation"])
def test_a_file_of_games_beside_itself_in_another_form_is_an_error(
    tmp_path: Path, prepare: Prepare, place: str, kind: str
) -> None:
    train = games(tmp_path / "train.jsonl", OPENINGS[:15])
    other = games(
        tmp_path / "other.jsonl", OPENINGS[:15][::-1]
    )  # the same games in another order are not the same file
    if kind == "compressed":
        again = tmp_path / "train.jsonl.gz"
        again.write_bytes(gzip.compress(train.read_bytes() + b"\n"))
    else:
        again = tmp_path / "train.pgn"
        again.write_text("".join(f"{read_game(game).movetext} 1-0\n\n" for game in OPENINGS[:15]))
    listed = {"paths": [train], "valid_paths": [games(tmp_path / "valid.jsonl", OPENINGS[15:])]}
    listed["paths"].append(other)
    overrides = [f"data.{key}=[{', '.join(map(str, files))}]" for key, files in listed.items()]
    prepare(CHESS, *overrides)
    listed[place].append(again)
    overrides = [f"data.{key}=[{', '.join(map(str, files))}]" for key, files in listed.items()]
    with pytest.raises(DataError, match=rf"^data: {train} and {again} have the same content, so its samples would be"):
        prepare(CHESS, *overrides)
    prepare(CHESS, *overrides, "data.allow_shared_samples=true")


def test_copies_of_a_game_in_one_file_stay_on_one_side(tmp_path: Path, prepare: Prepare, said: Any) -> None:
    file = games(tmp_path / "games.jsonl", OPENINGS * 3)
    prepare(CHESS, f"data.paths=[{file}]", "data.valid_fraction=0.2")
    ((level, line),) = said()
    assert level == "INFO" and "training games" in line and "copies of others" in line


def test_games_of_a_hugging_face_data_set_are_compared_and_not_read_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Prepare, said: Any
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub-cache")
    (tmp_path / "set").mkdir()
    for split, texts in (("train", OPENINGS[:15]), ("test", OPENINGS[14:20])):
        datasets.Dataset.from_dict({"text": texts}).to_parquet(tmp_path / "set" / f"{split}.parquet")
    prepare(CHESS, "data.source=hub", f"data.dataset={tmp_path / 'set'}", "data.valid_split=test")
    ((level, line),) = said()
    assert level == "WARNING" and line.startswith("1 of 6 validation games (17%) is in the training data, too")
    with pytest.raises(DataError, match=r"^15 of 15 validation games \(100%\) are in the training data"):
        prepare(CHESS, "data.source=hub", f"data.dataset={tmp_path / 'set'}", "data.valid_split=train")


# ---------------------------------------------------------------- cells

CELLS = """
task: cells
data: {source: local, valid_fraction: 0.2}
model: {hidden_dim: 16, num_layers: 1, num_heads: 2}
training: {batch_size: 4}
"""


@pytest.mark.parametrize("streaming", ["false", "true"])
@pytest.mark.parametrize("reordered", [False, True])
def test_equal_cells_in_two_files_are_told_with_their_places(
    tmp_path: Path, prepare: Prepare, said: Any, streaming: str, reordered: bool
) -> None:
    counts = random_counts(60, 30)
    one = write_cells(tmp_path / "one.h5ad", counts)
    order = np.arange(30)[::-1] if reordered else np.arange(30)
    two = write_cells(tmp_path / "two.h5ad", counts[:50][:, order], [f"gene{index}" for index in order])
    prepare(CELLS, f"data.paths=[{one}, {two}]", f"data.streaming={streaming}")
    ((level, told),) = said()
    assert level == "WARNING" and "validation cells" in told and "training cells" in told and "of others" in told
    assert f"of {tmp_path}/one.h5ad is the same as cell " in told
    assert "remove the copies. " in told, "no key names other cells to validate on"


def test_cells_that_differ_share_nothing_and_empty_ones_say_nothing(
    tmp_path: Path, prepare: Prepare, said: Any
) -> None:
    counts = random_counts(80, 30)
    counts[::3] = 0
    prepare(CELLS, f"data.paths=[{write_cells(tmp_path / 'cells.h5ad', counts)}]")
    assert said() == []


def test_of_streamed_cells_it_is_said_how_many_were_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Prepare, said: Any
) -> None:
    from shardwise.tasks.cells import overlap

    monkeypatch.setattr(overlap, "STREAMED", 64)
    monkeypatch.setattr(overlap, "_PIECE", 16)
    counts = np.concatenate([random_counts(150, 30)] * 2)
    prepare(CELLS, f"data.paths=[{write_cells(tmp_path / 'cells.h5ad', counts)}]", "data.streaming=true")
    (warning, _), _ = said()[0], None
    assert warning == "WARNING" and "(64 of 240 training cells were compared)" in said()[0][1]


@pytest.mark.parametrize("kind", ["copy", "hard link"])
def test_a_file_of_cells_under_two_names_is_an_error(tmp_path: Path, prepare: Prepare, kind: str) -> None:
    one, two = write_cells(tmp_path / "one.h5ad", random_counts(40, 20)), tmp_path / "two.h5ad"
    if kind == "copy":
        shutil.copy(one, two)
    else:
        two.hardlink_to(one)
    same = rf"^data: {one} and {two} have the same content" if kind == "copy" else rf" twice.* {two} is the same file"
    with pytest.raises(DataError, match=same):
        prepare(CELLS, f"data.paths=[{one}, {two}]")


# ---------------------------------------------------------------- segmentation

SEGMENTATION = """
task: segmentation
data: {source: folder, size: [16, 16, 16], spatial_mode: resize}
model: {name: UNet, args: {channels: [4, 8], strides: [2]}}
training: {batch_size: 1}
"""


def test_a_scan_in_both_folders_is_an_error(tmp_path: Path, prepare: Prepare, said: Any) -> None:
    root = write_folder(tmp_path / "data", train=3, valid=2)
    prepare(SEGMENTATION, f"data.root={root}")
    assert said() == []
    shutil.copytree(root / "train" / "train-1", root / "valid" / "renamed")
    with pytest.raises(
        DataError, match=r"^1 of 3 validation subjects \(33%\) is in the training data, too: .*renamed/img.nii.gz"
    ):
        prepare(SEGMENTATION, f"data.root={root}")
    prepare(SEGMENTATION, f"data.root={root}", "data.allow_shared_samples=true")
    assert [level for level, _ in said()] == ["WARNING"]


def test_copies_of_a_scan_in_one_pool_are_told_where_the_seed_parts_them(
    tmp_path: Path, prepare: Prepare, said: Any
) -> None:
    root = tmp_path / "data"
    for index in range(4):
        for name in ("a", "b"):
            write_subject(root / "train" / f"{name}-{index}", seed=index)
    prepare(SEGMENTATION, f"data.root={root}", "data.valid_fraction=0.5")
    told = said()
    assert told[0][0] == "WARNING" and "The seed held them out" in told[0][1]


# ---------------------------------------------------------------- a task of one's own


class Own(Task):
    whole = [(torch.tensor([float(index)]), torch.tensor([0.0])) for index in range(60)]
    train: Any = Subset(whole, range(50))  # type: ignore[arg-type]
    valid: Any = Subset(whole, range(45, 60))  # type: ignore[arg-type]

    def train_data(self) -> Any:
        return self.train

    def valid_data(self) -> Any:
        return self.valid

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        return Loss((model(batch[0]) - batch[1]).square().sum(), len(batch[0]))


class Lists(Own):
    train, valid = Own.whole[:50], Own.whole[45:]


class Telling(Own):
    """Says itself what its samples are."""

    def sample_contents(self, train: Any, valid: Any) -> SampleContents:
        same = Contents(np.zeros(1, np.uint64), lambda place: "patient 7")
        return SampleContents(same, same, unit="patients")


class Otherwise(Telling):
    """Of other data, which the class above knows nothing of."""

    def valid_data(self) -> Any:
        return Subset(self.whole, range(40, 60))  # type: ignore[arg-type]


class Silent(Own):
    def sample_contents(self, train: Any, valid: Any) -> None:
        return None


def test_a_task_of_ones_own_whose_parts_overlap_is_an_error_or_told(prepare: Prepare, said: Any) -> None:
    name = "task: tests.engine.test_shared_samples:"
    with pytest.raises(
        DataError, match=r"^5 of 15 validation samples .*sample 45 of the data set is the same as sample 45"
    ):
        prepare(f"{name}Own")
    prepare(f"{name}Own", "data.allow_shared_samples=true")
    prepare(f"{name}Lists")
    assert [level for level, _ in said()] == ["WARNING"] * 2
    with pytest.raises(
        DataError, match=r"^1 of 1 validation patients \(100%\) is in the training data, too: patient 7"
    ):
        prepare(f"{name}Telling")
    with pytest.raises(DataError, match=r"^10 of 20 validation samples "):
        prepare(f"{name}Otherwise")
    prepare(f"{name}Silent")
    assert len(said()) == 2


def test_a_model_and_data_of_ones_own_are_looked_at_as_well(tmp_path: Path) -> None:
    data = [(torch.tensor([float(index)]), torch.tensor([0.0])) for index in range(20)]
    config = config_of("task: own\ntraining: {strategy: single, batch_size: 4}", [f"run_dir={tmp_path}"])
    with Session(config) as session, pytest.raises(DataError, match=r"^20 of 20 validation samples \(100%\)"):
        session.prepare(
            model=nn.Linear(1, 1),
            data=data,
            valid=data,
            loss=lambda model, batch: Loss((model(batch[0]) - batch[1]).square().sum(), len(batch[0])),
        )


class Overlapping(Ragged):
    def valid_data(self) -> Any:
        return Subset(self.data, range(5))

    def train_data(self) -> Any:
        return self.data

    @property
    def data(self) -> Any:
        if "made" not in self.__dict__:
            self.__dict__["made"] = super().train_data()
        return self.__dict__["made"]


def test_every_rank_gets_the_error_and_nothing_is_left_behind(ranks: RankPool, tmp_path: Path) -> None:
    text = "task: tests.engine.test_shared_samples:Overlapping\ntraining: {batch_size: 4}"
    with pytest.raises(RankFailure) as caught:
        ranks.run(2, work.run_fit, text, [], str(tmp_path))
    assert str(caught.value).count("5 of 5 validation samples (100%) are in the training data, too") >= 2
    assert not (tmp_path / "runs" / "test").exists()
