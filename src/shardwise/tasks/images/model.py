"""The classifier: by hub name, from a folder, or from sizes."""

from __future__ import annotations

import difflib
import logging
from typing import Any

import torch
from torch import nn

from shardwise.errors import ConfigError, DataError
from shardwise.tasks.images.config import ImagesModel

log = logging.getLogger(__name__)

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet18": ("resnet", {"layer_type": "basic", "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512]}),
    "resnet34": ("resnet", {"layer_type": "basic", "depths": [3, 4, 6, 3], "hidden_sizes": [64, 128, 256, 512]}),
    "resnet50": ("resnet", {"depths": [3, 4, 6, 3]}),
    "resnet101": ("resnet", {"depths": [3, 4, 23, 3]}),
    "resnet152": ("resnet", {"depths": [3, 8, 36, 3]}),
    "vit-ti16": ("vit", {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}),
    "vit-s16": ("vit", {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}),
    "vit-b16": ("vit", {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}),
    "vit-l16": (
        "vit",
        {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "num_hidden_layers": 24},
    ),
}
_FIELDS = {
    "depths": "depths",
    "widths": "hidden_sizes",
    "hidden_dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_dim": "intermediate_size",
    "patch_size": "patch_size",
}
"""Our keys, and what Hugging Face's configs call them."""
_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "hidden_dropout", "dropout")


