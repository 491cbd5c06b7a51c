"""Loss, metrics, memory format, flops, export."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwise.config import parse_config
from shardwise.errors import ConfigError
from shardwise.tasks.images.pictures import Pictures
from tests.images_task.made import RESNET, VIT, task_of, write_images


def a_batch(task: Any, size: int = 6) -> dict[str, torch.Tensor]:
    data = task.valid_data()
    return task.collate([data[index] for index in range(size)])


class Oracle(nn.Module):
    """Answers with fixed numbers, whatever it is shown."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, pixel_values: torch.Tensor) -> Any:
        return type("Output", (), {"logits": self.logits})


def test_the_loss_is_the_summed_cross_entropy_and_its_count_the_images() -> None:
    task = task_of(VIT)
    model, batch = task.build_model().eval(), a_batch(task)
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    logits = model(pixel_values=(batch["pixels"] / 255 - mean) / std).logits
    expected = -logits.log_softmax(dim=1)[torch.arange(6), batch["labels"]].sum()
    loss = task.loss(model, batch)
    torch.testing.assert_close(loss.sum, expected)
    assert loss.count == task.count(batch) == 6


def test_label_smoothing_spreads_the_target_in_training_and_not_in_evaluation() -> None:
    task = task_of(RESNET, "model.label_smoothing=0.3")
    batch = a_batch(task)
    logits = torch.randn(6, 6)
    targets = F.one_hot(batch["labels"], 6) * 0.7 + 0.3 / 6
    smoothed = -(targets * logits.log_softmax(dim=1)).sum()
    torch.testing.assert_close(task.loss(Oracle(logits), batch).sum, smoothed)
    plain = F.cross_entropy(logits, batch["labels"], reduction="sum")
    torch.testing.assert_close(task.evaluate(Oracle(logits), batch)["loss"].sum, plain)


def test_accuracy_counts_first_choices_and_top_five_the_first_five() -> None:
    task = task_of(RESNET)
    batch = a_batch(task)
    logits = torch.zeros(6, 6)
    # The right class comes first, second, fifth, sixth, first, first.
    for row, place in enumerate([0, 1, 4, 5, 0, 0]):
        others = [label for label in range(6) if label != int(batch["labels"][row])]
        ranking = [*others[:place], int(batch["labels"][row]), *others[place:]]
        logits[row, ranking] = torch.arange(6.0, 0.0, -1)
    metrics = task.evaluate(Oracle(logits), batch)
    assert {name: (int(metric.sum), metric.count) for name, metric in metrics.items() if name != "loss"} == {
        "accuracy": (3, 6),
        "top5_accuracy": (5, 6),
    }


def test_with_five_classes_there_is_no_top_five() -> None:
    task = task_of(RESNET, "data.num_classes=5")
    assert set(task.evaluate(Oracle(torch.zeros(6, 5)), a_batch(task))) == {"loss", "accuracy"}


# ---------------------------------------------------------------- channels last


def test_batches_come_in_the_memory_order_that_was_asked_for_and_hold_the_same_pixels() -> None:
    last, plain = (a_batch(task_of(RESNET, f"model.channels_last={choice}"))["pixels"] for choice in ("true", "false"))
    assert last.is_contiguous(memory_format=torch.channels_last) and not last.is_contiguous()
    assert plain.is_contiguous()
    assert last.dtype == torch.uint8 and torch.equal(last, plain)


@pytest.mark.parametrize("text", [RESNET, VIT])
def test_the_memory_order_changes_the_results_by_rounding_only(text: str) -> None:
    torch.manual_seed(0)
    plain = task_of(text, "model.channels_last=false")
    last = task_of(text)
    models = [task.build_model() for task in (plain, last)]
    models[1].load_state_dict(models[0].state_dict())
    gradients = []
    for task, model in zip((plain, last), models, strict=True):
        loss = task.loss(model, a_batch(task))
        loss.sum.backward()
        gradients.append((loss.sum, {name: parameter.grad for name, parameter in model.named_parameters()}))
    torch.testing.assert_close(gradients[0][0], gradients[1][0], rtol=1e-5, atol=1e-5)
    for name, gradient in gradients[0][1].items():
        torch.testing.assert_close(
            gradients[1][1][name], gradient, rtol=1e-3, atol=1e-4, msg=partial("{}: {}".format, name)
        )


# ---------------------------------------------------------------- flops


def test_flops_of_a_linear_model_are_those_that_pen_and_paper_give() -> None:
    """A ViT without attention worth speaking of: patch embedding, projections, MLP and head, all matrix products."""
    task = task_of(VIT)
    tokens, width, layers = 17, 16, 2
    patches = 2 * 16 * (4 * 4 * 3) * width
    per_layer = 2 * tokens * width * width * 4 + 2 * tokens * width * 64 * 2 + 2 * 2 * tokens * tokens * width
    head = 2 * width * 6
    assert task.flops_per_count(task.build_model()) == 3 * (patches + layers * per_layer + head)


