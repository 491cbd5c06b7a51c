"""Keys and tokens in the arguments of a program: they must not be written down with them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

HIDDEN = "***"
_SECRET = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSPHRASE|CREDENTIALS?)(_ID)?$")
"""Names of environment variables: WANDB_API_KEY, AWS_ACCESS_KEY_ID, AWS_SESSION_TOKEN, HF_TOKEN."""
_GIVEN = re.compile(r"(api_?key|access_key|secret_key|auth_token|hf_token|secret|password)$", re.IGNORECASE)
"""Names before a `=`. A `mask_token` is none."""
LEAST = 6
"""Characters: what is shorter is no secret, and would be found in words that have nothing to do with it."""


def is_secret(name: str) -> bool:
    """Whether the value of a key or variable of this name is one."""
    return bool(_SECRET.search(name) or _GIVEN.search(name))


def without_secrets(words: Sequence[str], environ: Mapping[str, str] | None = None) -> list[str]:
    """The same words, with the values of secrets of the environment, and those given by name, hidden."""
    named = (os.environ if environ is None else environ).items()
    values = sorted({value for name, value in named if _SECRET.search(name) and len(value) >= LEAST}, key=len)
    return [_hidden(word, values[::-1]) for word in words]


def _hidden(word: str, values: Sequence[str]) -> str:
    for value in values:  # the longest first: one may be a part of another
        word = word.replace(value, HIDDEN)
    name, _, value = word.partition("=")
    return f"{name}={HIDDEN}" if value and is_secret(name) else word
