"""What a release needs: one version, a changelog in its form, files for GitHub that can be read."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import shardwise
from tests.conftest import REPOSITORY

CHANGELOG = (REPOSITORY / "CHANGELOG.md").read_text()


def test_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "shardwise.__version__"}
    # Read from the source, as setuptools does: an import would need what is not installed yet.
    source = (REPOSITORY / "src" / "shardwise" / "__init__.py").read_text()
    assert re.findall(r'^__version__ = "(\d+\.\d+\.\d+)"$', source, re.MULTILINE) == [shardwise.__version__]


def test_the_changelog_has_the_form_of_keep_a_changelog_and_tells_of_this_version() -> None:
    first, *versions = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert first == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", version) for version in versions), versions
    assert f"[{shardwise.__version__}]" in " ".join(versions)
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", CHANGELOG, re.MULTILINE)) <= kinds
    links = re.findall(r"^\[(.+)\]: https://", CHANGELOG, re.MULTILINE)
    assert [f"[{link}]".lower() for link in links] == [name.split(" ")[0].lower() for name in (first, *versions)]


FILES = [*(REPOSITORY / ".github").rglob("*.yml"), REPOSITORY / ".pre-commit-config.yaml"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_workflows_templates_and_hooks_can_be_read(file: Path) -> None:
    assert isinstance(yaml.safe_load(file.read_text()), dict)


def test_a_release_runs_the_check_that_is_there_and_publishes_only_a_tag() -> None:
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "release.yml").read_text())
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    commands = [step["run"].split()[0] for step in build["steps"] if "run" in step]
    assert ".github/check-package" in commands and (REPOSITORY / ".github" / "check-package").stat().st_mode & 0o111
    assert publish["needs"] == "build" and publish["if"] == "github.ref_type == 'tag'"
    assert publish["permissions"] == {"id-token": "write"}
