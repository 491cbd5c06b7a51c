"""Which model is built, and what is said when it cannot be."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import ConfigError, DataError
from shardwise.tasks.images.model import PRESETS
from tests.images_task.made import RESNET, VIT, task_of, write_model


def shape_of(*overrides: str) -> Any:
    with torch.device("meta"):
        return task_of("task: images", "data.num_classes=5", "data.image_size=224", *overrides).build_model()


# Parameters as published for 1000 classes, less the head's rows that 5 classes do not have.
PUBLISHED = {
    "resnet18": (11_689_512, 512),
    "resnet34": (21_797_672, 512),
    "resnet50": (25_557_032, 2048),
    "resnet101": (44_549_160, 2048),
    "resnet152": (60_192_808, 2048),
    "vit-ti16": (5_717_416, 192),
    "vit-s16": (22_050_664, 384),
    "vit-b16": (86_567_656, 768),
    "vit-l16": (304_326_632, 1024),
}


@pytest.mark.parametrize("architecture", PRESETS)
def test_a_preset_has_as_many_parameters_as_the_published_model(architecture: str) -> None:
    published, width = PUBLISHED[architecture]
    model = shape_of(f"model.architecture={architecture}")
    assert sum(parameter.numel() for parameter in model.parameters()) == published - 995 * (width + 1)
    assert model.config.num_labels == 5


@pytest.mark.parametrize("architecture", ["convnext", "swin", "mobilenet_v2", "deit"])
def test_any_hugging_face_type_is_built_and_told_the_classes(architecture: str) -> None:
    model = shape_of(f"model.architecture={architecture}")
    assert model.config.model_type == architecture
    assert model.config.id2label[4] == "cross at hue 0"


def test_sizes_and_extra_fields_reach_the_model() -> None:
    resnet: Any = task_of(RESNET).build_model()
    assert (
        resnet.config.depths == [1, 1] and resnet.config.hidden_sizes == [16, 32] and resnet.config.embedding_size == 8
    )
    vit: Any = task_of(VIT, "model.dropout=0.25").build_model()
    assert (vit.config.hidden_size, vit.config.intermediate_size, vit.config.num_hidden_layers) == (16, 64, 2)
    assert (vit.config.image_size, vit.config.patch_size, vit.config.hidden_dropout_prob) == (16, 4, 0.25)


def test_the_units_of_sharding_are_stages_or_layers() -> None:
    for text in (RESNET, VIT):
        task = task_of(text)
        assert len(task.blocks(task.build_model())) == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.architecture=resnet55"], r"'resnet55' is neither one of resnet18, .* nor a .* Nearest: resnet50"),
        (["model.architecture=llama"], "'llama' is neither one of"),
        (["model.hidden_dim=64"], "model.hidden_dim: resnet has no such size; model.extra sets fields"),
        (["model.architecture=vit", "model.depths=[1, 1]"], "model.depths: vit has no such size"),
        (["model.dropout=0.1"], "model.dropout: resnet has no dropout: leave it out"),
        (
            ["model.architecture=vit-b16", "data.image_size=100"],
            "data.image_size: 100 is not a multiple of the model's patch size 16: set data.image_size to 96, or",
        ),
        (["model.architecture=vit", "model.hidden_dim=64"], "model.num_heads: 12 must divide the width 64"),
        (
            ["model.depths=[1, 1]"],
            r"model.depths has 2 stages, but the widths are \[64, 128, 256, 512\]: give depths and",
        ),
        (["model.extra={embeding_size: 8}"], "config of resnet has no field 'embeding_size'. Nearest: embedding_size"),
        (
            ["model.extra={embedding_size: x}"],
            "model: resnet cannot be built with these sizes: .*expected int, got str",
        ),
        (["model.extra={hidden_act: x}"], "model: resnet cannot be built with these sizes: KeyError: 'x'"),
    ],
)
def test_what_cannot_be_built_says_why(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape_of(*overrides)


# ---------------------------------------------------------------- by name


def test_a_folder_with_a_model_is_loaded_and_what_it_was_trained_to_see_is_followed(tmp_path: Path) -> None:
    from transformers import AutoModelForImageClassification

    write_model(tmp_path, num_classes=10)
    task = task_of("task: images", f"model.name={tmp_path}")
    expected = AutoModelForImageClassification.from_pretrained(tmp_path).state_dict()
    for name, value in task.build_model().state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert (task.look.size, task.look.mean, task.look.std) == (16, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    other = task_of("task: images", f"model.name={tmp_path}", "data.image_size=24", "data.mean=[0.1, 0.1, 0.1]")
    assert (other.look.size, other.look.mean) == (24, (0.1, 0.1, 0.1))
    with torch.device("meta"):
        assert all(parameter.is_meta for parameter in task.build_model().parameters())


def test_a_head_for_other_classes_is_made_anew_and_the_run_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoModelForImageClassification

    write_model(tmp_path, num_classes=3)
    with caplog.at_level(logging.INFO, "shardwise"):
        model: Any = task_of("task: images", f"model.name={tmp_path}").build_model()
    assert (
        f"{tmp_path} brings no weights of these shapes, so they start anew, for 10 classes: classifier.1.bias, "
        "classifier.1.weight" in caplog.text
    )
    assert model.config.num_labels == 10 and model.classifier[1].weight.shape == (10, 32)
    assert model.classifier[1].weight.std() > 0
    expected = AutoModelForImageClassification.from_pretrained(tmp_path).state_dict()
    for name, value in model.state_dict().items():
        assert name.startswith("classifier.1") or torch.equal(value, expected[name]), name


def test_nothing_is_said_where_every_weight_comes_from_the_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, num_classes=10)
    with caplog.at_level(logging.INFO, "shardwise"):
        task_of("task: images", f"model.name={tmp_path}").build_model()
    assert not caplog.records


def test_position_embeddings_are_never_thrown_away_silently(tmp_path: Path) -> None:
    write_model(tmp_path, "vit")
    with pytest.raises(
        ConfigError, match=r"data.image_size: 32, but model.name: .* takes images of 16: leave image_size out"
    ):
        task_of("task: images", f"model.name={tmp_path}", "data.image_size=32").build_model()
    assert task_of("task: images", f"model.name={tmp_path}").look.size == 16


def test_a_model_without_a_processor_is_shown_what_imagenet_models_are(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    assert task_of("task: images", f"model.name={tmp_path}").look.mean == (0.485, 0.456, 0.406)


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(DataError, match=r"model.name: '/nowhere/model' is not a folder with a model here, and the hub"):
        task_of("task: images", "model.name=/nowhere/model").train_data()
