"""`shardwise config show FILE`, `shardwise config keys` and `shardwise config schema`."""

from __future__ import annotations

import argparse
import json
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="check a file and print it with every default, and what follows from it")
    show.add_argument("config", help="the YAML file")
    show.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key")
    keys = actions.add_parser("keys", help="print every key with its default and meaning")
    keys.add_argument("--task", help="only the keys of this task; default: of all that come with shardwise")
    schema = actions.add_parser("schema", help="print the JSON Schema, for editors")
    schema.add_argument("--task", default="chess", help="the task whose keys to describe (default: chess)")


def run(args: argparse.Namespace) -> int:
    if args.action == "schema":
        return _schema(args.task)
    if args.action == "keys":
        return _keys(args.task)
    return _show(args)


def _schema(task: str) -> int:
    from shardwise.config.load import config_class

    json.dump(config_class(task).model_json_schema(), sys.stdout, indent=2)
    print()
    return 0


def _keys(task: str | None) -> int:
    from shardwise.config import Config
    from shardwise.config.load import BUILT_IN_BLOCKS, config_class
    from shardwise.config.reference import reference, reference_of

    print(reference(config_class(task)) if task else reference_of(Config, BUILT_IN_BLOCKS), end="")
    return 0


def _show(args: argparse.Namespace) -> int:
    import torch

    from shardwise.config import load_config, resolve_batching, resolve_learning_rate
    from shardwise.config.load import OWN, make_task
    from shardwise.launch.local import local_rank_count
    from shardwise.watch.run_folder import dump_config

    config = load_config(args.config, args.set)
    training = config.training
    world = training.num_gpus or local_rank_count(config, cuda_devices=torch.cuda.device_count())
    batching = resolve_batching(training, world)
    lr = resolve_learning_rate(training, batching.global_batch)
    print(dump_config(config), end="")
    print("\n# what follows from it")
    print(f"# devices              {world}, strategy {config.strategy_on(world)}")
    print(
        f"# effective batch size {batching.global_batch} = {batching.batch_size} per device × {batching.accumulation} "
        f"accumulation × {world} devices"
    )
    scaled = f" = {training.optimizer.lr:g} × {batching.global_batch} / {training.base_batch_size}"
    print(f"# learning rate        {lr:g}{scaled if training.lr_scaling == 'linear' else ''} at its peak")
    if config.task != OWN:
        task = make_task(config)
        task.prepare_data()
        samples = len(task.train_data())
        steps = batching.steps_per_epoch(samples)
        total = min(steps * training.max_epochs, training.max_steps or steps * training.max_epochs)
        print(f"# steps per epoch      {steps} for {samples} training samples; {total} steps in all")
    print(f"# run folder           {config.run_folder}")
    return 0
