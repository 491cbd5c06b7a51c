"""A version of PyTorch that nobody has tested shardwise on is told."""

from __future__ import annotations

import pytest
import yaml

from shardwise.compat.versions import NEWEST, OLDEST, untested_version
from tests.conftest import REPOSITORY


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0+cu130", "2.13.1", "2.15.0", "2.15.3+cpu", "2.14.0a0+git1234567"])
def test_a_version_within_the_range_is_not_worth_a_word(version: str) -> None:
    assert untested_version(version) is None


@pytest.mark.parametrize(
    "version", ["2.10.1", "2.16.0", "2.16.0.dev20261101+cu132", "2.9.0", "2.100.0", "3.0.0", "odd"]
)
def test_a_version_outside_is_told_in_one_line_with_what_to_do(version: str) -> None:
    assert untested_version(version) == (
        f"PyTorch {version} is outside the versions that shardwise is tested on (2.11 to 2.15). If something breaks, install one "
        "of those: pip install 'torch>=2.11,<2.16'"
    )


def test_the_range_is_what_the_package_requires_and_the_workflow_runs() -> None:
    oldest, newest = (".".join(map(str, end)) for end in (OLDEST, NEWEST))
    assert f'"torch>={oldest}"' in (REPOSITORY / "pyproject.toml").read_text()
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "test.yml").read_text())
    run = workflow["jobs"]["pytorch"]["strategy"]["matrix"]["torch"]
    assert [version.rpartition(".")[0] for version in run] == [oldest, newest]
