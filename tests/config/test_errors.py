"""Every mistake in a config is answered with the file, the line, the key, the value, what is allowed, the nearest key."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shardwise.config import Block, Config, DataBlock, load_config, parse_config
from shardwise.config.explain import models_in
from shardwise.config.load import config_class, load_task_class, task_blocks
from shardwise.errors import ConfigError


def complaint(text: str, overrides: Sequence[str] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, overrides, where="my.yaml")
    return str(caught.value)


def under(path: tuple[str, ...], value: str) -> str:
    """A config with one key set, on line 3 and below: task first, then a comment, then one line per block."""
    lines = ["task: chess", "# a comment"]
    lines += [f"{'  ' * depth}{key}:" for depth, key in enumerate(path)]
    return "\n".join(lines) + f" {value}\n"


# ---------------------------------------------------------------- keys that nobody knows


def test_an_unknown_key_is_answered_with_the_nearest_of_its_block() -> None:
    message = complaint("task: chess\ntraining:\n  bach_size: 8\n")
    assert message == (
        "my.yaml, line 3: training.bach_size is not a key that shardwise knows (value 8). Nearest: training.batch_size"
    )


def test_a_name_that_several_blocks_have_is_looked_for_in_its_own_block_first() -> None:
    """`name` is a key of five blocks: only the one where it was misspelt is meant."""
    for block in ("tokenizer", "model"):
        assert complaint(f"task: chess\n{block}: {{nane: x}}").endswith(f"Nearest: {block}.name")


def test_a_key_in_the_wrong_block_is_answered_with_the_right_block() -> None:
    message = complaint("task: chess\nlr: 1e-3\n")
    assert (
        message == "my.yaml, line 2: lr is not a key that shardwise knows (value 0.001). Nearest: training.optimizer.lr"
    )


def test_a_misspelt_key_in_the_wrong_block_is_answered_with_the_right_key_of_the_right_block() -> None:
    message = complaint("task: chess\nmodel:\n  weight_decays: 0.1\n")
    assert message.startswith("my.yaml, line 3: model.weight_decays is not a key that shardwise knows (value 0.1).")
    assert message.endswith("Nearest: training.optimizer.weight_decay")


def test_a_key_like_no_other_is_answered_with_the_keys_there_are() -> None:
    message = complaint("task: chess\ntokenizer:\n  zzzz: 1\n")
    assert message == (
        "my.yaml, line 3: tokenizer.zzzz is not a key that shardwise knows (value 1). "
        "Keys here: strategy, name, max_seq_len, packing"
    )


def test_a_key_in_a_block_without_keys_is_told_that_there_are_none() -> None:
    assert complaint("task: own\nmodel:\n  zzzz: 1\n").endswith("Keys here: none")


def test_a_long_value_is_cut_in_the_message() -> None:
    message = complaint(f"task: chess\nzzzz: {'x' * 500}\n")
    assert f"(value '{'x' * 56}...)" in message


def test_a_key_that_is_no_text_is_named_with_its_line() -> None:
    assert complaint("task: chess\n1: 2\n") == "my.yaml, line 2: 1: a key must be text; put it in quotes"


# ---------------------------------------------------------------- values of the wrong type


@pytest.mark.parametrize(
    ("path", "written", "shown", "allowed"),
    [
        (("training", "batch_size"), "eight", "'eight'", "a whole number, or auto"),
        (("training", "batch_size"), "8.5", "8.5", "a whole number, or auto"),
        (("training", "batch_size"), "'8'", "'8'", "a whole number, or auto"),
        (("training", "batch_size"), "true", "True", "a whole number, or auto"),
        (("training", "num_nodes"), "", "None", "a whole number"),
        (("training", "optimizer", "lr"), "fast", "'fast'", "a number"),
        (("training", "optimizer", "lr"), ".inf", "inf", "a finite number"),
        (("training", "optimizer", "weight_decay"), ".nan", "nan", "a finite number"),
        (("training", "eval_at_start"), "1", "1", "true or false"),
        (("training", "eval_at_start"), "'yes'", "'yes'", "true or false"),
        (("training", "monitor"), "5", "5", "text"),
        (("training", "monitor"), "''", "''", "text of 1 character(s) or more"),
        (("training", "checkpoint_dir"), "[a]", "['a']", "text"),
        (("data", "paths"), "games.jsonl", "'games.jsonl'", "a list"),
        (("model", "extra"), "3", "3", "a block of keys"),
        (("training",), "fast", "'fast'", "a block of keys"),
        (("training", "optimizer"), "adamw", "'adamw'", "a block of keys"),
        (("training", "fsdp"), "true", "True", "a block of keys"),
        (("name",), "2024", "2024", "text"),
    ],
)
def test_a_wrong_type_is_answered_with_the_value_and_the_type(
    path: tuple[str, ...], written: str, shown: str, allowed: str
) -> None:
    line = 2 + len(path)
    expected = f"my.yaml, line {line}: {'.'.join(path)}: {shown} is not allowed. Allowed: {allowed}"
    assert complaint(under(path, written)) == expected


def test_a_wrong_item_of_a_list_is_named_by_its_place_and_its_own_line() -> None:
    message = complaint("task: chess\ndata:\n  source: local\n  paths:\n    - a.jsonl\n    - 5\n")
    assert message == "my.yaml, line 6: data.paths.1: 5 is not allowed. Allowed: text"


@pytest.mark.parametrize(("betas", "words"), [("[0.9]", "at least 2 items"), ("[0.9, 0.9, 0.9]", "at most 2 items")])
def test_betas_are_two(betas: str, words: str) -> None:
    message = complaint(under(("training", "optimizer", "betas"), betas))
    assert message.startswith(f"my.yaml, line 5: training.optimizer.betas: {betas} is not allowed.")
    assert words in message


def test_a_wrong_member_of_a_union_is_explained_once_with_all_forms() -> None:
    assert complaint(under(("training", "logger"), "comet")).splitlines() == [
        "my.yaml, line 4: training.logger: 'comet' is not allowed. Allowed: tensorboard, wandb, mlflow, none, or a list",
    ]
    assert complaint(under(("training", "fsdp", "activation_checkpointing"), "some")).splitlines() == [
        "my.yaml, line 5: training.fsdp.activation_checkpointing: 'some' is not allowed. "
        "Allowed: true or false, or selective",
    ]
    assert complaint(under(("training", "logger"), "[wandb, comet]")).splitlines()[-1] == (
        "my.yaml, line 4: training.logger.1: 'comet' is not allowed. Allowed: tensorboard, wandb, mlflow, none"
    )


# ---------------------------------------------------------------- bounds and literals: every key that has them


def every_field(schema: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    for name, info in schema.model_fields.items():
        yield (*prefix, name), info
        for inner in models_in(info.annotation):
            yield from every_field(inner, (*prefix, name))


def literals_of(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for member in get_args(annotation) for value in literals_of(member)]


def just_outside() -> Iterator[tuple[tuple[str, ...], int | float, str]]:
    # A step that float keys can take and int keys accept: their own error would come first otherwise.
    kinds = {"ge": (-1, "{} or more"), "gt": (0, "above {}"), "le": (1, "{} or less"), "lt": (0, "below {}")}
    for path, info in every_field(config_class("chess")):
        for bound in info.metadata:
            for kind, (step, words) in kinds.items():
                if (edge := getattr(bound, kind, None)) is not None:
                    yield path, edge + step, words.format(edge)


BOUNDS = list(just_outside())
LITERALS = [
    (path, literals_of(info.annotation))
    for path, info in every_field(config_class("chess"))
    if literals_of(info.annotation)
]


def test_the_walk_over_the_schema_finds_its_bounds_and_literals() -> None:
    """Without this, a walk that finds nothing would pass for a schema without mistakes."""
    assert {("seed",), ("training", "max_epochs"), ("training", "fsdp", "min_num_params")} <= {
        path for path, *_ in BOUNDS
    }
    assert {("data", "source"), ("training", "precision"), ("training", "scheduler", "name")} <= dict(LITERALS).keys()
    assert {words.partition(" ")[0] for *_, words in BOUNDS} >= {"above", "below"}
    assert {words.rpartition(" ")[2] for *_, words in BOUNDS} >= {"more", "less"}


@pytest.mark.parametrize(("path", "value", "allowed"), BOUNDS, ids=lambda part: str(part))
def test_a_value_just_outside_its_bounds_is_answered_with_the_bound(
    path: tuple[str, ...], value: float, allowed: str
) -> None:
    message = complaint(under(path, str(value)))
    assert message.startswith(f"my.yaml, line {2 + len(path)}: {'.'.join(path)}: {value} is not allowed. Allowed: ")
    # pydantic writes the bound in the type of the key, so 0 may read 0.0
    said = message.rpartition("Allowed: ")[2]
    assert [number(word) for word in said.split()] == [number(word) for word in allowed.split()]


@pytest.mark.parametrize(("path", "allowed"), LITERALS, ids=lambda part: str(part))
def test_a_word_that_is_no_choice_is_answered_with_every_choice(path: tuple[str, ...], allowed: list[Any]) -> None:
    message = complaint(under(path, "nonsense")).splitlines()[0]
    listed = ["false" if choice is False else str(choice) for choice in dict.fromkeys(allowed)]
    what, _, said = message.partition("Allowed: ")
    assert what == f"my.yaml, line {2 + len(path)}: {'.'.join(path)}: 'nonsense' is not allowed. "
    others = {"true or false", "a whole number", "a list"}  # what a key takes besides
    assert [choice for choice in re.split(", (?:or )?", said) if choice not in others] == listed


def number(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word


# ---------------------------------------------------------------- what is consistent key by key and wrong together

CONTRADICTIONS = {
    "training:\n  optimizer: {betas: [0.9, 1.0]}": "line 3: training.optimizer: betas must lie in [0, 1), not [0.9, 1.0]",
    "training:\n  optimizer: {betas: [-0.1, 0.9]}": "line 3: training.optimizer: betas must lie in [0, 1), not [-0.1, 0.9]",
    "training:\n  scheduler: {warmup_steps: 5, warmup_ratio: 0.1}": (
        "line 3: training.scheduler: warmup_steps and warmup_ratio are two ways to say one thing: give one of them"
    ),
    "training:\n  scheduler: {warmup_steps: 5, total_steps: 5}": (
        "line 3: training.scheduler: warmup_steps 5 must be below total_steps 5"
    ),
    "training:\n  gradient_accumulation: 2\n  total_batch_size: 8": (
        "line 2: training: gradient_accumulation and total_batch_size are two ways to say one thing: give one of them"
    ),
    "training: {lr_scaling: linear}": (
        "line 2: training: lr_scaling: linear needs base_batch_size, the batch size that optimizer.lr was chosen for"
    ),
    "training: {strategy: single, fsdp: {}}": (
        "line 2: training: strategy: single contradicts the fsdp block: leave one of them out"
    ),
    "training: {strategy: ddp, fsdp: {}}": (
        "line 2: training: strategy: ddp contradicts the fsdp block: leave one of them out"
    ),
    "training: {strategy: single, num_gpus: 2}": (
        "line 2: training: strategy: single runs on one device, but num_gpus is 2"
    ),
    "training: {num_gpus: 3, num_nodes: 2}": (
        "line 2: training: num_gpus is the total over all machines: 3 cannot be spread evenly over num_nodes: 2"
    ),
    "data: {source: local}": "line 2: data: source: local needs paths, a list of JSONL or PGN files",
    "data: {source: hub}": "line 2: data: source: hub needs dataset, the name of a Hugging Face data set or a folder",
    "model: {hidden_dim: 10, num_heads: 4}": "line 2: model: num_heads: 4 must divide hidden_dim: 10",
}


@pytest.mark.parametrize(("text", "message"), CONTRADICTIONS.items(), ids=lambda part: part.splitlines()[-1].strip())
def test_keys_that_contradict_each_other_are_refused(text: str, message: str) -> None:
    assert complaint(f"task: chess\n{text}\n") == f"my.yaml, {message}"


def test_two_ways_to_say_warmup_are_refused_but_each_alone_is_taken() -> None:
    both = complaint("task: chess\ntraining: {scheduler: {warmup_steps: 5, warmup_ratio: 0.1}}\n")
    assert "warmup_steps and warmup_ratio are two ways to say one thing" in both
    for one, steps, ratio in (("warmup_steps: 5", 5, None), ("warmup_ratio: 0.1", None, 0.1)):
        scheduler = parse_config(f"task: chess\ntraining: {{scheduler: {{{one}}}}}").training.scheduler
        assert (scheduler.warmup_steps, scheduler.warmup_ratio) == (steps, ratio)


def test_heads_need_not_divide_where_the_model_has_a_name() -> None:
    config = parse_config("task: chess\nmodel: {name: gpt2, hidden_dim: 10, num_heads: 4}")
    assert config.model.model_dump()["name"] == "gpt2"


# ---------------------------------------------------------------- several at once


def test_all_mistakes_are_reported_in_the_order_of_their_lines() -> None:
    text = "task: chess\ntraining:\n  batch_size: 0\n  precission: 8\nmodel:\n  num_layers: x\ndata:\n  nmu_games: 5\nsead: 1\n"
    messages = complaint(text, ["training.max_epochs=0"]).splitlines()
    assert [message.partition(":")[0] for message in messages] == [
        "--set",
        "my.yaml, line 3",
        "my.yaml, line 4",
        "my.yaml, line 6",
        "my.yaml, line 8",
        "my.yaml, line 9",
    ]
    assert [words in message for words, message in zip(
        ["training.max_epochs: 0", "training.batch_size: 0", "Nearest: training.precision", "model.num_layers: 'x'",
         "Nearest: data.num_games", "Nearest: seed"], messages, strict=True
    )] == [True] * 6  # fmt: skip


# ---------------------------------------------------------------- YAML


def test_a_key_given_twice_is_an_error_with_both_lines() -> None:
    message = complaint("task: chess\ntraining:\n  batch_size: 8\n  max_epochs: 1\n  batch_size: 16\n")
    assert message == "my.yaml, line 5: training.batch_size is given twice; the first is on line 3"
    assert (
        complaint("task: chess\nseed: 1\nseed: 1\n") == "my.yaml, line 3: seed is given twice; the first is on line 2"
    )


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("task: chess\ntraining: {batch_size: 8\n", 3, "expected ',' or '}'"),
        ("task: chess\ntraining:\n\tbatch_size: 8\n", 3, "cannot start any token"),
        ("task: chess\n---\ntask: chess\n", 2, "another document"),
        ("task: chess\nname: *nobody\n", 2, "undefined alias"),
        ("task: chess\nname: !mine x\n", 2, "tag '!mine'"),
        ("task: chess\n? {a: b}\n: c\n", 2, "unhashable key"),
    ],
)
def test_what_is_not_yaml_is_named_with_its_line(text: str, line: int, problem: str) -> None:
    message = complaint(text)
    assert message.startswith(f"my.yaml, line {line}: not valid YAML: ")
    assert problem in message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("task: chess\nname: a\x01b\n", "special characters are not allowed"),
        ("task: chess\nname: 2024-99-99\n", "month must be in 1..12"),
    ],
)
def test_what_is_not_yaml_and_has_no_line_is_still_no_traceback(text: str, problem: str) -> None:
    message = complaint(text)
    assert message.startswith("my.yaml: not valid YAML: ")
    assert problem in message


@pytest.mark.parametrize("text", ["- task: chess\n", "chess\n", "null\n", "3\n"])
def test_a_file_that_is_no_mapping_is_told_what_one_looks_like(text: str) -> None:
    assert complaint(text) == "my.yaml: a config is a mapping of keys to values, for example 'task: chess'"


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "seed: 3\n"])
def test_a_config_without_a_task_is_asked_for_one(text: str) -> None:
    message = complaint(text)
    assert message == "my.yaml: the key 'task' is missing. What should be trained? For example: task: chess"


# ---------------------------------------------------------------- files


def test_an_empty_file_is_asked_for_a_task(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.touch()
    with pytest.raises(ConfigError, match=r"empty\.yaml: the key 'task' is missing"):
        load_config(file)


def test_a_missing_file_is_answered_with_the_configs_beside_it(tmp_path: Path) -> None:
    for name in ("chess.yaml", "cells.yml", "notes.txt"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "ches.yaml")
    assert str(caught.value) == (
        f"there is no config file {tmp_path}/ches.yaml. In that folder: {tmp_path}/cells.yml, {tmp_path}/chess.yaml."
    )


def test_a_missing_file_with_nothing_beside_it_is_just_missing(tmp_path: Path) -> None:
    for file in (tmp_path / "chess.yaml", tmp_path / "nowhere" / "chess.yaml", tmp_path):
        with pytest.raises(ConfigError) as caught:
            load_config(file)
        assert str(caught.value) == f"there is no config file {file}."


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.yaml"
    file.write_bytes(b"\x80\x81\xfe\xff")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value) == f"{file} is not a text file"


def test_the_path_of_the_file_is_in_the_message(tmp_path: Path) -> None:
    file = tmp_path / "chess.yaml"
    file.write_text("task: chess\nsead: 1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value) == f"{file}, line 2: sead is not a key that shardwise knows (value 1). Nearest: seed"


# ---------------------------------------------------------------- overrides


@pytest.mark.parametrize("override", ["training.batch_size", "=8", " =8", ""])
def test_an_override_without_key_or_value_is_told_how_to_write_one(override: str) -> None:
    message = complaint("task: chess", [override])
    assert message == f"--set {override}: write key=value, for example --set training.batch_size=8"


def test_an_override_below_a_value_is_refused() -> None:
    message = complaint("task: chess\nseed: 1", ["seed.deep=8"])
    assert message == "--set seed.deep=8: 'seed' is a value, not a block: it has no keys below it"
    message = complaint("task: chess", ["training.batch_size=8", "training.batch_size.deep=8"])
    assert message.startswith("--set training.batch_size.deep=8: 'batch_size' is a value, not a block")


@pytest.mark.parametrize(
    ("value", "problem"),
    [("{lr: 1", "expected ',' or '}'"), ("!mine 1", "tag '!mine'"), ("2024-99-99", "month"), ("a\x01", "special")],
)
def test_an_override_that_is_not_yaml_is_refused(value: str, problem: str) -> None:
    message = complaint("task: chess", [f"training.optimizer={value}"])
    assert message.startswith(f"--set training.optimizer={value}: the value is not valid YAML: ")
    assert problem in message


def test_a_wrong_override_is_blamed_and_not_the_line_of_the_file() -> None:
    text = "task: chess\ntraining:\n  batch_size: 8\n  optimizer:\n    lr: 1.0\n"
    assert (
        complaint(text, ["training.batch_size=0"])
        == "--set: training.batch_size: 0 is not allowed. Allowed: 1 or more, or auto"
    )
    whole_block = complaint(text, ["training.optimizer={lr: -1}"])
    assert whole_block == "--set: training.optimizer.lr: -1 is not allowed. Allowed: above 0.0"
    unknown_key = complaint(text, ["training.bach_size=8"])
    assert unknown_key.startswith("--set: training.bach_size is not a key that shardwise knows (value 8). Nearest: ")
    unknown_block = complaint(text, ["trainin.batch_size=8"])
    assert unknown_block.startswith("--set: trainin is not a key") and unknown_block.endswith("Nearest: training")


def test_a_wrong_line_of_the_file_is_blamed_where_an_override_was_right() -> None:
    message = complaint("task: chess\ntraining:\n  batch_size: 0\n", ["training.max_epochs=3"])
    assert message == "my.yaml, line 3: training.batch_size: 0 is not allowed. Allowed: 1 or more, or auto"


# ---------------------------------------------------------------- tasks of the user's own


@pytest.mark.parametrize("task", ["ches", "mypackage.tasks", "mypackage.tasks:", ":Mine", ".tasks:Mine", "5", "null"])
def test_a_task_that_is_neither_known_nor_an_import_path_is_told_the_two_forms(task: str) -> None:
    message = complaint(f"task: {task!r}" if ":" in task else f"task: {task}")
    shown = {"5": "5", "null": "None"}.get(task, repr(task))
    assert message == (
        f"my.yaml: task: {shown} is neither a known task (chess, cells, segmentation, images) nor an import path. "
        f"{'Nearest: chess. ' if task == 'ches' else ''}Your own is written as module:Class, for example mypackage.tasks:MyTask"
    )


def test_a_module_that_is_not_there_is_named() -> None:
    for module in ("no_such_module_anywhere", "tests.no_such_module"):
        assert complaint(f"task: {module}:Mine") == (
            f"my.yaml: task: {module}:Mine: there is no module {module!r}. It must be installed, or lie in this folder "
            "or beside the config file"
        )


@pytest.mark.parametrize("missing", ["no_such_module_anywhere", "my_tas"])
def test_a_module_that_lacks_something_itself_keeps_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """Even where the name of what is missing is the beginning of the module's own."""
    (tmp_path / "my_task_a.py").write_text(f"import {missing}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError) as caught:
        parse_config("task: my_task_a:Mine")
    assert caught.value.name == missing


@pytest.mark.parametrize("name", ["Mien", "not_a_class"])
def test_a_class_that_is_not_there_is_answered_with_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "my_task_b.py").write_text("class Mine: ...\nclass Other: ...\nclass _Hidden: ...\nnot_a_class = 5\n")
    monkeypatch.syspath_prepend(tmp_path)
    message = complaint(f"task: my_task_b:{name}")
    assert message == f"my.yaml: task: my_task_b:{name}: my_task_b has no class {name!r}. It has: Mine, Other"
    sys.modules.pop("my_task_b")
    (tmp_path / "my_task_c.py").write_text("")
    assert complaint("task: my_task_c:Mine").endswith("my_task_c has no class 'Mine'. It has: none")


