"""What is held out is the same for the same seed, and what it always was: runs are compared over versions."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.config.seeds import Purpose
from shardwise.data.holdout import copies_together, hold_out
from shardwise.tasks.chess.config import ChessData
from shardwise.tasks.chess.games import load_games, random_game
from shardwise.tasks.images.pictures import held_out
from tests.segmentation_task.files import task_of


@pytest.mark.parametrize("number", [2, 3, 10, 59, 200])
@pytest.mark.parametrize("share", [0.001, 0.1, 0.25, 0.999])
def test_a_share_is_held_out_and_neither_side_is_ever_empty(number: int, share: float) -> None:
    kept, out = hold_out(number, share, seed=5)
    assert len(out) == min(number - 1, max(1, round(share * number)))
    assert sorted([*kept, *out]) == list(range(number))
    assert kept.tolist() == sorted(kept) and out.tolist() == sorted(out)


def test_a_single_sample_is_for_training() -> None:
    kept, out = hold_out(1, 0.9, seed=0)
    assert (kept.tolist(), out.tolist()) == ([0], [])


def test_the_choice_follows_from_the_seed_and_the_group() -> None:
    first = hold_out(50, 0.2, 1)[1].tolist()
    assert first == hold_out(50, 0.2, 1)[1].tolist()
    assert first != hold_out(50, 0.2, 2)[1].tolist()
    assert first != hold_out(50, 0.2, 1, 1)[1].tolist() != hold_out(50, 0.2, 1, 2)[1].tolist()


def test_games_subjects_and_images_are_held_out_as_they_always_were() -> None:
    """The formula as each task once had it, written out."""
    seed, share = 3, 0.15

    def order(number: int, *group: int) -> list[int]:
        return np.random.default_rng([seed, Purpose.SPLIT, *group]).permutation(number).tolist()

    games = [random_game(seed, index, 4) for index in range(20)]
    train, valid = load_games(ChessData(num_games=20, max_plies=4, valid_fraction=share), seed)
    assert list(valid) == [games[index] for index in sorted(order(20)[:3])]
    assert list(train) == [games[index] for index in sorted(order(20)[3:])]

    split = task_of("data.num_subjects=20", f"data.valid_fraction={share}", f"seed={seed}").subjects
    every = sorted(split.all, key=lambda subject: subject.name)
    assert split.valid == [every[index] for index in sorted(order(20)[:3])]
    assert split.train == [every[index] for index in sorted(order(20)[3:])]

    labels = np.array([0, 1] * 10)
    of_one = np.flatnonzero(labels == 1)
    chosen = np.random.default_rng([seed, Purpose.SPLIT, 1]).permutation(of_one)[:2]
    assert [index for index in held_out(labels, share, seed)[1] if labels[index] == 1] == sorted(chosen)


def test_copies_go_where_the_first_of_them_is_and_nothing_else_moves() -> None:
    kept, held_out = hold_out(100, 0.2, seed=5)
    unique = [f"sample {index}" for index in range(100)]
    same = copies_together(kept, held_out, unique)
    assert same[0].tolist() == kept.tolist() and same[1].tolist() == held_out.tolist()
    copies = [f"sample {index % 50}" for index in range(100)]
    train, valid = copies_together(kept, held_out, copies)
    assert sorted([*train, *valid]) == list(range(100))
    assert not {copies[index] for index in train} & {copies[index] for index in valid}
    assert {copies[index] for index in valid} == {copies[index] for index in held_out if index < 50}


def test_where_all_samples_are_copies_of_one_the_split_stays_as_it_is() -> None:
    kept, held_out = hold_out(10, 0.2, seed=5)
    train, valid = copies_together(kept, held_out, ["draw"] * 10)
    assert (train.tolist(), valid.tolist()) == (kept.tolist(), held_out.tolist())
