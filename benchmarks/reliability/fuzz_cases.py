"""One wrong file, and what shardwise answers: what was right about it, or one error. What is right is found out without
shardwise, by reading the same files in the plainest way."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.reliability.mutations import mutated_bytes, mutated_tree, mutated_yaml, put_in_place
from shardwise.checkpoint import CheckpointStore, Saver, load_into
from shardwise.cli import main
from shardwise.config import load_config
from shardwise.config.load import config_from_values, config_values
from shardwise.data import Cursor
from shardwise.data.manifest import entry_of, write_manifest
from shardwise.engine.loss_guard import HISTORY
from shardwise.engine.state import RunState
from shardwise.errors import LaunchError, ShardwiseError
from shardwise.parallel import World
from shardwise.watch.run_folder import RunFolder, dump_config

MANIFEST, INDEX = "manifest.json", "tensors.json"
TENSORS = ("rank-0000-000.safetensors", "rank-0001-000.safetensors")
CONFIG = """\
# every kind of value that a config has
task: chess
seed: 3
name: &name fuzzed
data:
  source: synthetic
  num_games: 400
  valid_fraction: 0.05
  num_workers: 0
model:
  architecture: llama
  hidden_dim: 96
  num_layers: 3
  num_heads: 4
training:
  batch_size: 32
  gradient_clip: 1.0
  max_epochs: 2
  compile: false
  optimizer: {name: adamw, lr: 3.0e-3, betas: [0.9, 0.99], weight_decay: 0.01}
  scheduler:
    name: cosine_warmup
    warmup_ratio: 0.05
  fsdp:
  logger: [tensorboard, none]
  wandb_project: *name
