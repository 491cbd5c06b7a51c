"""`task: images`: image classification with any Hugging Face model for it."""

from shardwise.errors import MissingExtra

try:
    import PIL as _PIL  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise MissingExtra.of("pillow" if error.name == "PIL" else "transformers", "images", "task: images") from None

from shardwise.tasks.images.task import ImagesTask

__all__ = ["ImagesTask"]
