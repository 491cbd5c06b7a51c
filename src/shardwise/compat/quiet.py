"""PyTorch's warnings on which nobody can act who trains with shardwise: what it says to itself, or of what is done on purpose.

Each is named by its category and its words, or by the part of PyTorch that is warned. Whatever else PyTorch warns of is seen,
and so are all warnings about a user's code. Filters of the user's own (`-W`, PYTHONWARNINGS, `warnings`) count before these.
"""

from __future__ import annotations

import logging
import re
import warnings
from dataclasses import dataclass


@dataclass(frozen=True)
class Unactionable:
    category: type[Warning]
    message: str = ""
    """How it begins: a regular expression."""
    module: str = ""
    """The module that is warned, not the one that warns: a regular expression. A warning from C++ is to whatever code of Python
    is running, so of those the message is named."""


WARNINGS = (
    # Deprecations of what PyTorch itself calls. Whoever calls it from elsewhere is warned as another module.
    Unactionable(
        FutureWarning,
        module=r"torch\.(distributed|_inductor|_dynamo|_functorch|_export|export|fx|utils\._pytree)(\.|$)",
    ),
    # Which kernels of attention there are is tried out, and attention falls back by itself. In 2.11 and 2.13.
    Unactionable(UserWarning, r"[\w ]+ (attention )?kernel not used because:"),
    # A rank says its device to its mesh; a barrier asks again. In 2.11 and 2.13.
    Unactionable(UserWarning, r"barrier\(\): using the device under current context"),
    # A gradient is laid out by the kernel that computes it. In 2.11 and 2.13.
    Unactionable(UserWarning, r"Grad strides do not match bucket view strides"),
    # Steps are recorded on a stream of their own. In 2.11 and 2.13.
    Unactionable(UserWarning, r"The AccumulateGrad node's stream does not match"),
    # The backward pass has a thread of its own, which comes to its device by this. In 2.11.
    Unactionable(UserWarning, r"Attempting to run cuBLAS, but there was no current CUDA context"),
    # What the compiler chose for one kernel. In 2.11 and 2.13.
    Unactionable(UserWarning, r"\s*Online softmax is disabled on the fly"),
    # A model of ours, on whose result nothing is done in place. Of a user's own model it is seen. In 2.13.
    Unactionable(UserWarning, r"FSDP2-wrapped module \(FSDPCellEncoder\) returned a view tensor"),
    # A checkpoint of one process, which needs no group. In 2.11 and 2.13.
    Unactionable(UserWarning, r"torch\.distributed is (disabled, )?unavailable or uninitialized"),
)

LOGGERS = ("torch.distributed.tensor._redistribute",)
"""It tells of every collective over two axes of a mesh, which norms and checkpoints need. Seen on 2.11, 2.13, 2.15."""


def quiet_pytorch() -> None:
    """In this process, from now on. To call it again changes nothing."""
    for each in WARNINGS:
        # Last, so that any filter of the user's own decides before it. What no filter knows would be shown.
        if not _is_there(each):
            warnings.filterwarnings("ignore", each.message, each.category, each.module, append=True)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def _is_there(wanted: Unactionable) -> bool:
    def pattern(found: re.Pattern[str] | str | None) -> str:
        return found.pattern if isinstance(found, re.Pattern) else found or ""

    return any(
        (action, category, pattern(message), pattern(module))
        == ("ignore", wanted.category, wanted.message, wanted.module)
        for action, message, category, module, _ in warnings.filters
    )
