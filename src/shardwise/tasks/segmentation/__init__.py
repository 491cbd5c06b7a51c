"""`task: segmentation`: masks of 3D medical images, with any network of MONAI."""

from importlib.util import find_spec

from shardwise.errors import MissingExtra

# Looked for and not imported: MONAI takes seconds, and the process that only starts the ranks has no use for it.
if _missing := [name for name in ("monai", "nibabel", "einops", "matplotlib") if find_spec(name) is None]:
    raise MissingExtra.of(_missing[0], "medical", "task: segmentation")

from shardwise.tasks.segmentation.task import SegmentationTask

__all__ = ["SegmentationTask"]
