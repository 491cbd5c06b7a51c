"""Small stand-ins for what a hub would give: a model folder with its tokenizer, made on the spot."""

from __future__ import annotations

from pathlib import Path

from shardwise.tasks.chess.games import random_game


def write_model(folder: Path, *, games: int = 40) -> Path:
    """A tiny Llama and a byte-level BPE tokenizer trained on games, saved as Hugging Face saves them."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    texts = [random_game(7, index, 20) for index in range(games)]
    bpe = ByteLevelBPETokenizer(add_prefix_space=False)
    bpe.train_from_iterator(texts, vocab_size=400, special_tokens=["<s>", "</s>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token="<s>", eos_token="</s>")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
