"""What a file and its overrides mean, once they are right."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from shardwise.config import Config, load_config, parse_config
from shardwise.config.load import config_class, config_from_values, config_values, load_task_class
from shardwise.errors import ConfigError
from tests.conftest import REPOSITORY


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-4", 1e-4),
        ("1E-4", 1e-4),
        ("1.0e-4", 1e-4),
        ("5e+2", 500.0),
        ("2e3", 2000.0),
        (".5", 0.5),
        ("3.", 3.0),
        ("1_000.5", 1000.5),
        ("1", 1.0),
    ],
)
def test_a_number_is_a_number_however_it_is_written(written: str, value: float) -> None:
    in_file = parse_config(f"task: chess\ntraining: {{optimizer: {{lr: {written}}}}}")
    by_override = parse_config("task: chess", [f"training.optimizer.lr={written}"])
    assert in_file.training.optimizer.lr == by_override.training.optimizer.lr == value


@pytest.mark.parametrize("written", ["1e", "e4", "1e-", "v1.2", "1.2.3", "."])
def test_text_that_looks_like_a_number_stays_text(written: str) -> None:
    assert parse_config(f"task: chess\nrun_dir: {written}").run_dir == written


def test_an_override_wins_over_the_file_and_the_last_over_the_others() -> None:
    text = "task: chess\ntraining:\n  batch_size: 8\n  max_epochs: 3\n  optimizer: {name: sgd, lr: 0.1}\n"
    config = parse_config(text, ["training.batch_size=16", "training.optimizer.lr=1e-2", "training.batch_size = 32"])
    assert config.training.batch_size == 32
    assert config.training.max_epochs == 3, "what no override names stays"
    assert (config.training.optimizer.name, config.training.optimizer.lr) == ("sgd", 0.01)


def test_an_override_can_make_a_block_replace_one_and_take_a_value_back() -> None:
    text = "task: chess\nmodel:\ntraining: {num_gpus: 4, optimizer: {name: sgd, momentum: 0.9}}"
    config = parse_config(
        text, ["training.fsdp={}", "model.num_layers=2", "training.optimizer={lr: 0.5}", "training.num_gpus="]
    )
    assert config.training.fsdp is not None
    assert config.model.num_layers == 2  # type: ignore[attr-defined]
    assert (config.training.optimizer.name, config.training.optimizer.momentum) == ("adamw", 0.0)
    assert config.training.num_gpus is None


def test_an_override_may_hold_an_equals_sign_and_a_list() -> None:
    config = parse_config("task: chess", ["run_dir=a=b", "data.source=local", "data.paths=[x.jsonl, y.jsonl]"])
    assert config.run_dir == "a=b"
    assert config.data.paths == ["x.jsonl", "y.jsonl"]  # type: ignore[attr-defined]


def test_an_override_can_give_the_task() -> None:
    assert parse_config("seed: 3", ["task=chess"]).task == "chess"


def test_a_task_alone_is_a_whole_config() -> None:
    config: Any = parse_config("task: chess")
    training = config.training
    assert (config.seed, config.name, training.batch_size, training.max_epochs) == (0, "run", 8, 1)
    assert (training.strategy, training.num_gpus, training.precision) == (None, None, "32-true")
    assert (training.optimizer.name, training.scheduler.name, training.loggers) == ("adamw", "cosine_warmup", [])
    assert (config.data.source, config.tokenizer.strategy, config.model.architecture) == ("synthetic", None, "llama")


def test_the_name_of_a_run_is_the_files_and_its_folders_follow(tmp_path: Path) -> None:
    file = tmp_path / "my-chess.yaml"
    file.write_text("task: chess\n")
    config = load_config(file)
    assert config.name == "my-chess"
    assert config.run_folder == "runs/my-chess"
    assert config.checkpoint_folder == "runs/my-chess/checkpoints"
    file.write_text("task: chess\nname: other\n")
    assert load_config(file).run_folder == "runs/other"
    assert load_config(file, ["run_dir=here"]).checkpoint_folder == "here/checkpoints"
    assert load_config(file, ["training.checkpoint_dir=there"]).checkpoint_folder == "there"


def test_a_config_cannot_be_changed_after_loading() -> None:
    training: Any = parse_config("task: chess").training
    with pytest.raises(ValidationError, match="frozen"):
        training.batch_size = 3


def test_loggers_may_be_one_or_several() -> None:
    def loggers(written: str) -> list[str]:
        return list(parse_config(f"task: chess\ntraining: {{logger: {written}}}").training.loggers)

    assert loggers("wandb") == ["wandb"]
    assert loggers("[tensorboard, wandb]") == ["tensorboard", "wandb"]
    assert loggers("none") == loggers("[none]") == []


def test_an_anchor_can_be_used_again() -> None:
    config = parse_config("task: chess\nrun_dir: &here out\ntraining: {checkpoint_dir: *here}\n")
    assert config.training.checkpoint_dir == "out"


@pytest.mark.parametrize(
    ("training", "on_one", "on_four"),
    [
        ("{}", "single", "ddp"),
        ("{fsdp: {}}", "fsdp", "fsdp"),
        ("{strategy: ddp}", "ddp", "ddp"),
        ("{strategy: fsdp}", "fsdp", "fsdp"),
        ("{strategy: single}", "single", "single"),
        ("{strategy: fsdp, fsdp: {min_num_params: 5}}", "fsdp", "fsdp"),
    ],
)
def test_the_strategy_is_the_one_asked_for_or_the_plainest_that_does_it(
    training: str, on_one: str, on_four: str
) -> None:
    config = parse_config(f"task: chess\ntraining: {training}")
    assert (config.strategy_on(1), config.strategy_on(4)) == (on_one, on_four)


# ---------------------------------------------------------------- a task of the user's own

OWN_TASK = """
from pydantic import Field
from shardwise.config import Block, DataBlock

