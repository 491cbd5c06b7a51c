"""What the model sees of an image."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from shardwise.data import Reader
from shardwise.data.loader import Work
from shardwise.tasks.images.views import IMAGENET_MEAN, IMAGENET_STD, Look, _random_box, training_view, validation_view
from tests.images_task.made import RESNET, task_of

LOOK = Look(16, IMAGENET_MEAN, IMAGENET_STD, crop_pct=0.875, min_crop_area=0.08, flip=True)
PLAIN = Look(16, IMAGENET_MEAN, IMAGENET_STD, crop_pct=1.0, min_crop_area=1.0, flip=False)


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("size", [(40, 40), (64, 30), (30, 64), (6, 10)])
def test_validation_sees_the_centre_after_the_shorter_side_is_brought_to_its_length(size: tuple[int, int]) -> None:
    image = Image.new("RGB", size)
    image.paste((255, 255, 255), (size[0] // 2 - 1, size[1] // 2 - 1, size[0] // 2 + 1, size[1] // 2 + 1))
    view = np.asarray(validation_view(image, LOOK)).astype(float)
    assert view.shape == (16, 16, 3)
    brightest = np.argwhere(view[..., 0] == view[..., 0].max()).mean(axis=0)
    assert np.abs(brightest - 7.5).max() <= 1.0


@pytest.mark.parametrize("size", [(1, 200_000), (200_000, 1), (3, 3_001)])
def test_a_stripe_is_seen_at_its_centre_without_being_enlarged_as_a_whole(size: tuple[int, int]) -> None:
    image = Image.new("RGB", size)
    centre = size[0] // 2, size[1] // 2
    image.paste((255, 255, 255), (max(0, centre[0] - 3), max(0, centre[1] - 3), centre[0] + 3, centre[1] + 3))
    view = np.asarray(validation_view(image, Look(224, IMAGENET_MEAN, IMAGENET_STD, 0.875, 0.08, flip=True)))
    assert view.shape == (224, 224, 3) and (view[100:124, 100:124] == 255).all()


def test_the_whole_square_is_seen_where_nothing_is_cut_off_or_mirrored() -> None:
    image = noise(16, 16)
    for view in (validation_view(image, PLAIN), training_view(image, PLAIN)):
        assert np.array_equal(np.asarray(view), np.asarray(image))


def test_a_random_crop_lies_inside_and_keeps_the_area_and_ratio_it_may() -> None:
    random.seed(0)
    areas = []
    for _ in range(500):
        left, top, right, bottom = _random_box(100, 60, 0.2)
        assert 0 <= left < right <= 100 and 0 <= top < bottom <= 60
        assert 3 / 4 - 1e-9 <= (right - left) / (bottom - top) <= 4 / 3 + 1e-9
        areas.append((right - left) * (bottom - top) / 6000)
    assert min(areas) >= 0.2 and max(areas) > 0.6 and min(areas) < 0.25


def test_an_image_that_no_crop_fits_gives_its_middle() -> None:
    assert _random_box(100, 4, 0.9) == (48, 0, 52, 4)


def test_half_of_the_images_are_mirrored() -> None:
    random.seed(0)
    image = noise(16, 16)
    look = Look(16, IMAGENET_MEAN, IMAGENET_STD, crop_pct=1.0, min_crop_area=1.0, flip=True)
    views = [np.asarray(training_view(image, look)) for _ in range(200)]
    mirrored = sum(np.array_equal(view, np.asarray(image)[:, ::-1]) for view in views)
    assert 70 < mirrored < 130
    assert mirrored + sum(np.array_equal(view, np.asarray(image)) for view in views) == 200


def test_what_is_random_in_a_sample_follows_from_seed_epoch_and_sample_only() -> None:
    """Whatever was drawn before, and with whichever samples it is read."""
    task = task_of(RESNET)
    data = task.train_data()

    def pixels(ids: tuple[int, ...], epoch: int, seed: int = 0) -> torch.Tensor:
        random.random()
        reader = Reader(data, task.collate, task.count, seed)
        return reader.read(Work(np.array(ids), (len(ids),), epoch)).inputs[0]["pixels"]

    assert torch.equal(pixels((3, 5), 0)[1], pixels((5,), 0)[0])
    assert not torch.equal(pixels((5,), 0), pixels((5,), 1))
    assert not torch.equal(pixels((5,), 0), pixels((5,), 0, seed=1))


def test_validation_images_are_the_same_in_every_epoch() -> None:
    data = task_of(RESNET).valid_data()
    assert torch.equal(data[3][0], data[3][0])


def test_the_exported_processor_shows_the_model_what_validation_did(tmp_path: Path) -> None:
    from transformers import AutoImageProcessor

    task = task_of(RESNET, "data.image_size=20", "data.mean=[0.5, 0.4, 0.3]", "data.std=[0.2, 0.3, 0.4]")
    task.export(task.build_model(), tmp_path)
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    for size in [(50, 37), (37, 50), (20, 20)]:
        image = noise(*size)
        theirs = processor(image, return_tensors="pt")["pixel_values"]
        batch = task.collate([(torch.from_numpy(np.array(validation_view(image, task.look))), 0)])
        mean, std = task._scale(torch.device("cpu"))
        torch.testing.assert_close((batch["pixels"].float() - mean) / std, theirs, rtol=1e-5, atol=1e-5)
