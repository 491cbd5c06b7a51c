"""The process that ranks are forked from."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, multiprocessing
from shardwise.launch.server import start_server
start_server([])
ranks = multiprocessing.get_context("forkserver").Pool(1)
print(ranks.apply(gc.get_freeze_count))
ranks.close()  # not `terminate`: what is forked from this server does not hear SIGTERM until it is a rank
ranks.join()
"""


REHEARSAL = """
import multiprocessing
from shardwise.config import parse_config
from shardwise.config.load import config_values
from shardwise.launch.server import start_server
start_server([], config_values(parse_config("task: chess\\nmodel: {architecture: llama}")))
ranks = multiprocessing.get_context("forkserver").Pool(1)
print(ranks.apply(eval, ("'transformers.models.llama.modeling_llama' in __import__('sys').modules",)))
ranks.close()
ranks.join()
"""


def test_a_model_that_was_rehearsed_has_its_code_imported_in_every_rank() -> None:
    done = subprocess.run([sys.executable, "-c", REHEARSAL], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "True\n"


def test_no_collection_in_a_rank_looks_at_what_the_server_had_imported() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) > 100_000
