"""YAML 1.1 reads some numbers as nobody means them, and lets a few lines stand for billions: both are refused, with the line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.config import load_config, parse_config
from shardwise.config.commands import yaml_text
from shardwise.config.yaml_lines import read_yaml
from shardwise.config.yaml_reader import MOST_BYTES, MOST_VALUES, is_read_as_text, write_yaml
from shardwise.errors import ConfigError
from tests.conftest import REPOSITORY


def complaint(text: str, overrides: list[str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, overrides or [], where="my.yaml")
    return str(caught.value)


# ---------------------------------------------------------------- numbers

MISREAD = [
    ("010", "begins with 0, as numbers in base 8 do", "10"),
    ("-010", "begins with 0, as numbers in base 8 do", "-10"),
    ("007", "begins with 0, as numbers in base 8 do", "7"),
    ("08", "begins with 0, as numbers in base 8 do", "8"),
    ("0o10", "is written in base 8", "8"),
    ("1:30", "would be read in base 60", "90"),
    ("190:20:30", "would be read in base 60", "685230"),
    ("1_00", "has _ where no thousands begin", "100"),
    ("2026_11_19", "has _ where no thousands begin", "20261119"),
]


@pytest.mark.parametrize(("written", "why", "number"), MISREAD)
@pytest.mark.parametrize("key", ["name", "training.batch_size", "data.paths"])
def test_a_number_that_yaml_reads_otherwise_is_refused_wherever_it_stands(
    written: str, why: str, number: str, key: str
) -> None:
    said = f'{written} {why}: write {number} for the number, or "{written}" in quotes for a text'
    *blocks, last = key.split(".")
    value = f"[{written}]" if key == "data.paths" else written
    lines = ["task: chess", *[f"{block}:" for block in blocks], f"{'  ' * len(blocks)}{last}: {value}"]
    assert complaint("\n".join(lines)) == f"my.yaml, line {len(lines)}: {said}"
    assert complaint("task: chess", [f"{key}={value}"]) == f"--set {key}={value}: {said}"


@pytest.mark.parametrize(("written", "why", "number"), MISREAD)
def test_in_quotes_it_is_text_and_in_base_10_the_number_that_was_meant(written: str, why: str, number: str) -> None:
    assert parse_config(f'task: chess\nname: "{written}"').name == written
    assert parse_config(f"task: chess\nname: !!str {written}").name == written
    assert read_yaml(f"x: {number}", "it").values == {"x": int(number)}


@pytest.mark.parametrize(
    ("written", "value"),
    [("0", 0), ("-0", 0), ("1_000", 1000), ("1_000_000", 10**6), ("0x1F", 31), ("0b11", 3), ("1e-4", 1e-4), ("1_000.5", 1000.5),
     ("0.5", 0.5), ("10:99", "10:99"), ("v08", "v08"), ("0-8", "0-8"), ("a:b", "a:b"), ("owner/08", "owner/08"),
     ("1.10.0", "1.10.0"), ("yes", True), ("off", False)],
)  # fmt: skip
def test_what_is_read_as_it_is_meant_stays(written: str, value: Any) -> None:
    assert read_yaml(f"x: {written}", "it").values == {"x": value}


def test_every_config_that_comes_with_shardwise_is_read_as_before() -> None:
    for file in sorted((REPOSITORY / "configs").glob("*.yaml")):
        text = file.read_text()
        assert read_yaml(text, "it").values == yaml.safe_load(text), file


@pytest.mark.parametrize("written", ["9" * 5000, "0x" + "f" * 5000, "-" + "1" * 400])
def test_a_number_of_thousands_of_digits_is_none(written: str) -> None:
    assert complaint(f"task: chess\nseed: {written}").startswith(f"my.yaml, line 2: {written[:20]}… is a number of ")


@pytest.mark.parametrize(
    ("written", "read"), [("no", "false"), ("on", "true"), ("Yes", "true"), ("off", "false"), ("2026-11-19", "a date")]
)
def test_a_word_that_yaml_takes_for_another_value_is_shown_as_it_is_written(written: str, read: str) -> None:
    said = f"{written}, which YAML reads as {read} (in quotes it is a text), is not allowed. Allowed: text"
    assert complaint(f"task: chess\nname: {written}") == f"my.yaml, line 2: name: {said}"
    assert complaint("task: chess", [f"name={written}"]) == f"--set: name: {said}"
    assert complaint("task: chess\nname: no", [f"data.paths=[{written}]"]).startswith(f"--set: data.paths.0: {said}")


def test_true_and_false_stay_what_they_are() -> None:
    assert complaint("task: chess\nname: true") == "my.yaml, line 2: name: True is not allowed. Allowed: text"
    assert parse_config("task: chess\ntraining: {async_checkpoint: no}").training.async_checkpoint is False


# ---------------------------------------------------------------- what grows


def laughs(levels: int) -> str:
    lines = ["task: chess", "l0: &l0 [ha, ha, ha]"]
    return "\n".join(lines + [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, levels)]) + "\n"


def test_aliases_of_aliases_are_refused_at_the_line_where_they_grow() -> None:
    assert complaint(laughs(50)) == (
        "my.yaml, line 6: with *l3, aliases repeat more than 10000 values. Write out what is meant"
    )


def test_merged_blocks_grow_no_more_than_lists() -> None:
    text = "m0: &m0 {a: 1, b: 2}\n" + "\n".join(
        f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}], k{n}: 1}}" for n in range(1, 30)
    )
    assert "aliases repeat more than 10000 values" in complaint(text)


def test_an_override_may_not_grow_either() -> None:
    said = complaint("task: chess", ["data={a: &a [1, 1], b: &b [" + "*a, " * 9 + "], c: [" + "*b, " * 500 + "]}"])
    assert "with *b, aliases repeat more than 10000 values" in said


def test_a_few_aliases_are_fine() -> None:
    text = "task: chess\nname: &n out\nrun_dir: *n\ntraining: {optimizer: &o {lr: 0.1}}\ndata: {}"
    assert parse_config(text).run_dir == "out"
    assert read_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}", "it").values["b"] == {"x": 1, "y": 2}


@pytest.mark.parametrize("text", ["x: " + "[" * 5000, "x: " + "{a: " * 100, "- " * 3000, "x: &a " + "[" * 60 + "*a"])
def test_what_is_nested_too_deeply_is_refused_with_its_line(text: str) -> None:
    assert complaint(text) == "my.yaml, line 1: blocks and lists are nested more than 40 deep"


def test_an_anchor_that_contains_itself_is_refused_with_its_line() -> None:
    assert complaint("task: chess\nname: &loop [*loop]\n") == "my.yaml, line 2: an anchor contains itself"


def test_a_file_of_too_many_values_or_bytes_is_no_config(tmp_path: Path) -> None:
    assert complaint("x: [" + "1, " * MOST_VALUES + "]").startswith("my.yaml, line 1: here are more than 20000 values")
    file = tmp_path / "a.yaml"
    file.write_text("#" * (MOST_BYTES + 1))
    with pytest.raises(ConfigError, match="is larger than 1048576 bytes: it is no config"):
        load_config(file)
    assert parse_config("task: chess\ndata: {source: local, paths: [" + "a.jsonl, " * 10_000 + "]}").task == "chess"


@pytest.mark.parametrize("value", ["!!binary aGk=", "!!set {a}", "!!omap [a: 1]", "!!timestamp 2026-11-19"])
def test_types_that_no_key_has_are_refused(value: str) -> None:
    said = f"my.yaml, line 2: {value.partition(' ')[0]} is nothing that a config has"
    assert complaint(f"task: chess\nname: {value}") == said


@pytest.mark.parametrize("value", ['"a\\0b"', '"\\ud800"'])
def test_characters_that_no_file_name_takes_are_refused(value: str) -> None:
    assert complaint(f"task: chess\nname: {value}").startswith("my.yaml, line 2: a text has a character that cannot be")


def test_a_list_of_mistakes_is_not_told_to_its_end() -> None:
    said = complaint("task: chess\ndata: {source: local, paths: [" + "1, " * 1000 + "]}").splitlines()
    assert len(said) == 21 and said[-1] == "my.yaml: and 980 more"


# ---------------------------------------------------------------- what it is read from, and written as


def test_a_config_may_be_a_link_and_no_pipe(tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_text("task: chess\n")
    (tmp_path / "linked.yaml").symlink_to("real.yaml")
    assert load_config(tmp_path / "linked.yaml").name == "linked"
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match="there is no config file"):
        load_config(tmp_path / "pipe.yaml")


TEXTS = ["010", "08", "0o10", "1:30", "1_00", "1e4", "no", "2026-11-19", "null", "~", "1", "x", "a: b", "", "é"]


def test_what_is_written_is_read_as_the_same() -> None:
    values = {"texts": TEXTS, "numbers": [1, -1, 1e-5, 0.1, 10**6], "others": [None, True, {"a": []}]}
    assert read_yaml(write_yaml(values), "it").values == values


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_in_a_command_is_quoted_where_it_must_be(text: str) -> None:
    assert read_yaml(f"x: {yaml_text(text)}", "it").values == {"x": text}
    assert not is_read_as_text("010") and is_read_as_text("x")