def build_classifier(options: ImagesModel, classes: list[str], image_size: int) -> nn.Module:
    from transformers import AutoModelForImageClassification

    config = _config(options, classes, image_size)
    # On the meta device only the shape is wanted; the weights come from the one rank that loads them.
    if options.name is None or torch.get_default_device().type == "meta":
        try:
            return AutoModelForImageClassification.from_config(config, dtype=torch.float32)
        except Exception as error:  # each architecture has its own
            raise _refused(config.model_type, error) from error
    try:
        model, loading = AutoModelForImageClassification.from_pretrained(
            options.name,
            config=config,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except OSError as error:
        raise _cannot_load(options.name, error) from error
    _say_what_is_new(options.name, loading, len(classes))
    return model


def pretrained_look(options: ImagesModel) -> dict[str, Any]:
    """What the named model was trained to see: `image_size`, `image_mean` and `image_std`, as far as its files say."""
    if options.name is None:
        return {}
    from transformers.image_processing_base import ImageProcessingMixin

    look: dict[str, Any] = {}
    try:
        processor, _ = ImageProcessingMixin.get_image_processor_dict(options.name)
        look = {key: processor[key] for key in ("image_mean", "image_std") if processor.get(key)}
        sides = processor.get("crop_size") or processor.get("size")
        side = sides if isinstance(sides, int) else (sides or {}).get("height") or (sides or {}).get("shortest_edge")
        if side:
            look["image_size"] = side
    except OSError:  # a model without a preprocessor_config.json
        pass
    # Position embeddings fix the size, whatever the processor says.
    fixed = getattr(_pretrained_config(options.name), "image_size", None)
    return look | ({"image_size": fixed} if isinstance(fixed, int) else {})


def _config(options: ImagesModel, classes: list[str], image_size: int) -> Any:
    labels = {"id2label": dict(enumerate(classes)), "label2id": {name: number for number, name in enumerate(classes)}}
    if options.name is None:
        return _config_from_sizes(options, image_size, labels)
    config = _pretrained_config(options.name)
    fixed = getattr(config, "image_size", None)
    if isinstance(fixed, int) and fixed != image_size:
        raise ConfigError(
            f"data.image_size: {image_size}, but model.name: {options.name} takes images of {fixed}: leave image_size out"
        )
    config.id2label, config.label2id = labels["id2label"], labels["label2id"]
    return config


def _pretrained_config(name: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise _cannot_load(name, error) from error


def _config_from_sizes(options: ImagesModel, image_size: int, labels: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

    kind, sizes = PRESETS.get(options.architecture, (options.architecture, {}))
    if kind not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        near = difflib.get_close_matches(kind, [*PRESETS, *MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES], 1)
        raise ConfigError(
            f"model.architecture: {kind!r} is neither one of {', '.join(PRESETS)} nor a Hugging Face model type for image "
            f"classification{f'. Nearest: {near[0]}' if near else ''}"
        )
    defaults = CONFIG_MAPPING[kind]()
    _refuse_unknown_fields(options, kind, defaults)
    sizes = {**sizes, **_chosen_sizes(options, kind, defaults), **_dropouts(options, kind, defaults)}
    if hasattr(defaults, "image_size"):
        sizes["image_size"] = image_size
    classes = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES[kind]
    if not isinstance(classes, str):  # deit, levit and perceiver have several: the first is the plain one
        sizes["architectures"] = [classes[0]]
    try:
        config = AutoConfig.for_model(kind, **{**sizes, **options.extra, **labels})
    except Exception as error:  # the strict types of huggingface_hub have no common base with the rest
        raise _refused(kind, error) from error
    _refuse_sizes_that_do_not_fit(config)
    return config


def _refuse_unknown_fields(options: ImagesModel, kind: str, defaults: Any) -> None:
    """Transformers takes any name without a word."""
    for key in options.extra:
        if not hasattr(defaults, key):
            near = difflib.get_close_matches(key, list(defaults.to_dict()), 1)
            raise ConfigError(
                f"model.extra: the Hugging Face config of {kind} has no field {key!r}"
                f"{f'. Nearest: {near[0]}' if near else ''}"
            )


def _chosen_sizes(options: ImagesModel, kind: str, defaults: Any) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for key, field in _FIELDS.items():
        value = getattr(options, key)
        if value is None:
            continue
        if not hasattr(defaults, field):
            raise ConfigError(
                f"model.{key}: {kind} has no such size; model.extra sets fields of its Hugging Face config"
            )
        chosen[field] = value
    if options.hidden_dim and options.intermediate_dim is None and hasattr(defaults, "intermediate_size"):
        chosen["intermediate_size"] = 4 * options.hidden_dim
    return chosen


def _dropouts(options: ImagesModel, kind: str, defaults: Any) -> dict[str, float]:
    """Every dropout that the architecture has; 0 switches off the ones that are on by default."""
    names = [name for name in _DROPOUTS if hasattr(defaults, name)]
    if options.dropout and not names:
        raise ConfigError(f"model.dropout: {kind} has no dropout: leave it out")
    return dict.fromkeys(names, options.dropout)


def _refuse_sizes_that_do_not_fit(config: Any) -> None:
    """Transformers 5 builds these, and fails, or computes something else, in the first forward pass."""
    width, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    if isinstance(width, int) and isinstance(heads, int) and width % heads:
        raise ConfigError(f"model.num_heads: {heads} must divide the width {width}")
    depths, widths = getattr(config, "depths", None), getattr(config, "hidden_sizes", None)
    if isinstance(depths, list) and isinstance(widths, list) and len(depths) != len(widths):
        raise ConfigError(f"model.depths has {len(depths)} stages, but the widths are {widths}: give depths and widths")
    size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if isinstance(size, int) and isinstance(patch, int) and size % patch:
        raise ConfigError(
            f"data.image_size: {size} is not a multiple of the model's patch size {patch}: "
            f"set data.image_size to {max(1, round(size / patch)) * patch}, or model.patch_size"
        )


def _refused(kind: str, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split())  # some span several lines
    return ConfigError(f"model: {kind} cannot be built with these sizes: {type(error).__name__}: {reason}")


def _say_what_is_new(name: str, loading: Any, num_classes: int) -> None:
    mismatched = [key if isinstance(key, str) else key[0] for key in loading["mismatched_keys"]]
    if made_anew := sorted({*loading["missing_keys"], *mismatched}):
        log.info(
            f"{name} brings no weights of these shapes, so they start anew, for {num_classes} classes: {', '.join(made_anew)}"
        )


def _cannot_load(name: str, error: Exception) -> DataError:
    reason = str(error).splitlines()[0]
    return DataError(f"model.name: {name!r} is not a folder with a model here, and the hub did not give it: {reason}")
