"""A language model's head that gives the loss instead of the logits, while the rest of the model stays as it is.

Sharding, replicas and checkpoints wrap a whole model, so the loss must come out of a call of the whole model: its head is
told the targets beforehand, and answers with their summed loss where it would have answered with logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from shardwise.compat.distributed import TensorStyle
from shardwise.compat.modules import parameters_of
from shardwise.kernels.cross_entropy import linear_cross_entropy
from shardwise.kernels.meta_probe import without_values
from shardwise.kernels.types import computing_type


class LossHead(nn.Linear):
    targets: Tensor | None = None
    compiled = False
    """Whether the kernel of the loss is compiled. It is, too, where whoever made the model compiles it as a whole."""

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(self.weight, DTensor):
            return self._with_a_part_of_the_words(input, self.weight)
        if self.targets is None:
            return super().forward(input)
        if computing_type(input) == torch.float16:
            # Its gradients must be scaled before they are narrowed: that is possible on the way back only.
            logits = super().forward(input).float()
            return F.cross_entropy(logits.flatten(0, -2), self.targets.flatten(), reduction="sum")
        compiled = self.compiled or torch.compiler.is_compiling()
        return linear_cross_entropy(input, self.weight, self.targets, self.bias, compiled=compiled)

    def _with_a_part_of_the_words(self, input: Tensor, weight: DTensor) -> Tensor:
        """The ranks of a group have equal parts of the vocabulary. The loss is made of theirs; logits are brought together."""
        if self.targets is not None:
            group = weight.device_mesh.get_group()
            return linear_cross_entropy(input, weight.to_local(), self.targets, group=group)
        whole = DTensor.from_local(input, weight.device_mesh, [Replicate()])
        logits = F.linear(whole, weight)
        assert isinstance(logits, DTensor)
        return logits.full_tensor()

    @contextmanager
    def summing_up(self, targets: Tensor) -> Iterator[None]:
        """Within it, an answer is the sum of the cross entropies of these targets; those of -100 are left out."""
        self.targets = targets
        try:
            yield
        finally:
            self.targets = None


class VocabParallel(TensorStyle):
    """How ranks share a LossHead: each has as many words of the vocabulary as the others."""

    def split(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, LossHead)
        part = distribute_tensor(module.weight, mesh, [Shard(0)], src_data_rank=None)
        module.weight = nn.Parameter(part, module.weight.requires_grad)
        return module


def words_apart(model: Any, ranks: int) -> dict[str, TensorStyle]:
    """For a tensor plan: the head by its name, where it can be shared: it is no embedding too, and its words divide."""
    head = model.get_output_embeddings()
    if not isinstance(head, LossHead) or parameters_of(head)["bias"] is not None or head.out_features % ranks:
        return {}
    if head.weight is model.get_input_embeddings().weight:
        return {}
    return {next(name for name, module in model.named_modules() if module is head): VocabParallel()}


def use_loss_head(model: Any) -> bool:
    """Puts it in the place of a Transformers model's head, with the same weights and name. False: it stays as it is, because
    it is no plain matrix, or the model does something with the logits afterwards."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or not _gives_logits_as_they_are(model, head):
        return False
    head.__class__ = LossHead
    return True


def summed_loss(model: Any, targets: Tensor, **inputs: Any) -> Tensor:
    """Of a Transformers causal language model, wrapped or not: the sum of the cross entropies; targets of -100 are left out."""
    head = getattr(model, "module", model).get_output_embeddings()
    if not isinstance(head, LossHead):
        logits = model(**inputs).logits
        return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="sum")
    with head.summing_up(targets):
        answer: Tensor = model(**inputs).logits
    return answer


def _gives_logits_as_they_are(model: Any, head: nn.Linear) -> bool:
    """Looked at on the meta device: whether what comes out of the model is the very tensor that came out of the head."""
    seen: list[Tensor] = []
    on_meta = {name: tensor.to("meta") for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    listening = head.register_forward_hook(lambda module, given, answer: seen.append(answer))
    try:
        with without_values(model.config), torch.device("meta"):
            row = torch.zeros(1, 2, dtype=torch.long)
            logits = torch.func.functional_call(model, on_meta, kwargs={"input_ids": row}).logits
    except Exception:  # anybody's code, run on tensors without values
        return False
    finally:
        listening.remove()
    return len(seen) == 1 and logits is seen[0]
