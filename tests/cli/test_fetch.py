"""`shardwise fetch` from a hub on this machine, then training without any hub."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from shardwise.cli import main
from shardwise.config import load_config
from shardwise.config.hub import HubName, hub_names, use_fetched
from shardwise.errors import ConfigError
from shardwise.tasks.chess.games import random_game
from tests.cli.program import SHARDWISE, run_program
from tests.hub import write_model

COMMIT = "a" * 40
CONFIG = """
task: chess
data: {source: hub, dataset: someone/games, split: train}
tokenizer: {max_seq_len: 64}
model: {name: someone/tiny-llama}
training: {max_steps: 2, batch_size: 2, num_gpus: 1}
"""


class Hub(ThreadingHTTPServer):
    """As much of the hub's protocol as downloading a repository takes."""

    def __init__(self, repositories: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.repositories = repositories
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlparse(self.path).path)
        self.server.asked.append(path)
        for repository, folder in self.server.repositories.items():
            kind, name = repository.split(":")
            files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
            if path.startswith(f"/api/{kind}s/{name}/tree/"):
                return self._send(json.dumps([_entry(folder, file) for file in files]).encode(), with_body)
            if path.startswith(f"/api/{kind}s/{name}"):
                about = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files], "tags": []}
                return self._send(json.dumps(about).encode(), with_body)
            prefix = f"/{'datasets/' if kind == 'dataset' else ''}{name}/resolve/"
            if path.startswith(prefix):
                file = folder / path.removeprefix(prefix).split("/", 1)[1]
                if file.is_file():
                    return self._send(file.read_bytes(), with_body)
        self.send_error(404)
        return None

    def _send(self, content: bytes, with_body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(content)


def _entry(folder: Path, file: str) -> dict[str, object]:
    content = (folder / file).read_bytes()
    return {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    games = tmp_path / "hub" / "games"
    games.mkdir(parents=True)
    lines = [json.dumps({"text": random_game(1, index, 20)}) for index in range(12)]
    (games / "train.jsonl").write_text("\n".join(lines))
    model = write_model(tmp_path / "hub" / "model")
    (model / "pytorch_model.bin").write_bytes(b"the same weights again")
    server = Hub({"dataset:someone/games": games, "model:someone/tiny-llama": model})
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_what_is_fetched_trains_without_internet(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "chess.yaml").write_text(CONFIG)
    online = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home")}
    done = run_program([SHARDWISE, "fetch", "chess.yaml"], tmp_path, **online)
    assert done.returncode == 0, done.stderr
    model, data = tmp_path / "fetched" / "models" / "someone" / "tiny-llama", tmp_path / "fetched" / "datasets"
    assert (model / "model.safetensors").read_bytes() == (tmp_path / "hub" / "model" / "model.safetensors").read_bytes()
    assert not (model / "pytorch_model.bin").exists(), "the same weights as a pickle are not needed"
    assert (data / "someone" / "games" / "train.jsonl").is_file()
    assert not list(tmp_path.glob("fetched/**/*.fetching")) and not list(model.glob(".cache"))
    assert "shardwise train chess.yaml --set offline=true" in done.stdout

    asked = len(hub.asked)
    again = run_program([SHARDWISE, "fetch", "chess.yaml"], tmp_path, **online)
    assert "is in fetched/models/someone/tiny-llama already" in again.stdout and len(hub.asked) == asked

    offline = {**online, "HF_HOME": str(tmp_path / "another home")}
    trained = run_program([SHARDWISE, "train", "chess.yaml", "--set", "offline=true"], tmp_path, **offline)
    assert trained.returncode == 0, trained.stderr
    assert "step 2/2" in trained.stdout
    assert len(hub.asked) == asked, "nobody asked the hub"
    saved = (tmp_path / "runs" / "chess" / "config.yaml").read_text()
    assert "name: someone/tiny-llama" in saved, "the run's config says what was asked, not where it lay"
    exported = run_program([SHARDWISE, "export", "runs/chess", "--to", "model"], tmp_path, **offline)
    assert exported.returncode == 0, exported.stderr


def test_a_name_that_the_hub_does_not_know_is_said_and_leaves_nothing(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "chess.yaml").write_text(CONFIG)
    done = run_program(
        [SHARDWISE, "fetch", "chess.yaml", "--set", "model.name=someone/other"], tmp_path, HF_ENDPOINT=hub.address
    )
    assert done.returncode == 2
    assert "model.name: someone/other could not be fetched from the hub" in done.stderr
    assert "Is the name right, is there internet" in done.stderr and "Traceback" not in done.stderr
    assert not list((tmp_path / "fetched" / "models").rglob("*other*"))


@pytest.mark.parametrize("what", ["data={}", "model={}"])
def test_without_a_hub_this_is_said_at_once(tmp_path: Path, what: str) -> None:
    """The library would try five times more, half a minute long."""
    (tmp_path / "chess.yaml").write_text(CONFIG)
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
        done = run_program([SHARDWISE, "fetch", "chess.yaml", "--set", what], tmp_path, HF_ENDPOINT=nobody)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert "could not be fetched from the hub: " in lines[0] and "Connection refused" in lines[0]
    assert lines[1].startswith("  Is the name right, is there internet") and len(lines) == 2, done.stderr


def test_a_folder_without_files_does_not_count_as_fetched(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "chess.yaml").write_text(CONFIG)
    place = tmp_path / "fetched" / "datasets" / "someone" / "games"
    (place / "data").mkdir(parents=True)
    offline = run_program([SHARDWISE, "train", "chess.yaml", "--set", "offline=true"], tmp_path)
    assert offline.returncode == 2
    assert "someone/games is not in fetched (fetched/datasets/someone/games is empty)" in offline.stderr
    done = run_program([SHARDWISE, "fetch", "chess.yaml", "--set", "model={}"], tmp_path, HF_ENDPOINT=hub.address)
    assert done.returncode == 0, done.stderr
    assert (place / "train.jsonl").is_file()


@pytest.mark.parametrize("name", ["/data/modles/llama", "./llama", "../llama", "~/llama", "models/meta/llama"])
@pytest.mark.parametrize("command", [["fetch"], ["config", "show"]])
def test_a_path_that_leads_nowhere_is_not_taken_for_a_name_on_the_hub(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    command: list[str],
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "0")
    config = tmp_path / "chess.yaml"
    config.write_text(f"task: chess\noffline: true\nmodel: {{name: {name}}}\n")
    assert main([*command, str(config)]) == 2
    message = capsys.readouterr().err
    place = Path(name).expanduser() if name.startswith("~") else name
    assert (
        f"model.name: there is no folder {place} (looked for from {Path.cwd()}), and it is no name on the hub"
        in message
    )
    assert "shardwise fetch" not in message


def test_offline_without_fetching_says_what_to_run(tmp_path: Path) -> None:
    (tmp_path / "chess.yaml").write_text(f"offline: true\n{CONFIG}")
    done = run_program([SHARDWISE, "train", "chess.yaml"], tmp_path)
    assert done.returncode == 2
    assert "offline: true, but data.dataset: someone/games is not in fetched" in done.stderr
    assert (
        "and there is no folder of that name. Where there is internet, run:  shardwise fetch chess.yaml" in done.stderr
    )
    assert not (tmp_path / "runs").exists()


def test_a_config_that_names_nothing_has_nothing_to_fetch(tmp_path: Path) -> None:
    (tmp_path / "cells.yaml").write_text("task: cells\n")
    done = run_program([SHARDWISE, "fetch", "cells.yaml"], tmp_path)
    assert done.returncode == 0 and "there is nothing to fetch" in done.stdout


def test_names_are_told_from_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "images.yaml").write_text(
        "task: images\ndata: {source: hub, dataset: a/b}\nmodel: {name: mine}\noffline: true"
    )
    config = load_config("images.yaml")
    assert hub_names(config) == [HubName("dataset", "a/b", "data.dataset")]
    with pytest.raises(ConfigError, match=r"data.dataset: a/b is not in fetched"):
        use_fetched(config)
    place = tmp_path / "fetched" / "datasets" / "a" / "b"
    place.mkdir(parents=True)
    (place / "data.jsonl").write_text("")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "0")
    assert use_fetched(config).data.dataset == "fetched/datasets/a/b"  # type: ignore[attr-defined]
    assert use_fetched(config).model.name == "mine"  # type: ignore[attr-defined]
