"""What is in a checkpoint, and how it gets out of and back into a model that may be spread otherwise."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shardwise.checkpoint.index import INDEX
from shardwise.checkpoint.inspect import condition_of_checkpoint
from shardwise.checkpoint.store import CheckpointStore, NewerCheckpoint
from shardwise.checkpoint.tensors import (
    Agreed,
    SafeLoadPlanner,
    SafetensorsReader,
    StagingBuffer,
    write_files,
    write_index,
)
from shardwise.compat.distributed import name_without_wrapper
from shardwise.compat.quiet import quiet_pytorch
from shardwise.config.commands import to_start_anew
from shardwise.data.manifest import Condition, FileEntry
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.parallel import World

log = logging.getLogger(__name__)

OnPhase = Callable[[Literal["write", "flush", "commit"]], None]
"""Called as each phase begins: files are written, each is flushed, rank 0 makes the checkpoint visible."""


def stage_from(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    stage: StagingBuffer,
    own: dict[str, torch.Tensor] | None = None,
) -> None:
    """Copy what this rank has to write. All ranks agree who writes what; training may go on when this returns, up to the
    next change of weights.

    `own`: tensors of this rank alone, which only the same rank of as many can use again.
    """
    weights = {f"model.{name_without_wrapper(name)}" for name, _ in model.named_parameters(remove_duplicate=False)}
    stage.changed_by_update = lambda name: name in weights or name.startswith("optimizer.")
    state = _tensors(model, optimizer) | ({_own(world): own} if own else {})
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=world.is_first)
    asked = planner.create_local_plan().items
    # Who writes what stays the same from one checkpoint to the next, unless somebody has other tensors than before.
    if stage.agreed is not None and not world.sum(asked != stage.agreed.asked)[0]:
        stage.write_data(stage.agreed.given, planner)
        return
    try:
        save(state, storage_writer=stage, planner=planner, no_dist=not world.connected)
        stage.agreed = Agreed(asked, planner.plan)
    except CheckpointException as error:
        raise CheckpointError(f"the model's state cannot be kept in a checkpoint: {_first_cause(error)}") from error


def write_staged(
    stage: StagingBuffer,
    step: int,
    about: dict[str, Any],
    store: CheckpointStore,
    world: World,
    on_phase: OnPhase = lambda phase: None,
) -> Path:
    """All ranks write their files aside, rank 0 puts the manifest beside them and renames the folder into place. `about`: what
    else is to be remembered, as JSON knows it."""
    aside = Path(_on_first(world, "prepare the checkpoint folder", lambda: str(store.begin(step))))
    files: dict[str, FileEntry] = {}
    problem = ""
    stage.finish_copies()
    try:
        on_phase("write")
        files = write_files(aside, stage.files, lambda: on_phase("flush"))
        if stage.index is not None:
            files[INDEX] = write_index(aside, stage.index)
    except Exception as error:  # the other ranks wait below, whatever it is
        problem = f"rank {world.rank}: {error if isinstance(error, OSError) else repr(error)}"
    everyone = world.gather(({name: asdict(entry) for name, entry in files.items()}, problem))
    if problems := [problem for _, problem in everyone if problem]:
        _on_first(world, "remove an unfinished checkpoint", lambda: store.discard(step))
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {store.folder}: {'; '.join(problems)}"
        )
    every_file = {name: FileEntry(**entry) for part, _ in everyone for name, entry in part.items()}

    def commit() -> str:
        on_phase("commit")
        return str(store.commit(step, every_file, about))

    return Path(_on_first(world, "commit the checkpoint", commit))


def load_into(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    which: str,
    store: CheckpointStore,
    world: World,
    check: Callable[[Path], None] = lambda path: None,
) -> Path | None:
    """Load `auto`, `latest` or a path. Returns which it was; None: there is none. `check`: raises if it must not be that one."""
    path = _choose(which, store, world)
    if path is None:
        return None
    check(path)
    state = _tensors(model, optimizer)
    _load(state, path, world)
    mine = local_part(optimizer)
    # The file's settings count, not the checkpoint's: a changed weight decay must not be undone silently.
    groups = get_optimizer_state_dict(model, mine)["param_groups"]
    set_state_dict(
        model,
        mine,
        model_state_dict=state["model"],
        optim_state_dict={"state": state["optimizer"], "param_groups": groups},
    )
    return path


def load_rank_local(path: Path, world: World) -> dict[str, torch.Tensor] | None:
    """The tensors of this rank alone, if the checkpoint was made by as many ranks and has some."""
    prefix = f"{_own(world)}."
    known = SafetensorsReader(path).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in known.items()
        if name.startswith(prefix) and isinstance(about, TensorStorageMetadata)
    }
    if not all(world.gather(bool(state))):
        return None
    _load(state, path, world)
    return {name.removeprefix(prefix): tensor.to(world.device) for name, tensor in state.items()}


def _own(world: World) -> str:
    return f"rank {world.rank} of {world.size}"


def local_part(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer of the parameters that this rank updates: under zero1 some of them, else all."""
    # Its module compiles eight optimizers when it is imported (half a second, torch 2.13): where nobody has, there is none.
    zero = sys.modules.get("torch.distributed.optim")
    return optimizer.optim if zero and isinstance(optimizer, zero.ZeroRedundancyOptimizer) else optimizer


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Weights and moments by name. A rank may have only some of them: those of its stage, or those it updates."""
    try:
        weights, moments = get_state_dict(model, local_part(optimizer))
    except KeyError:  # a parameter that one of the two does not know
        check_optimizer(model, optimizer)
        raise
    return {"model": weights, "optimizer": moments["state"]}


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """That it has the parameters of the model which are trained, and no others."""
    named = dict(model.named_parameters())
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    missing = [name_without_wrapper(name) for name, each in named.items() if each.requires_grad and each not in held]
    if missing:
        raise ShardwiseError(
            f"the optimizer lacks {len(missing)} parameter(s) of the model: {_some(missing)}. They would be neither trained nor "
            "kept in checkpoints. Its groups must have every parameter that requires a gradient; freeze what is not to be "
            "trained in build_model: requires_grad_(False)"
        )
    if others := [str(list(each.shape)) for each in held.difference(named.values())]:
        raise ShardwiseError(
            f"the optimizer has {len(others)} parameter(s) that the model does not have, of shape {_some(others)}. No checkpoint "
            "would keep them. Register them in the model that build_model returns"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:16]) + (f" and {len(names) - 16} more" if len(names) > 16 else "")


def go_on_from(step: int, store: CheckpointStore, world: World) -> None:
    """Set aside the checkpoints of later steps: they will be made anew, and must not be resumed by mistake."""

    def set_aside() -> None:
        store.supersede_after(step)
        store.hold()

    _on_first(world, "set old checkpoints aside", set_aside)


def begin_anew(store: CheckpointStore, world: World, *, asked: bool) -> None:
    """Set aside all checkpoints: they are of a run before this one. `asked`: by the user, in so many words. Otherwise those of a
    newer version are not touched, and the run does not begin."""

    def set_aside() -> None:
        if not asked:
            try:
                store.refuse_newer()
            except NewerCheckpoint as error:
                raise NewerCheckpoint(f"{error}\n  {to_start_anew(store.folder)}") from None
        store.supersede_all()
        store.hold()

    _on_first(world, "set old checkpoints aside", set_aside)


def load_model(model: nn.Module, path: Path) -> None:
    """Load the weights alone into a whole model in this process, whatever strategy wrote them."""
    state = {"model": model.state_dict()}
    _load(state, path, World.alone())
    model.load_state_dict(state["model"])


def _choose(which: str, store: CheckpointStore, world: World) -> Path | None:
    """Rank 0 lists what there is; all ranks check the files, each a part of them."""

    def check(folder: Path) -> Condition:
        mine = condition_of_checkpoint(folder, part=(world.rank, world.size))
        damage, unreadable, newer = zip(*world.gather((mine.damage, mine.unreadable, mine.newer)), strict=True)
        return Condition(_each_once(damage), _each_once(unreadable), max(newer))

    try:
        path, complaints = _look_for(which, store, world, check)
    except NewerCheckpoint as error:
        raise NewerCheckpoint(f"{error}\n  {to_start_anew(store.folder)}") from None
    for complaint in complaints:
        if world.is_first:
            log.warning(complaint)
    if path is None and which == "latest":
        raise CheckpointError(f"--resume latest: there is no whole checkpoint in {store.folder}")
    return path


def _look_for(
    which: str, store: CheckpointStore, world: World, check: Callable[[Path], Condition]
) -> tuple[Path | None, list[str]]:
    """None: there never was one here. A run whose checkpoints are there and of no use does not begin again by itself."""
    if which not in ("auto", "latest"):
        return store.named(Path(which), check, act=world.is_first)
    listed, damaged = _on_first(
        world, "look for a checkpoint", lambda: [[str(each.path) for each in store.every()], store.about_damaged()]
    )
    path, complaints = store.newest_whole([Path(each) for each in listed], check, act=world.is_first)
    if path is None and (listed or damaged):
        every = "".join(f"\n  {each}" for each in [*complaints, *damaged])
        remedy = "Is the storage there? " if store.passed_over else ""
        raise CheckpointError(
            f"there are checkpoints in {store.folder}, and none can be used, so the run does not go on. Nothing was changed:"
            f"{every}\n  {remedy}Bring one back from a copy, or go on from another by its path. {to_start_anew(store.folder)}"
        )
    return path, complaints


def _each_once(parts: Iterable[list[str]]) -> list[str]:
    return list(dict.fromkeys(problem for part in parts for problem in part))


def _load(state: dict[str, Any], path: Path, world: World) -> None:
    reader = SafetensorsReader(path)
    reader.read_metadata()  # here, because what is wrong with it would be lost in load (torch 2.11)
    quiet_pytorch()  # weights are also loaded without a session
    try:
        load(state, storage_reader=reader, planner=SafeLoadPlanner(), no_dist=not world.connected)
    except (CheckpointException, RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"checkpoint {path} does not fit this model and optimizer: {_first_cause(error)}\n  Was it made with another "
            f"config? {to_start_anew(path.parent)}"
        ) from error


def _on_first(world: World, purpose: str, action: Callable[[], Any]) -> Any:
    """Something with files, done by rank 0; every rank learns whether it worked."""
    try:
        return world.on_first(action)
    except OSError as error:
        raise CheckpointError(f"cannot {purpose}: {error}") from error


def _first_cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        first = next(iter(error.failures.values()))[0]
        return str(first).splitlines()[0]
    return str(error).splitlines()[0] if str(error) else type(error).__name__
