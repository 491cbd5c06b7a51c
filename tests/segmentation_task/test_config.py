from __future__ import annotations

import pytest

from shardwise.config import DataBlock, load_config, parse_config
from shardwise.errors import ConfigError
from shardwise.tasks.segmentation.config import SegmentationData
from shardwise.tasks.segmentation.transforms import fixed_settings
from tests.conftest import REPOSITORY


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{source: folder}", "source: folder needs root, the folder that holds train/<subject>/img.nii.gz"),
        ("{source: msd}", "source: msd needs root, the folder that holds dataset.json"),
        ("{root: a}", "root is read with source: folder or msd, but source is synthetic"),
        ("{normalize: window}", "normalize: window needs intensity_window, for example [-1000, 400]"),
        (
            "{normalize: zscore, intensity_window: [0, 1]}",
            "intensity_window contradicts normalize: zscore: leave one of them out",
        ),
        ("{intensity_window: [5, 5]}", "intensity_window is [low, high], but 5.0 is not the lower one"),
        (
            "{patches_per_volume: 2}",
            "patches_per_volume is used with spatial_mode: patches, but spatial_mode is resize",
        ),
        ("{classes: [background]}", "classes: 1 name(s); give 2 to 255, background first"),
        (
            "{classes: [b, left lung, left-lung]}",
            "classes: dice_left_lung would name two metrics; give every class a name of its own",
        ),
    ],
)
def test_data_keys_that_contradict_each_other_are_refused(data: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(f"task: segmentation\ndata: {data}\n", where="my.yaml")
    assert str(caught.value) == f"my.yaml, line 2: data: {message}"


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("data: {size: [64, 64]}", "data.size: [64, 64] is not allowed"),
        (
            "data: {classes: {0: background, 1: lesion}}",
            "data.classes: {0: 'background', 1: 'lesion'} is not allowed. Allowed: a whole number, or a list",
        ),
        ("data: {spacing: [1, 1, 0]}", "data.spacing.2: 0 is not allowed. Allowed: above 0"),
        (
            "data: {sources: folder}",
            "data.sources is not a key that shardwise knows (value 'folder'). Nearest: data.source",
        ),
        ("model: {feature_size: 48}", "model.feature_size is not a key that shardwise knows (value 48)"),
        ("model: {loss: focal}", "model.loss: 'focal' is not allowed. Allowed: dice, dice_ce"),
        ("tokenizer: {name: x}", "tokenizer.name is not a key that shardwise knows"),
    ],
)
def test_a_wrong_key_or_value_is_named(block: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(f"task: segmentation\n{block}\n", where="my.yaml")
    assert str(caught.value).startswith(f"my.yaml, line 2: {message}") and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["segmentation-tiny", "segmentation-msd"])
def test_shipped_configs_keep_the_model_with_the_best_dice(name: str) -> None:
    training = load_config(REPOSITORY / "configs" / f"{name}.yaml").training
    assert (training.monitor, training.monitor_mode) == ("dice", "max")


def test_only_settings_of_fixed_transforms_are_in_the_name_of_a_cached_volume() -> None:
    """A new key has to be thought of: does what is cached depend on it?"""
    fixed = {"intensity_window", "normalize", "spacing", "spatial_mode", "size"}
    others = {"source", "root", "classes", "in_channels", "valid_fraction", "patches_per_volume", "flips", "cache",
              "intensity_shift", "sw_overlap", "num_subjects", "volume_size"}  # fmt: skip
    own = set(SegmentationData.model_fields) - set(DataBlock.model_fields)
    assert own == fixed | others
    assert set(fixed_settings(SegmentationData())) == fixed
    assert set(fixed_settings(SegmentationData(spatial_mode="patches"))) == fixed - {"size"}
