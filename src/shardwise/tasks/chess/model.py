"""The language model: by hub name, from a folder, or from sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from shardwise.errors import ConfigError, DataError, MissingExtra
from shardwise.kernels.attention import NAME, Look, look_at_attention, register_attention
from shardwise.kernels.backend import Shape
from shardwise.tasks.chess.config import ChessModel
from shardwise.tasks.chess.tokens import GameTokenizer


def build_language_model(
    options: ChessModel, tokenizer: GameTokenizer, max_seq_len: int, *, our_attention: bool
) -> nn.Module:
    """`our_attention`: that of kernels/attention.py takes the place of Transformers' own."""
    auto = _auto_model()
    config = _config(options, tokenizer, max_seq_len)
    settings: dict[str, Any] = {"dtype": torch.float32}
    if our_attention:
        register_attention()
        settings["attn_implementation"] = NAME
    # On the meta device only the shape is wanted; the weights come from the one rank that loads them.
    if options.name is None or torch.get_default_device().type == "meta":
        return auto.from_config(config, **settings)
    try:
        return auto.from_pretrained(options.name, config=config, **settings)
    except OSError as error:
        raise _cannot_load(options.name, error) from error


def look_at_language_model(options: ChessModel, tokenizer: GameTokenizer, max_seq_len: int) -> Look:
    """Whether its attention may be ours, and whether games may be packed: learnt from its shape, without its weights."""
    auto, config = _auto_model(), _config(options, tokenizer, max_seq_len)
    with torch.device("meta"):
        return look_at_attention(auto.from_config(config, dtype=torch.bfloat16), max_seq_len)


def attention_shape(config: Any, batch: int, length: int, dtype: torch.dtype) -> Shape:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Shape(batch, heads, kv_heads, length, head_dim, dtype)


def split_language_model(model: Any, ranks: int, *, sequence_parallel: bool) -> dict[str, ParallelStyle] | None:
    """How ranks share the matrices of every layer, as the architecture itself says (Transformers' `base_model_tp_plan`);
    None where it does not."""
    known = {"colwise", "rowwise"}
    said: dict[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    if not said or set(said.values()) - known:
        return None
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(model.config, key, None) or ranks
        if heads % ranks:
            raise ConfigError(
                f"strategy tensor on {ranks} ranks: the model's {key}: {heads} must be a multiple of {ranks}"
            )
    base = f"{model.base_model_prefix}."
    if not sequence_parallel:
        styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
        return {base + name: styles[style]() for name, style in said.items()}
    first = model.get_submodule(base + "layers.0")
    if not all(hasattr(first, name) for name in ("input_layernorm", "post_attention_layernorm", "self_attn")):
        raise ConfigError(
            f"training.tensor.sequence_parallel is known for models built as llama is, not for {model.config.model_type}; "
            "set it to false"
        )
    return _along_the_sequence(base, said)


def _along_the_sequence(base: str, said: dict[str, str]) -> dict[str, ParallelStyle]:
    """Between attention and MLP, every rank has its part of the sequence. Attention sees all of it."""
    plan: dict[str, ParallelStyle] = {
        base + "layers.0": PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
        ),
        base + "layers.*.input_layernorm": SequenceParallel(use_local_output=True),
        base + "layers.*.post_attention_layernorm": SequenceParallel(use_local_output=True),
        base + "layers.*.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
            use_local_output=True,
        ),
        base + "norm": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
        ),
    }
    for name, style in said.items():
        if style == "rowwise":
            plan[base + name] = RowwiseParallel(output_layouts=Shard(1))
        else:
            plan[base + name] = ColwiseParallel(input_layouts=Replicate() if "self_attn" in name else Shard(1))
    return plan


def _auto_model() -> Any:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise MissingExtra.of("transformers", "lm", "task: chess") from None
    return AutoModelForCausalLM


def _config(options: ChessModel, tokenizer: GameTokenizer, max_seq_len: int) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if options.name is not None:
        try:
            config = AutoConfig.from_pretrained(options.name)
        except (OSError, ValueError) as error:
            raise _cannot_load(options.name, error) from error
        if tokenizer.size > config.vocab_size:
            raise ConfigError(
                f"the tokenizer has {tokenizer.size} tokens, but model.name: {options.name} only knows {config.vocab_size}: "
                "use the tokenizer that comes with the model"
            )
        return _for_training(config)
    if options.architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            f"model.architecture: {options.architecture!r} is not a Hugging Face model type for causal language models; "
            "for example llama, gpt2, qwen2, mistral"
        )
    sizes: dict[str, Any] = {
        "vocab_size": tokenizer.size,
        "pad_token_id": tokenizer.pad_id,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "hidden_size": options.hidden_dim,
        "num_hidden_layers": options.num_layers,
        "num_attention_heads": options.num_heads,
        "num_key_value_heads": options.num_heads,
        "intermediate_size": options.intermediate_dim or 4 * options.hidden_dim,
        "max_position_embeddings": max_seq_len,
        "tie_word_embeddings": options.tie_embeddings,
        **_dropouts(CONFIG_MAPPING[options.architecture](), options.dropout),
        **options.extra,
    }
    if options.architecture == "gpt2":  # the one that calls the width of its MLP otherwise
        sizes["n_inner"] = sizes.pop("intermediate_size")
    return _for_training(AutoConfig.for_model(options.architecture, **sizes))


def _for_training(config: Any) -> Any:
    config.use_cache = False
    if hasattr(config, "is_decoder"):
        config.is_decoder = True  # BERT and its kin would otherwise see the tokens they are to predict
    return config


def _dropouts(defaults: Any, rate: float) -> dict[str, float]:
    """Every dropout that the architecture has; 0 switches off the ones that are on by default."""
    ends = ("dropout", "_pdrop", "_dropout_prob")
    return {
        name: rate for name, value in vars(defaults).items() if name.endswith(ends) and isinstance(value, int | float)
    }


def _cannot_load(name: str, error: Exception) -> DataError:
    reason = str(error).splitlines()[0]
    return DataError(f"model.name: {name!r} is not a folder with a model here, and the hub did not give it: {reason}")
