"""`task: images`: image classification with any Hugging Face model for it."""

from importlib.util import find_spec

from shardwise.errors import MissingExtra

# Looked for and not imported: Transformers takes seconds, and the process that only starts the ranks has no use for it.
if _missing := [name for name in ("PIL", "transformers") if find_spec(name) is None]:
    raise MissingExtra.of("pillow" if _missing[0] == "PIL" else _missing[0], "images", "task: images")

from shardwise.tasks.images.task import ImagesTask

__all__ = ["ImagesTask"]
