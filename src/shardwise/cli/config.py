"""`shardwise config show FILE`, `advise FILE`, `keys` and `schema`."""

from __future__ import annotations

import argparse
import json

from shardwise.cli.arguments import add_config_arguments
from shardwise.cli.output import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="check a file and print it with every default, and what follows from it")
    add_config_arguments(show)
    advise = actions.add_parser("advise", help="which strategy suits this model and these devices, and why")
    add_config_arguments(advise)
    advise.add_argument(
        "--gpus", type=int, help="devices in total; default: num_gpus of the file, or those of this machine"
    )
    advise.add_argument("--nodes", type=int, help="machines; default: num_nodes of the file")
    advise.add_argument(
        "--memory", type=float, metavar="GIB", help="memory of one device; default: that of this machine's"
    )
    advise.add_argument(
        "--slow-network", action="store_true", help="between the machines: ethernet rather than InfiniBand"
    )
    keys = actions.add_parser("keys", help="print every key with its default and meaning")
    keys.add_argument("--task", help="only the keys of this task; default: of all that come with shardwise")
    schema = actions.add_parser("schema", help="print the JSON Schema, for editors")
    schema.add_argument("--task", default="chess", help="the task whose keys to describe (default: chess)")


def run(args: argparse.Namespace) -> int:
    if args.action == "schema":
        return _schema(args.task)
    if args.action == "keys":
        return _keys(args.task)
    return _advise(args) if args.action == "advise" else _show(args)


def _schema(task: str) -> int:
    from shardwise.config.load import config_class

    show(json.dumps(config_class(task).model_json_schema(), indent=2))
    return 0


def _keys(task: str | None) -> int:
    from shardwise.config.load import config_class
    from shardwise.config.reference import reference, reference_of_all

    show(reference(config_class(task)) if task else reference_of_all(), end="")
    return 0


def _show(args: argparse.Namespace) -> int:
    from shardwise.config import load_config, resolve_batching, resolve_learning_rate
    from shardwise.config.load import OWN, make_task

    config = load_config(args.config, args.set)
    import torch  # after it, because it takes seconds: what is wrong with a config is told at once

    from shardwise.engine.batch_plan import check_plan
    from shardwise.engine.evaluate import check_monitor
    from shardwise.launch.local import local_rank_count
    from shardwise.tasks import Task
    from shardwise.watch.run_folder import dump_config

    training = config.training
    world = training.num_gpus or local_rank_count(config, cuda_devices=torch.cuda.device_count())
    strategy = check_plan(config, world, "cuda" if torch.cuda.is_available() else "cpu")
    task = None if config.task == OWN else make_task(config)
    if task is not None:
        task.prepare_data()
        if isinstance(task, Task):  # otherwise the run says what it lacks
            check_monitor(task, training)
    if training.batch_size == "auto":
        show(dump_config(config), end="")
        show(
            f"\n# devices              {world}, strategy {strategy.name}\n# batch size           found when the run begins"
        )
        return 0
    batching = resolve_batching(training, strategy.copies(world))
    lr = resolve_learning_rate(training, batching.global_batch)
    show(dump_config(config), end="")
    show("\n# what follows from it")
    show(f"# devices              {world}, strategy {strategy.name}")
    show(
        f"# effective batch size {batching.global_batch} = {batching.batch_size} per device × {batching.accumulation} "
        f"accumulation × {batching.world} {'devices' if batching.world == world else 'copies of the model'}"
    )
    scaled = f" = {training.optimizer.lr:g} × {batching.global_batch} / {training.base_batch_size}"
    show(f"# learning rate        {lr:g}{scaled if training.lr_scaling == 'linear' else ''} at its peak")
    if task is not None:
        samples = len(task.train_data())
        steps = batching.steps_per_epoch(samples)
        total = min(steps * training.max_epochs, training.max_steps or steps * training.max_epochs)
        show(f"# steps per epoch      {steps} for {samples} training samples; {total} steps in all")
    show(f"# run folder           {config.run_folder}")
    return 0


def _advise(args: argparse.Namespace) -> int:
    import torch

    from shardwise.config import load_config
    from shardwise.config.load import OWN, make_task
    from shardwise.errors import ConfigError
    from shardwise.parallel.memory import gib
    from shardwise.parallel.weights import build_shape
    from shardwise.plan import Machines, ModelSizes, advise
    from shardwise.plan.advise import tensor_sizes_of

    config = load_config(args.config, args.set)
    if config.task == OWN:
        raise ConfigError("config advise looks at a task's model; with task: own the model is made by your script")
    devices = args.gpus if args.gpus is not None else config.training.num_gpus or max(1, torch.cuda.device_count())
    nodes = config.training.num_nodes if args.nodes is None else args.nodes
    if devices < 1 or nodes < 1 or (args.memory is not None and not 0 < args.memory < float("inf")):
        raise ConfigError("--gpus and --nodes must be 1 or more, and --memory a number above 0")
    if devices % nodes:
        raise ConfigError(f"{devices} devices cannot be spread evenly over {nodes} machines")
    task = make_task(config)
    task.prepare_data()
    shape = build_shape(task.build_model)
    sizes = ModelSizes.of(shape, task.blocks(shape))
    memory = _device_memory() if args.memory is None else args.memory * 2**30
    machines = Machines(devices, nodes, memory, args.slow_network)
    tensor_sizes = tensor_sizes_of(task, shape, machines)
    found = advise(sizes, config.training, machines, tensor_sizes)
    show(
        f"{config.name}: {sizes.parameters:,} parameters, {devices} device(s) of {gib(memory)} on {nodes} machine(s)\n"
    )
    show(
        f"  {'per device, predicted':<24} {'weights':>10} {'gradients':>10} {'optimizer':>10} {'gathered':>10} {'in all':>10}"
    )
    for name, state in found.table.items():
        parts = (state.weights, state.gradients, state.optimizer, state.gathered, state.total)
        show(f"  {name:<24} " + " ".join(f"{gib(part):>10}" for part in parts))
    show("\n" + "\n".join(found.reasons))
    if found.splits_blocks and tensor_sizes is None:
        show("This task does not say how its matrices are split (Task.tensor_plan): that must be written first.")
    show("Activations come on top and depend on the batch; `shardwise train` shows what is used.\n")
    if found.lines:
        show("training:\n" + "\n".join(f"  {line}" for line in found.lines))
    return 0


def _device_memory() -> float:
    import torch

    from shardwise.errors import ConfigError

    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory)
    raise ConfigError("this machine has no GPU whose memory could be read: say --memory GIB, for example --memory 80")
