"""The segmentation task: Dice per sample to train with, Dice by class and pictures to look at."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardwise.errors import MissingExtra

# Looked for and not imported: MONAI takes seconds, and the process that only starts the ranks has no use for it.
if _missing := [name for name in ("monai", "nibabel", "einops", "matplotlib") if find_spec(name) is None]:
    raise MissingExtra.of(_missing[0], "medical", "task: segmentation")

import torch
from torch import Tensor, nn

from shardwise.config import Config
from shardwise.data import SampleContents
from shardwise.tasks.base import Loss, Rows, Task
from shardwise.tasks.segmentation import cautions
from shardwise.tasks.segmentation.check import check_foreground, check_subjects
from shardwise.tasks.segmentation.config import SegmentationData, SegmentationModel, metric_name
from shardwise.tasks.segmentation.dice import dice_scores, predicted, sample_losses
from shardwise.tasks.segmentation.facts import Facts, facts_of
from shardwise.tasks.segmentation.network import (
    Shapes,
    build_network,
    check_network,
    network_blocks,
    network_regions,
)
from shardwise.tasks.segmentation.overlap import subject_contents
from shardwise.tasks.segmentation.overlays import SUBJECTS, draw_overlays, overlay_row
from shardwise.tasks.segmentation.sides import sided_names
from shardwise.tasks.segmentation.subjects import Split, Subject, find_subjects, read_dataset_json
from shardwise.tasks.segmentation.synthetic import make_synthetic
from shardwise.tasks.segmentation.transforms import shape_after
from shardwise.tasks.segmentation.volumes import TrainVolumes, ValidVolumes, Volume, Volumes
from shardwise.tasks.segmentation.windows import calls_for, predict_volumes

log = logging.getLogger(__name__)


class SegmentationTask(Task):
    Data, Model = SegmentationData, SegmentationModel
    one_size = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.data: SegmentationData = self.config.data
        self.in_patches = self.data.spatial_mode == "patches"
        self.unit = "patches" if self.in_patches else "samples"

    @cached_property
    def subjects(self) -> Split:
        return find_subjects(self.data, self.config.seed)

    @cached_property
    def classes(self) -> list[str]:
        """Their names, background first."""
        given = self.data.classes
        if isinstance(given, list):
            return given
        if given is None and self.data.source == "msd":
            return read_dataset_json(Path(str(self.data.root))).classes
        count = given or 2
        return ["background", "foreground"] if count == 2 else ["background", *(f"class_{n}" for n in range(1, count))]

    @cached_property
    def shapes(self) -> Shapes:
        """What the network must take and give."""
        x, y, z = self.data.size
        channels = self._known_channels() or facts_of(self.subjects.train[0]).image.channels
        return Shapes(channels, 1 if len(self.classes) == 2 else len(self.classes), (x, y, z))

    def _known_channels(self) -> int | None:
        """Of an image; None where only the images know."""
        if self.data.in_channels is None and self.data.source == "msd":
            return read_dataset_json(Path(str(self.data.root))).channels
        return 1 if self.data.in_channels is None and self.data.source == "synthetic" else self.data.in_channels

    def prepare_data(self) -> None:
        if self.data.source == "synthetic":
            make_synthetic(self.data, self.config.seed)
        if self.data.source == "msd" and isinstance(self.data.classes, list):
            read_dataset_json(Path(str(self.data.root))).check_order(self.data.classes)
        facts = check_subjects(self.subjects.all, len(self.classes), self._known_channels(), self.data)
        check_foreground(self.subjects, facts, self.classes)
        self._caution(facts)
        if self.in_patches:
            self._mind_small_volumes(facts)
        check_network(self.config.model, self.shapes)

    def _caution(self, facts: list[Facts]) -> None:
        everybody = self.subjects.all
        if self.data.source == "folder":
            cautions.warn_of_shared_names(self.subjects)
            if self.subjects.held_out:
                cautions.warn_of_unread_folders(Path(str(self.data.root)), self.data.valid_fraction)
        cautions.warn_of_mixed_pairs(everybody)
        cautions.warn_of_misplaced_background(self.classes)
        cautions.warn_of_single_slices(everybody, facts, self.data)
        cautions.warn_of_empty_channels(everybody, facts)
        cautions.warn_of_shared_labels(everybody, facts)
        cautions.warn_of_images_that_are_labels(everybody, facts)
        cautions.warn_of_inverted_labels(everybody, facts)
        cautions.warn_of_other_units(everybody, facts, self.data)
        if self._known_channels() is None:
            cautions.warn_of_guessed_channels(everybody, facts)
        if self.in_patches and self.data.spacing is None:
            cautions.warn_of_mixed_spacing(everybody, facts)
        cautions.warn_of_unknown_sides(everybody, facts, self._sided)
        cautions.warn_of_two_sides(everybody, facts, self._sided)
        cautions.warn_of_flipped_sides(self._sided, self.flips[0], chosen=self.data.flips is not None)

    @cached_property
    def _sided(self) -> list[str]:
        """The classes that tell left from right. A number of classes has no names, but dataset.json may have them."""
        if isinstance(self.data.classes, int) and self.data.source == "msd":
            return sided_names(read_dataset_json(Path(str(self.data.root))).names)
        return sided_names(self.classes[1:])

    @cached_property
    def flips(self) -> tuple[float, float, float]:
        """Their probability along each axis of an oriented volume, left-right first. Where left and right are different
        classes, a flip would make one of the other."""
        given = self.data.flips
        if given is None:
            return (0.0 if self._sided else 0.5), 0.5, 0.5
        x, y, z = given if isinstance(given, list) else [given] * 3
        return x, y, z

    def _mind_small_volumes(self, facts: list[Facts]) -> None:
        shapes = [shape_after(each.image, self.data) for each in facts]
        small = [
            index
            for index, shape in enumerate(shapes)
            if any(a < b for a, b in zip(shape, self.data.size, strict=True))
        ]
        if small:
            first = self.subjects.all[small[0]]
            log.info(
                f"{len(small)} of {len(shapes)} volumes are smaller than data.size {self.data.size}, and are padded with "
                f"zeros; {first.image} is {list(shapes[small[0]])}"
            )

    def train_data(self) -> TrainVolumes:
        return TrainVolumes(self._volumes(self.subjects.train), self.flips)

    def valid_data(self) -> ValidVolumes:
        return ValidVolumes(self._volumes(self.subjects.valid))

    def _volumes(self, subjects: list[Subject]) -> Volumes:
        return Volumes(subjects, self.data, len(self.classes), self.shapes.in_channels)

    def sample_contents(self, train: Any, valid: Any) -> SampleContents:
        return subject_contents(self.subjects)

    def build_model(self) -> nn.Module:
        return build_network(self.config.model, self.shapes)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return network_blocks(model)

    def regions(self, model: nn.Module) -> list[nn.Module]:
        return network_regions(model)

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        """Training samples are lists of patches; validation volumes may differ in size, and stay apart then."""
        if isinstance(samples[0], list):
            patches: list[Volume] = [patch for sample in samples for patch in sample]
            return {key: torch.stack([patch[key] for patch in patches]) for key in ("image", "mask")}
        batch: dict[str, Any] = {key: torch.stack([each[key] for each in samples]) for key in ("index", "spacing")}
        for key in ("image", "mask"):
            volumes = [each[key] for each in samples]
            batch[key] = volumes if self.in_patches else torch.stack(volumes)
        return batch

    def count(self, batch: dict[str, Any]) -> int:
        return len(batch["image"])

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        return self._loss(model(batch["image"]), batch["mask"])

    def evaluate(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Loss | Rows]:
        losses, scores, counted, rows = [], [], [], []
        # One volume after the other: the logits of a whole scan are large.
        for place, logits in enumerate(self._predictions(model, batch["image"])):
            image, mask = batch["image"][place], batch["mask"][place]
            prediction = predicted(logits)
            score, there = dice_scores(prediction, mask.unsqueeze(0), len(self.classes))
            losses.append(self._loss(logits, mask.unsqueeze(0)).sum)
            scores.append(score)
            counted.append(there)
            key, spacing = batch["index"][place], batch["spacing"][place]
            if int(key) < SUBJECTS:
                rows.append(overlay_row(key, image, mask, prediction[0], score[there].mean(), spacing, self._frame))
        results: dict[str, Loss | Rows] = {"loss": Loss(torch.stack(losses).sum(), len(losses))}
        for number, name in enumerate(self.classes[1:]):
            sums, counts = (torch.cat(parts)[:, number].sum() for parts in (scores, counted))
            results[metric_name(name)] = Loss(sums, counts)
        return results | ({"overlays": _joined(rows)} if rows else {})

    def _predictions(self, model: nn.Module, images: Any) -> Iterator[Tensor]:
        """The logits of each volume, [1, channels, x, y, z]."""
        if not self.in_patches:
            return iter(model(images).split(1))
        whole = [image.unsqueeze(0) for image in images]
        return predict_volumes(model, whole, self.data.size, self.data.sw_overlap, self._calls)

    @cached_property
    def _calls(self) -> int:
        """Model calls of a whole micro-batch of the largest volumes: every rank makes as many for any micro-batch."""
        largest = max(calls_for(shape, self.data.size, self.data.sw_overlap) for shape in self._valid_shapes)
        return largest * int(self.config.training.batch_size)

    def derived_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Dice over the foreground classes that could be measured."""
        found = [metrics[metric_name(name)] for name in self.classes[1:] if metric_name(name) in metrics]
        return {"dice": sum(found) / len(found) if found else math.nan}

    def metric_names(self) -> tuple[str, ...]:
        return "loss", "dice", *(metric_name(name) for name in self.classes[1:])

    def study(self, rows: dict[str, Rows], pictures: Path, step: int) -> dict[str, float]:
        names = [subject.name for subject in self.subjects.valid]
        draw_overlays(rows["overlays"], names, self.classes, pictures / f"step-{step:08d}-overlays.png", step)
        return {}

    @cached_property
    def _frame(self) -> tuple[int, int]:
        """Of a picture: as large as the largest slice that is drawn."""
        drawn = self._valid_shapes[:SUBJECTS]
        return max(shape[0] for shape in drawn), max(shape[1] for shape in drawn)

    @cached_property
    def _valid_shapes(self) -> list[tuple[int, int, int]]:
        return [shape_after(facts_of(subject).image, self.data) for subject in self.subjects.valid]

    def _loss(self, logits: Tensor, mask: Tensor) -> Loss:
        losses = sample_losses(logits, mask, cross_entropy=self.config.model.loss == "dice_ce")
        return Loss(losses.sum(), len(losses))


def _joined(rows: list[Rows]) -> Rows:
    columns = {name: torch.cat([row.columns[name] for row in rows]) for name in rows[0].columns}
    return Rows(torch.cat([row.keys for row in rows]), columns)