"""
LONGEST = 4_000
"""Characters of an error that is still clear."""


@dataclass(frozen=True)
class Answer:
    what: str
    """`refused` or `right`, or what is wrong with it."""
    said: str = ""
    done: str = ""
    """To the file."""

    @property
    def is_right(self) -> bool:
        return self.what in ("refused", "right")


def write_originals(folder: Path) -> None:
    """What is made wrong: a checkpoint of two ranks, a config, the folder of a run."""
    _write_checkpoint(folder / "checkpoints")
    (folder / "config").mkdir()
    (folder / "config" / "fuzzed.yaml").write_text(CONFIG)
    _write_run(folder / "run")


def answer(kind: str, seed: int, originals: Path, scratch: Path) -> Answer:
    """Of one mutation, which follows from kind and seed. `scratch`: a folder, empty before and afterwards."""
    rng = random.Random(f"{kind} {seed}")
    make, ask = KINDS[kind]
    (scratch / "elsewhere").mkdir(parents=True)
    try:
        with _heard() as heard, contextlib.chdir(scratch):
            done = "?"
            try:
                done = make(originals, scratch, rng)
                what = ask(scratch)
            except ShardwiseError as error:
                what = _clear(str(error))
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                what = f"{type(error).__name__}: {str(error)[:300]}"
        said = heard.getvalue()
        return Answer("a traceback" if "Traceback" in said else what, said[-1000:], done)
    finally:
        shutil.rmtree(scratch)


@contextlib.contextmanager
def _heard() -> Iterator[io.StringIO]:
    heard = io.StringIO()
    with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
        yield heard


def _clear(said: str) -> str:
    """An error that can be printed, and read."""
    try:
        said.encode()
    except UnicodeEncodeError:
        return f"an error that cannot be printed: {said[:300]!r}"
    if not said.strip() or len(said) > LONGEST or "\x1b" in said or "\x00" in said:
        return f"an error that is not clear: {said[:300]!r}"
    return "refused"


# ---------------------------------------------------------------- a checkpoint


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2, bias=False))
    return model, torch.optim.AdamW(model.parameters())


def _write_checkpoint(folder: Path) -> None:
    """Step 7, as two ranks write it that share the larger weight."""
    model, optimizer = _model()
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    state = RunState(7, Cursor(1, 20), 0, 0.25, 0.25, {"scale": 1024.0}, [(0, 8)], global_batch=8, samples=53, seed=3)
    state.labels = ["a", "b"]
    state.recent_losses.add(0.5)
    saver = Saver(CheckpointStore(folder), World.alone(), lambda: None)
    saver.save(model, optimizer, state.step, state.as_plain())
    path = saver.wait()[0].path
    tensors, index = load_file(path / TENSORS[0]), json.loads((path / INDEX).read_text())
    larger = "model.0.weight"
    upper, lower = tensors.pop(larger).split([3, 1])
    other = tensors.pop("model.1.weight")
    save_file(tensors | {f"{larger}[0,0]": upper.clone()}, path / TENSORS[0])
    save_file({f"{larger}[3,0]": lower.clone(), "model.1.weight": other}, path / TENSORS[1])
    index[larger]["chunks"] = [[[0, 0], [3, 6], TENSORS[0]], [[3, 0], [1, 6], TENSORS[1]]]
    index["model.1.weight"]["chunks"][0][2] = TENSORS[1]
    (path / INDEX).write_text(json.dumps(index))
    _seal(path, state.as_plain())


def _seal(path: Path, about: dict[str, Any]) -> None:
    names = (INDEX, *TENSORS)
    write_manifest(path, {name: entry_of(path / name) for name in names}, about)


def sealed(body: bytes) -> bytes:
    """A manifest with a right checksum, whatever stands in it."""
    body = body.rstrip().removesuffix(b"}").rstrip()
    digest = hashlib.sha256(body + b"\n}").hexdigest()
    return body + f',\n "sha256": "{digest}"\n}}'.encode()


def _copied(originals: Path, scratch: Path) -> Path:
    shutil.copytree(originals / "checkpoints", scratch / "checkpoints")
    return next((scratch / "checkpoints").glob("step-*"))


def _list_anew(path: Path, name: str) -> None:
    """The manifest says of a changed file what it is now, and has a right checksum."""
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["sha256"]
    data = (path / name).read_bytes()
    manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / MANIFEST).write_bytes(sealed(json.dumps(manifest, indent=1).encode()))


def _wrong_manifest(originals: Path, scratch: Path, rng: random.Random) -> str:
    file = _copied(originals, scratch) / MANIFEST
    content = json.loads(file.read_text())
    how = rng.choice(["resealed", "resealed", "resealed", "not resealed", "bytes", "bytes, resealed"])
    if how == "not resealed":
        text, done = mutated_tree(content, rng)
        data = text.encode()
    elif how == "bytes":
        data, done = mutated_bytes(file.read_bytes(), rng)
    else:
        del content["sha256"]
        if how == "resealed":
            text, done = mutated_tree(content, rng)
            data = text.encode()
        else:
            data, done = mutated_bytes(json.dumps(content).encode(), rng)
        data = sealed(data)
    file.write_bytes(data)
    return f"{how}: {done}"


def _wrong_index(originals: Path, scratch: Path, rng: random.Random) -> str:
    path = _copied(originals, scratch)
    file = path / INDEX
    if rng.random() < 0.75:
        text, done = mutated_tree(json.loads(file.read_text()), rng)
        file.write_text(text)
    else:
        data, done = mutated_bytes(file.read_bytes(), rng)
        file.write_bytes(data)
    return _listed_or_not(path, INDEX, done, rng)


def _wrong_header(originals: Path, scratch: Path, rng: random.Random) -> str:
    path = _copied(originals, scratch)
    name = rng.choice(TENSORS)
    data = (path / name).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + length], data[8 + length :]
    how = rng.choice(["structure", "structure", "structure", "bytes", "length", "whole file"])
    if how == "structure":
        text, done = mutated_tree(json.loads(header), rng)
        header = text.encode()
        data = len(header).to_bytes(8, "little") + header + body
    elif how == "bytes":
        header, done = mutated_bytes(header, rng)
        data = len(header).to_bytes(8, "little") + header + body
    elif how == "length":
        wrong = rng.choice([0, 1, length - 1, length + 1, len(data), 2**31, 2**63, 2**64 - 1, 99_999_999])
        data, done = wrong.to_bytes(8, "little") + data[8:], f"length {wrong}"
    else:
        data, done = mutated_bytes(data, rng)
    (path / name).write_bytes(data)
    return _listed_or_not(path, name, f"{how}: {done}", rng)


def _listed_or_not(path: Path, name: str, done: str, rng: random.Random) -> str:
    if rng.random() < 0.85:
        _list_anew(path, name)
        return f"{done}, listed anew"
    return done


def _wrong_place(originals: Path, scratch: Path, rng: random.Random) -> str:
    path = _copied(originals, scratch)
    name = rng.choice([MANIFEST, INDEX, *TENSORS])
    return f"{name}: {put_in_place(path / name, scratch / 'elsewhere', rng)}"


def _ask_checkpoint(scratch: Path) -> str:
    folder = scratch / "checkpoints"
    path = next(folder.glob("step-*"))
    listed, checked = main(["checkpoint", "list", str(folder)]), main(["checkpoint", "verify", str(folder)])
    if listed not in (0, 2) or checked not in (0, 1, 2):
        return f"exit codes {listed} and {checked}"
    model, optimizer = _model()
    store = CheckpointStore(folder)
    try:
        load_into(model, optimizer, str(path), store, World.alone())
    except ShardwiseError as error:
        return _clear(str(error))
    if checked != 0:
        return "loaded, though verify says that it is damaged"
    state = RunState.of_checkpoint(path)
    about = json.loads((path / MANIFEST).read_text())["about"]
    if "recent_losses" in about:
        about["recent_losses"] = about["recent_losses"][-HISTORY:]
    wrong = [key for key, value in about.items() if _comparable(state.as_plain()[key]) != _comparable(value)]
    expected, found = _plainly_read(path), model.state_dict()
    wrong += [name for name, tensor in found.items() if not torch.equal(tensor, expected[f"model.{name}"])]
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, moments in optimizer.state.items():
        for kind, value in moments.items():
            if not torch.equal(value, expected[f"optimizer.{names[parameter]}.{kind}"]):
                wrong.append(f"{kind} of {names[parameter]}")
    return f"other values than the files have: {', '.join(wrong)}" if wrong else "right"


def _comparable(value: Any) -> Any:
    """1 and 1.0 are the same, NaN is itself, and blocks have no order."""
    if isinstance(value, dict):
        return {key: _comparable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_comparable(each) for each in value]
    return repr(float(value)) if type(value) in (int, float) else value


def _plainly_read(path: Path) -> dict[str, torch.Tensor]:
    """By safetensors alone."""
    files = {file.name: load_file(file) for file in path.glob("*.safetensors")}
    whole = {}
    for name, entry in json.loads((path / INDEX).read_text()).items():
        parts = []
        for offsets, sizes, file in entry["chunks"]:
            key = name if sizes == entry["shape"] else f"{name}[{','.join(map(str, offsets))}]"
            parts.append((offsets, files[file][key]))
        whole[name] = (
            torch.cat([part for _, part in sorted(parts, key=lambda each: each[0])]) if parts[1:] else parts[0][1]
        )
    return whole


# ---------------------------------------------------------------- a config


def _wrong_config(originals: Path, scratch: Path, rng: random.Random) -> str:
    text = (originals / "config" / "fuzzed.yaml").read_text()
    how = rng.choice(["lines", "lines", "lines", "structure", "bytes"])
    if how == "lines":
        changed, done = mutated_yaml(text, rng)
        data = changed.encode(errors="surrogatepass")
    elif how == "structure":
        config = load_config(originals / "config" / "fuzzed.yaml")
        changed, done = mutated_tree(config.model_dump(mode="json", exclude_unset=True), rng)
        data = changed.encode()
    else:
        data, done = mutated_bytes(text.encode(), rng)
    (scratch / "fuzzed.yaml").write_bytes(data)
    return f"{how}: {done}"


def _ask_config(scratch: Path) -> str:
    """Right is a config that is valid in itself: sent to another process or written down, it is the same."""
    config = load_config(scratch / "fuzzed.yaml")
    dumped = config.model_dump()
    if config_from_values(config_values(config)).model_dump() != dumped:
        return "sent to another process, it is another config"
    (scratch / "again.yaml").write_text(dump_config(config))
    again = load_config(scratch / "again.yaml").model_dump()
    return "right" if again == dumped else "written down and read again, it is another config"


# ---------------------------------------------------------------- the folder of a run


def _write_run(folder: Path) -> None:
    run = RunFolder(folder)
    config = load_config(folder.parent / "config" / "fuzzed.yaml")
    run.claim(resume=False, fresh=False, training=config.training)
    run.describe(
        config, {"total_steps": 4, "batch": {"global": 64, "chosen_for": 2, "per_device": 32}, "device": "cpu"}
    )
    for step in range(1, 5):
        run.add_metrics({"step": step, "loss": 1 / step, "grad_norm": 1.0, "lr": 0.1})
        run.add_telemetry({"step": step, "rank": 0, "seconds": {"forward": 0.1}})
    run.add_metrics({"step": 4, "eval": {"loss": 0.2}})
    run.add_telemetry({"step": 4, "checkpoint": 0.1})
    run.close()


def _wrong_run(originals: Path, scratch: Path, rng: random.Random) -> str:
    shutil.copytree(originals / "run", scratch / "run")
    file = scratch / "run" / rng.choice(["run.json"] * 6 + ["metrics.jsonl", "config.yaml", "ranks/rank-0000.jsonl"])
    how = rng.choice(["structure", "structure", "structure", "bytes", "place"])
    if how == "place":
        return f"{file.name}: {put_in_place(file, scratch / 'elsewhere', rng)}"
    if how == "bytes" or file.suffix == ".yaml":
        data, done = mutated_bytes(file.read_bytes(), rng)
        file.write_bytes(data)
    elif file.suffix == ".json":
        text, done = mutated_tree(json.loads(file.read_text()), rng)
        file.write_text(text)
    else:
        lines = file.read_text().splitlines()
        number = rng.randrange(len(lines))
        lines[number], done = mutated_tree(json.loads(lines[number]), rng)
        file.write_text("\n".join(lines) + "\n")
    return f"{file.name}: {how}: {done}"


def _ask_run(scratch: Path) -> str:
    """As a run that goes on asks its folder, and as one that would begin there."""
    folder, config = RunFolder(scratch / "run"), load_config(scratch.parent / "originals" / "config" / "fuzzed.yaml")
    with contextlib.suppress(LaunchError):
        folder.claim(resume=False, fresh=False, training=config.training)
    folder.close()
    folder = RunFolder(scratch / "run")
    folder.claim(resume=True, fresh=False, training=config.training)
    try:
        batch = folder.batch_so_far()
        had, evaluated, changes = folder.had_checkpoint(), folder.evaluated_at(4), folder.changes_to(config)
        folder.forget_after(2)
        left = [record["step"] for record in folder.metrics() if isinstance(record.get("step"), int)]
    finally:
        folder.close()
    if batch is not None and batch != _batch_in(scratch / "run" / "run.json"):
        return f"another batch than the file has: {batch}"
    if not (had is None or had >= 0) or not isinstance(evaluated, bool) or not isinstance(changes, list):
        return f"{had}, {evaluated}, {changes}"
    return "right" if all(step <= 2 for step in left) else f"steps {left} after 2 was gone back to"


def _batch_in(file: Path) -> tuple[Any, Any]:
    batch = json.loads(file.read_text())["batch"]
    return batch["global"], batch["chosen_for"]


Make = Callable[[Path, Path, random.Random], str]
KINDS: dict[str, tuple[Make, Callable[[Path], str]]] = {
    "manifest": (_wrong_manifest, _ask_checkpoint),
    "index": (_wrong_index, _ask_checkpoint),
    "header": (_wrong_header, _ask_checkpoint),
    "place": (_wrong_place, _ask_checkpoint),
    "config": (_wrong_config, _ask_config),
    "run": (_wrong_run, _ask_run),
}