class Pictures(DataBlock):
    size: int = Field(32, ge=1, description="Pixels.")

class Net(Block):
    width: int = Field(8, ge=1, description="Width.")

class Mine:
    Data, Model = Pictures, Net
"""


@pytest.fixture
def own(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A config with a task in a module beside it; the module's name is of this test alone, as modules are cached."""
    module = f"own_task_{abs(hash(request.node.name))}"
    (tmp_path / f"{module}.py").write_text(OWN_TASK)
    file = tmp_path / "mine.yaml"
    file.write_text(f"task: {module}:Mine\n")
    return file


def test_a_task_of_ones_own_lies_beside_the_config(own: Path) -> None:
    config: Any = load_config(own, ["data.size=64", "data.num_workers=3"])
    assert (config.data.size, config.data.num_workers, config.model.width) == (64, 3, 8)
    assert type(config.data).__name__ == "Pictures"
    assert load_task_class(config.task).__name__ == "Mine"
    assert config.model_dump()["data"] == {
        "size": 64,
        "num_workers": 3,
        "prefetch_factor": 2,
        "pin_memory": None,
        "allow_shared_samples": False,
    }


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.sice=3", "data.sice is not a key that shardwise knows (value 3). Nearest: data.size"),
        ("model.widht=3", "model.widht is not a key that shardwise knows (value 3). Nearest: model.width"),
        ("model.width=0", "model.width: 0 is not allowed. Allowed: 1 or more"),
        ("model.width='8'", "model.width: '8' is not allowed. Allowed: a whole number"),
        ("tokenizer.name=x", "tokenizer.name is not a key that shardwise knows (value 'x'). Nearest: name"),
    ],
)
def test_the_blocks_of_a_task_of_ones_own_are_as_strict_as_the_others(own: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(own, [override])
    assert str(caught.value) == f"--set: {message}"


# ---------------------------------------------------------------- sent to another process


@pytest.mark.parametrize("file", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda file: file.stem)
def test_the_values_of_a_config_make_the_same_config(file: Path) -> None:
    config = load_config(file, ["training.max_steps=7", "seed=3"])
    sent = pickle.loads(pickle.dumps(config_values(config)))
    again = config_from_values(sent)
    assert again.model_dump() == config.model_dump()
    left = again.model_fields_set, again.training.model_fields_set, again.data.model_fields_set
    assert left == (config.model_fields_set, config.training.model_fields_set, config.data.model_fields_set)


def test_values_take_overrides_and_are_checked_like_a_file() -> None:
    values = config_values(parse_config("task: chess\ntraining: {batch_size: 4}"))
    assert config_from_values(values, ["training.batch_size=8"]).training.batch_size == 8
    assert values["training"]["batch_size"] == 4, "what was given is as it was"
    with pytest.raises(ConfigError, match=r"training[.]batch_size: 0 is not allowed"):
        config_from_values(values, ["training.batch_size=0"])


# ---------------------------------------------------------------- the schema for editors


def every_property(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every key of every block: what a block is made of lies under $defs."""
    models = {"Config": schema, **schema.get("$defs", {})}
    for model, content in models.items():
        for key, described in content.get("properties", {}).items():
            yield f"{model}.{key}", described


def help_of(described: dict[str, Any], schema: dict[str, Any]) -> str:
    """Its own, or that of the block it refers to."""
    if "description" in described:
        return str(described["description"])
    target = described.get("$ref", "").removeprefix("#/$defs/")
    return str(schema["$defs"].get(target, {}).get("description", ""))


@pytest.mark.parametrize("task", ["chess", "own", "tests.tasks:Ragged"])
def test_the_schema_has_help_for_every_key(task: str) -> None:
    schema = config_class(task).model_json_schema()
    keys = dict(every_property(schema))
    assert {"Config.seed", "Training.batch_size", "Optimizer.lr", "Fsdp.cpu_offload", "Ddp.static_graph"} <= keys.keys()
    assert [key for key, described in keys.items() if not help_of(described, schema).strip()] == []


def test_the_schema_forbids_other_keys_everywhere() -> None:
    schema = config_class("chess").model_json_schema()
    blocks = [content for content in [schema, *schema["$defs"].values()] if content.get("type") == "object"]
    assert len(blocks) == 11
    assert all(block["additionalProperties"] is False for block in blocks)


def test_the_schema_of_a_task_of_ones_own_has_its_keys(own: Path) -> None:
    config: Config = load_config(own)
    schema = config_class(config.task).model_json_schema()
    keys = dict(every_property(schema))
    assert keys["Pictures.size"]["description"] == "Pixels."
    assert keys["Config.model"]["description"] == "What is trained."
