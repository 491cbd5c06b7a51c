"""Where classes tell left from right, nothing is flipped along that axis unless somebody asks for it, who is told then."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch

from shardwise.config import parse_config
from shardwise.errors import ConfigError
from shardwise.tasks.segmentation.sides import sided_names
from tests.segmentation_task.files import a_volume, folder_task, msd_task, task_of, write_folder, write_msd, write_nifti


@pytest.mark.parametrize(
    "names",
    [
        ["left lung", "right lung"],
        ["kidney_left", "kidney_right"],
        ["LeftKidney", "kidneyRight"],
        ["LEFT-KIDNEY", "RIGHT-KIDNEY"],
        ["rib_left_1", "rib_right_12"],
        ["rib left1", "rib right1"],
        ["leftlung", "rightlung"],
        ["lungleft", "lungright"],
        ["left ventricle"],
        ["Left-Hippocampus"],
        ["leftmost lobe"],
        ["lh", "rh"],
        ["ctx-lh-precuneus", "ctx-rh-precuneus"],
        ["lh_thalamus"],
        ["femur_l", "femur_r"],
        ["L femur", "R femur"],
        ["l.femur", "r.femur"],
        ["kidney_l"],
        ["LKidney", "RKidney"],
        ["Lt lung", "Rt lung"],
        ["L", "R"],
        ["L1", "L2", "L3", "R1", "R2", "R3"],
        ["LV", "RV"],
        ["lv", "rv"],
        ["LUL", "LLL", "RUL", "RLL"],
        ["AmyL", "AmyR"],
        ["rkid", "lkid"],
        ["rene sinistro", "rene destro"],
        ["polmone_sx", "polmone_dx"],
        ["Ren sinister", "ren dexter"],
        ["Linke Niere", "Rechte Niere"],
        ["Niere links", "Niere rechts"],
        ["Niere li.", "Niere re."],
        ["rein gauche", "rein droit"],
        ["rein_g", "rein_d"],
        ["riñón izquierdo", "riñón derecho"],
        ["rim esquerdo", "rim direito"],
        ["vänster njure", "höger njure"],
        ["левая почка", "правая почка"],
        ["左肾", "右肾"],
    ],
    ids=lambda names: ", ".join(names),
)
def test_names_that_tell_a_side_are_found(names: list[str]) -> None:
    assert sided_names(["tumour", *names, "vessel"]) == names


@pytest.mark.parametrize(
    "names",
    [
        ["bright spot", "upright", "outright", "copyright", "wright"],
        ["cleft", "cleft palate", "theft", "leftover", "left-over tissue"],
        ["liver", "spleen", "rib", "rectum", "larynx", "lesion", "rest"],
        ["class_1", "class_2"],
        ["L1", "L2", "L3", "L4", "L5"],
        ["T12", "L1", "S1", "C7"],
        ["vertebra L1", "vertebra T1", "vertebra L2", "vertebra C1"],
        ["spine_C", "spine_T", "spine_L", "spine_S"],
        [f"type_{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"],
        ["grade d", "grade e", "grade f", "grade g"],
        ["lumen", "lobe", "rim", "ring"],
        ["red", "led", "light", "dark"],
        ["anterior", "posterior"],
        ["edema", "enhancing tumour", "necrosis"],
        ["dx", "LH"],
        ["MYO", "LGE", "ROI"],
        ["gland", "dens", "direct"],
        ["", "_", "1"],
    ],
    ids=lambda names: ", ".join(names)[:40],
)
def test_names_that_only_look_like_it_are_let_alone(names: list[str]) -> None:
    assert sided_names(names) == []


SIDED = "data.classes=[background, left lung, right lung]"


def flipped_axes(task: Any, draws: int = 24) -> list[bool]:
    """Along which axes of the tensors a training sample ever comes the other way round."""
    data = task.train_data()
    torch.manual_seed(0)
    straight = data.volumes[0]["image"]
    seen = [False] * 3
    for _ in range(draws):
        (sample,) = data[0]
        for axis in range(3):
            # The centre of brightness, which no other flip moves along this axis.
            centre = _centre(sample["image"], axis)
            seen[axis] |= abs(centre - _centre(straight, axis)) > 1
    return seen


def _centre(image: torch.Tensor, axis: int) -> float:
    weights = image[0].abs().sum(dim=[each for each in range(3) if each != axis])
    return float((weights * torch.arange(len(weights))).sum() / weights.sum())


TURNED = np.array([[0, 0, -1.0, 15], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]])
"""A volume whose third axis goes from right to left."""


@pytest.mark.parametrize("mode", ["resize", "patches"])
@pytest.mark.parametrize("affine", [np.eye(4), TURNED], ids=["straight", "turned"])
def test_left_and_right_are_the_bodys_however_the_file_lies(tmp_path: Path, affine: Any, mode: str) -> None:
    bright = np.zeros((16, 16, 16), np.float32)
    bright[1:4, 1:4, 1:4] = 1
    for part in ("train", "valid"):
        write_nifti(tmp_path / part / part / "img.nii.gz", bright, affine)
        write_nifti(tmp_path / part / part / "label.nii.gz", bright.astype(np.uint8), affine)
    settings = ["data.normalize=none", "data.intensity_shift=0", f"data.spatial_mode={mode}"]
    assert flipped_axes(folder_task(tmp_path, *settings)) == [True, True, True]
    assert flipped_axes(folder_task(tmp_path, SIDED, *settings)) == [False, True, True]
    assert flipped_axes(folder_task(tmp_path, "data.flips=[0, 0, 1]", *settings)) == [False, False, True]
    assert flipped_axes(folder_task(tmp_path, SIDED, "data.flips=0.5", *settings)) == [True, True, True]


def told(task: Any, caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> str:
    caplog.clear()
    with caplog.at_level(logging.INFO, "shardwise"):
        task.prepare_data()
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno == level)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_folder(tmp_path, train=2, valid=1)
    for part, name, seed in (("train", "train-0", 0), ("valid", "valid-0", 100)):
        label = a_volume((16, 16, 16), seed)[1]
        label[0, 0, 0] = 2
        write_nifti(tmp_path / part / name / "label.nii.gz", label)
    return tmp_path


def test_flips_that_are_off_by_default_are_told(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = folder_task(root, SIDED)
    assert told(task, caplog) == ""
    assert told(task, caplog, logging.INFO) == (
        "no flips from left to right: the class(es) left lung, right lung tell one from the other"
    )
    assert task.flips == (0.0, 0.5, 0.5)


@pytest.mark.parametrize("flips", ["0.5", "0.1", "[0.5, 0, 0]"])
def test_flips_by_hand_between_sides_are_warned_of(root: Path, caplog: pytest.LogCaptureFixture, flips: str) -> None:
    assert told(folder_task(root, SIDED, f"data.flips={flips}"), caplog) == (
        "data.flips turns left into right, but the class(es) left lung, right lung tell one from the other: "
        "set data.flips: [0, 0.5, 0.5], left-right first, or leave it out"
    )


@pytest.mark.parametrize("settings", [["data.flips=0"], ["data.flips=[0, 0.5, 0.5]"]])
def test_flips_that_are_off_by_hand_need_no_word(
    root: Path, caplog: pytest.LogCaptureFixture, settings: list[str]
) -> None:
    task = folder_task(root, SIDED, *settings)
    assert told(task, caplog) == "" == told(task, caplog, logging.INFO)


def test_classes_without_sides_are_flipped_everywhere_without_a_word(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = folder_task(root, "data.classes=[background, bright lesion, cyst]", "data.flips=0.5")
    assert told(task, caplog) == "" == told(task, caplog, logging.INFO)
    assert folder_task(root, "data.classes=3").flips == (0.5, 0.5, 0.5)


def test_the_names_of_a_dataset_json_count(tmp_path: Path) -> None:
    assert msd_task(write_msd(tmp_path)).flips == (0.0, 0.5, 0.5), "one of its classes is the left ventricle"
    assert msd_task(tmp_path, "data.classes=[background, ventricle, tumour]").flips == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    "labels",
    [{"0": "background", "1": "left lung", "2": "right lung"}, {"nothing": 0, "left lung": 1, "right lung": 2}],
)
def test_the_names_of_a_dataset_json_count_where_the_config_has_a_number(tmp_path: Path, labels: Any) -> None:
    file = write_msd(tmp_path) / "dataset.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"labels": labels}))
    task = msd_task(tmp_path, "data.classes=3")
    task.prepare_data()
    assert task.flips == (0.0, 0.5, 0.5)


def test_the_name_of_the_background_names_no_side() -> None:
    assert task_of("data.classes=[what is left, lung]").flips == (0.5, 0.5, 0.5)


def test_volumes_that_do_not_say_where_left_is_are_told_where_it_matters(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lost = root / "train" / "train-1"
    image, label = a_volume((16, 16, 16), 1)
    for name, voxels in (("img", image), ("label", label)):
        nibabel.save(nibabel.Nifti1Image(voxels, None), lost / f"{name}.nii.gz")
    assert told(folder_task(root, SIDED), caplog) == (
        "the header of 1 of 3 images does not say which side is left (qform and sform code are 0), but the class(es) "
        f"left lung, right lung depend on it: {lost}/img.nii.gz for example"
    )
    assert told(folder_task(root, "data.classes=3"), caplog) == ""


MIRRORED, TURNED = np.diag([-1.0, 1, 1, 1]), np.diag([-1.0, -1, 1, 1])


@pytest.mark.parametrize("qform", [MIRRORED, TURNED], ids=["mirrored", "turned by half"])
def test_a_header_with_two_opinions_on_left_is_told_where_it_matters(
    root: Path, caplog: pytest.LogCaptureFixture, qform: Any
) -> None:
    file = root / "train" / "train-1" / "img.nii.gz"
    volume = nibabel.Nifti1Image(a_volume((16, 16, 16), 1)[0], np.eye(4))
    volume.set_sform(np.eye(4), 1)
    volume.set_qform(np.diag([1.0, 1, 1, 1]), 1)
    nibabel.save(volume, file)
    assert told(folder_task(root, SIDED), caplog) == ""
    volume.set_qform(qform, 1)
    nibabel.save(volume, file)
    assert told(folder_task(root, SIDED), caplog) == (
        "the header of 1 of 3 images has two opinions on which side is left (qform and sform contradict each other; sform "
        f"holds), and the class(es) left lung, right lung depend on it: {file} for example"
    )
    assert told(folder_task(root, "data.classes=3"), caplog) == ""
    volume.set_qform(qform, 0)
    nibabel.save(volume, file)
    assert told(folder_task(root, SIDED), caplog) == "", "a qform of code 0 is none"


@pytest.mark.parametrize("flips", ["2", "-0.1", "[0.5, 0.5]", "[0.5, 0.5, 1.5]", "left"])
def test_flips_that_are_no_probabilities_are_refused(flips: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(f"task: segmentation\ndata: {{flips: {flips}}}\n", where="my.yaml")
    assert str(caught.value).startswith("my.yaml, line 2: data.flips")