def test_resnet_50_has_the_operations_that_are_published() -> None:
    task = task_of("task: images", "model.architecture=resnet50", "data.image_size=224")
    assert task.flops_per_count(nn.Identity()) == pytest.approx(3 * 2 * 4.09e9, rel=0.01)


def test_a_model_whose_operations_cannot_be_counted_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.tasks.images import task as module

    class Looks(nn.Module):
        def forward(self, pixel_values: torch.Tensor) -> Any:
            return pixel_values.sum().item()

    monkeypatch.setattr(module, "build_classifier", lambda *_: Looks())
    assert task_of(RESNET).flops_per_count(nn.Identity()) is None


# ---------------------------------------------------------------- export


@pytest.mark.parametrize("text", [RESNET, VIT])
def test_an_exported_model_is_loaded_bit_for_bit_with_its_class_names(text: str, tmp_path: Path) -> None:
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    task = task_of(text)
    model = task.build_model()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    task.export(model, tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == expected.keys()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert loaded.config.id2label == dict(enumerate(task.classes))
    assert loaded.config.label2id["square at hue 0"] == 1
    assert AutoImageProcessor.from_pretrained(tmp_path).crop_size["height"] == 16
    assert json.loads((tmp_path / "preprocessor_config.json").read_text())["image_mean"] == [0.485, 0.456, 0.406]


def test_with_named_classes_the_model_is_built_without_the_data(tmp_path: Path) -> None:
    task = task_of(
        "task: images",
        "data.source=folder",
        f"data.root={tmp_path}/gone",
        "data.classes=[cat, dog]",
        "data.image_size=32",
    )
    model: Any = task.build_model()
    assert model.config.id2label == {0: "cat", 1: "dog"}


# ---------------------------------------------------------------- files


def test_all_images_are_checked_once_those_held_out_included(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.tasks.images.folder import Files

    write_images(tmp_path / "train", {"cat": 5, "dog": 5})
    looked_at: list[str] = []
    original = Files.inspect

    def counting(self: Any, index: int) -> Any:
        looked_at.append(Pictures.name(self, index))
        return original(self, index)

    monkeypatch.setattr(Files, "inspect", counting)

    def prepare() -> int:
        looked_at.clear()
        task_of("task: images", "data.source=folder", f"data.root={tmp_path}").prepare_data()
        return len(looked_at)

    assert prepare() == 10
    assert prepare() == 0


# ---------------------------------------------------------------- config


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("data: {source: folder}", "source: folder needs root, a folder with train/<class>/ in it"),
        ("data: {root: here}", "root is read with source: folder, but source is synthetic"),
        ("data: {source: hub}", "source: hub needs dataset"),
        ("data: {dataset: cifar10}", "dataset is read with source: hub, but source is synthetic"),
        ("data: {dataset: a, valid_split: b}", "dataset and valid_split are read with source: hub, but source is"),
        ("data: {classes: [a, b]}", "classes names those of source: folder or hub; synthetic takes num_classes"),
        ("data: {source: folder, root: here, classes: [a, a]}", "classes has a name twice"),
        ("data: {source: folder, root: here, classes: [a]}", "with one class there is nothing to tell apart"),
        ("data: {std: [1.0, 0.0, 1.0]}", r"std must be above zero, not \[1.0, 0.0, 1.0\]"),
        ("model: {depths: [1, 1], widths: [8]}", "depths has 2 stages and widths has 1: give one per stage"),
        ("model: {hidden_dim: 10, num_heads: 4}", "num_heads: 4 must divide hidden_dim: 10"),
    ],
)
def test_a_block_that_contradicts_itself_is_refused(block: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(f"task: images\n{block}")


@pytest.mark.parametrize(("module", "package"), [("PIL", "pillow"), ("transformers", "transformers")])
def test_without_the_extra_one_line_says_what_to_install(module: str, package: str) -> None:
    program = f"import sys; sys.modules[{module!r}] = None; import shardwise.tasks.images.task"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.strip().splitlines()[-1] == (
        f"shardwise.errors.MissingExtra: task: images needs the package {package!r}: pip install 'shardwise[images]'"
    )


def test_without_datasets_the_hub_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.errors import MissingExtra

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        MissingExtra, match=r"data.source: hub needs the package 'datasets': pip install 'shardwise\[images\]'"
    ):
        task_of("task: images", "data.source=hub", "data.dataset=cifar10").train_data()
