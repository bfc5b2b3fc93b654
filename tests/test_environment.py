"""pyproject.toml, constraints.txt and environment.yml say the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WANTED = [Requirement(each) for each in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]]]


def test_conda_users_get_the_same_packages_and_ranges():
    """Would catch a dependency that is added in one place only."""
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = [Requirement(each) for each in next(each["pip"] for each in listed if isinstance(each, dict))]
    assert {(each.name, str(each.specifier)) for each in pip} == {(each.name, str(each.specifier)) for each in WANTED}
    python = next(each for each in listed if isinstance(each, str) and each.startswith("python"))
    assert SpecifierSet(python.removeprefix("python")) == SpecifierSet(PROJECT["requires-python"])


@pytest.mark.parametrize(
    "wanted", [*WANTED, *map(Requirement, PROJECT["optional-dependencies"]["dev"])], ids=lambda r: r.name
)
def test_every_pin_is_exact_and_inside_its_range(wanted):
    """Would catch a pin that pip would have to ignore, and a package that is not pinned."""
    pins = dict(re.findall(r"^([\w.-]+)==([\w.+!-]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    found = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    assert found[wanted.name.lower()] in wanted.specifier


def test_the_names_of_the_two_commands_are_in_the_readme_and_in_ci():
    """Would catch a README that promises another command than the one that is tested."""
    assert "make lab" in (ROOT / "README.md").read_text()
    assert "make test" in (ROOT / "README.md").read_text()
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_the_readmes_first_taste_runs(capsys):
    """Would catch an example that has gone stale, and numbers in prose that are not what it prints."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert all(f"rank {rank}: sum 6, sent 72 bytes" in printed for rank in range(4))
