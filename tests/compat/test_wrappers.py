"""What the functions of `compat/` do, besides having the names that others rely on."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from shardwise.compat import compiler, distributed, modules, tensors


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_parameters_and_buffers_of_a_module_are_its_own_to_read_and_replace() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2, bias=False))
    assert modules.parameters_of(model) == {}
    assert modules.parameters_of(model[0]) == {"weight": model[0].weight, "bias": None}
    modules.parameters_of(model[0])["weight"] = nn.Parameter(torch.ones(2, 2))
    assert model[0].weight.sum() == 4
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert set(modules.buffers_of(norm)) == {"running_mean", "running_var", "num_batches_tracked", "scratch"}
    assert modules.temporary_buffers_of(norm) == {"scratch"}
    modules.temporary_buffers_of(norm).add("running_mean")
    assert "running_mean" not in norm.state_dict()
    assert set(modules.REGISTERS) <= set(vars(norm))


def test_norms_and_convolutions_of_any_number_of_dimensions_have_one_base() -> None:
    assert all(issubclass(norm, modules.BatchNorm) for norm in (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm))
    assert all(issubclass(conv, modules.ConvNd) for conv in (nn.Conv1d, nn.Conv3d, nn.ConvTranspose2d))


def test_a_fused_optimizer_looks_at_inf_by_itself() -> None:
    weights = [nn.Parameter(torch.ones(1))]
    assert modules.updates_unless_inf(torch.optim.AdamW(weights, fused=True))
    assert not modules.updates_unless_inf(torch.optim.AdamW(weights))


def test_a_recomputed_block_is_found_again_and_so_are_its_names() -> None:
    block = nn.Linear(2, 2)
    wrapper = distributed.checkpoint_wrapper(block, checkpoint_impl=distributed.CheckpointImpl.NO_REENTRANT)
    assert isinstance(wrapper, distributed.CheckpointWrapper) and distributed.wrapped_block(wrapper) is block
    names = [name for name, _ in nn.Sequential(wrapper).named_parameters()]
    assert [distributed.name_without_wrapper(name) for name in names] == ["0.weight", "0.bias"] != names


def test_a_compiled_modules_names_are_found_again() -> None:
    layer: Any = torch.compile(nn.Linear(2, 2))
    names = [name for name, _ in nn.Sequential(layer).named_parameters()]
    assert [compiler.name_without_compiled(name) for name in names] == ["0.weight", "0.bias"] != names


def test_what_does_not_compile_raises_what_is_waited_for() -> None:
    def broken(graph: object, inputs: object) -> None:
        raise RuntimeError("no kernel for this")

    before = compiler.compiled_frames()
    with pytest.raises(compiler.compile_errors()):
        torch.compile(lambda x: x + 1, backend=broken)(torch.ones(1))
    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(1))
    assert compiler.compiled_frames() > before


def test_a_limit_of_recompilations_is_only_raised() -> None:
    limit = partial(getattr, torch._dynamo.config, "recompile_limit")
    with torch._dynamo.config.patch(recompile_limit=8):
        compiler.allow_recompiles(4)
        assert limit() == 8
        compiler.allow_recompiles(16)
        assert limit() == 16


def test_groups_of_a_mesh(alone: None) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    group = mesh.get_group("shard")
    with warnings.catch_warnings(action="error"):  # that the name it uses will go
        distributed.set_group_timeout(group, timedelta(seconds=7))
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
    assert dist.get_process_group_ranks(distributed.flat_group(mesh)) == [0]


def test_a_released_ddp_holds_the_group_no_more(alone: None) -> None:
    model: Any = DistributedDataParallel(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    distributed.release_ddp(model)
    assert model.reducer is None and model.logger is None


def test_a_style_splits_the_module_that_it_stands_for(alone: None) -> None:
    class Doubled(distributed.TensorStyle):
        def split(self, module: nn.Module, mesh: object) -> nn.Module:
            with torch.no_grad():
                weight = modules.parameters_of(module)["weight"]
                assert weight is not None
                weight.mul_(2)
            return module

    model: Any = nn.Sequential(nn.Linear(2, 2))
    before = model[0].weight.detach().clone()
    parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": Doubled()})
    assert torch.equal(model[0].weight, 2 * before)


def test_many_tensors_at_once() -> None:
    numbers = [torch.tensor([3.0, 4.0]), torch.tensor([1.0])]
    assert torch.stack(list(tensors.foreach_norm(numbers, 2))).tolist() == [5, 1]
    tensors.foreach_mul_(numbers, 2)
    tensors.foreach_add_(numbers, [torch.ones(2), torch.ones(1)])
    narrow = [each.bfloat16() for each in numbers]
    tensors.foreach_copy_(narrow, [10 * each for each in numbers])
    assert [each.tolist() for each in narrow] == [[70, 90], [30]]


def test_attention_is_known_by_its_operations() -> None:
    from torch.nn.attention import varlen  # noqa: F401  it registers the operation

    assert len({*tensors.ATTENTION_OPERATIONS, *tensors.varlen_operations()}) == 5