def test_an_attribute_in_the_place_of_a_method_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_task_x.py").write_text("from shardwise import Task\nclass Mine(Task):\n    labels = 6\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "Mine.labels is 6, but labels() is a method of every task" in complaint("task: my_task_x:Mine")


def test_the_task_own_has_a_config_but_no_class() -> None:
    assert parse_config("task: own").task == "own"
    with pytest.raises(ConfigError) as caught:
        load_task_class("own", "my.yaml")
    assert str(caught.value) == (
        "my.yaml: task: own is for a loop of your own: give session.prepare() model, data and loss"
    )


@pytest.mark.parametrize(
    ("name", "wrong", "base"),
    [
        ("Data", Block, "DataBlock"),
        ("Data", DataBlock(), "DataBlock"),
        ("Tokenizer", dict, "Block"),
        ("Model", 5, "Block"),
    ],
)
def test_a_task_whose_block_is_not_of_the_right_kind_is_refused(name: str, wrong: Any, base: str) -> None:
    with pytest.raises(ConfigError) as caught:
        task_blocks(type("Mine", (), {name: wrong}))
    assert str(caught.value) == f"Mine.{name} must be a subclass of shardwise.{base}"


def test_a_key_that_a_task_needs_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_task_d.py").write_text(
        "from shardwise.config import DataBlock\n"
        "class Needs(DataBlock):\n    folder: str\n"
        "class Mine:\n    Data = Needs\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert complaint("task: my_task_d:Mine\n\ndata:\n  num_workers: 1\n") == "my.yaml, line 3: data.folder is missing"
    assert complaint("task: my_task_d:Mine\n") == "my.yaml: data.folder is missing"
    config: Config = parse_config("task: my_task_d:Mine\ndata: {folder: x}\n")
    assert config.data.folder == "x"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{paths: [a.jsonl]}", "data: paths and valid_paths are read with source: local, but source is synthetic"),
        (
            "{source: hub, dataset: a, valid_paths: [b]}",
            "data: paths and valid_paths are read with source: local, but source is hub",
        ),
        ("{dataset: a}", "data: dataset is read with source: hub, but source is synthetic"),
        ("{valid_split: test}", "data: valid_split is read with source: hub, but source is synthetic"),
    ],
)
def test_data_that_would_be_ignored_is_refused(data: str, message: str) -> None:
    assert complaint(f"task: chess\ndata: {data}\n").endswith(message)
