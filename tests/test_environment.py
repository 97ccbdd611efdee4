"""One pinned set for everybody: pip, conda and pyproject name the same versions, and none names a machine."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
SLURM = (ROOT / "requirements-slurm.lock").read_text(encoding="utf-8")
PIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][A-Za-z0-9.!]*")  # no extras, hashes, markers, addresses, +cpu
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))


def pin_lines(lock: str = LOCK) -> list[str]:
    return [line for line in lock.splitlines() if line and not line.startswith("#")]


def pins() -> dict[str, str]:
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in pin_lines())}


def test_every_line_of_the_lock_is_one_exact_pin():
    lines = pin_lines()
    assert len(lines) > 50
    assert [line for line in lines if not PIN.fullmatch(line)] == []
    assert len(pins()) == len(lines), "a package twice"


def test_the_extra_of_a_cluster_adds_exact_pins_to_the_lock():
    lines = pin_lines(SLURM)
    assert [line for line in lines if not PIN.fullmatch(line)] == []
    extra = {canonicalize_name(line.split("==")[0]) for line in lines}
    assert not extra & pins().keys()
    assert {canonicalize_name(name) for name in PROJECT["optional-dependencies"]["slurm"]} <= extra


def test_the_lock_and_the_environment_name_no_registry_and_no_path():
    for name in (
        "requirements.lock",
        "requirements-slurm.lock",
        "environment.yml",
        "pyproject.toml",
        "Makefile",
        ".ci/run",
    ):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not re.search(r"--(extra-)?index-url|--find-links|--trusted-host|file://|/(home|work|tmp)/", text), name
        assert not re.search(r"https?://", text), name


def test_conda_users_get_the_same_pinned_set():
    """environment.yml pins nothing itself but Python: it installs the lock."""
    assert CONDA["channels"] == ["conda-forge"]
    names = [part for part in CONDA["dependencies"] if isinstance(part, str)]
    (pip,) = [part["pip"] for part in CONDA["dependencies"] if isinstance(part, dict)]
    assert sorted(names) == ["pip", "python=3.11"]
    assert pip == ["-r requirements.lock", "-e ."]


def test_python_is_the_same_everywhere():
    assert "3.11" in SpecifierSet(PROJECT["requires-python"]) and "3.12" not in SpecifierSet(PROJECT["requires-python"])
    assert "Python 3.11" in LOCK.splitlines()[0]
    assert re.search(r"^PYTHON \?= python3\.11$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert sys.version_info[:2] == (3, 11)


@pytest.mark.parametrize("line", PROJECT["dependencies"])
def test_every_direct_dependency_is_pinned_in_the_lock_and_installed_so(line):
    requirement = Requirement(line)
    version = pins()[canonicalize_name(requirement.name)]
    assert version in requirement.specifier
    installed = importlib.metadata.version(requirement.name).partition("+")[0]  # 2.13.0+cpu is torch's 2.13.0
    assert installed == version, "this environment is not the pinned one: install requirements.lock"


def test_every_import_of_ours_is_a_direct_dependency():
    """What is imported anywhere in the project stands in pyproject.toml, not only among what that brings along."""
    sources = [
        path for part in ("engine", "evals", "workflow", "tests") for path in sorted((ROOT / part).rglob("*.py"))
    ]
    found = set()
    for path in sources:
        names = re.findall(r"^ *(?:import|from) ([A-Za-z_]\w*)", path.read_text(encoding="utf-8"), re.MULTILINE)
        found |= set(names)
    ours = {"engine", "evals", "tests", *(path.stem for path in sources)}
    brought = {"packaging"}  # of the package tools: this file alone
    distributions = importlib.metadata.packages_distributions()
    direct = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    for name in sorted(found - set(sys.stdlib_module_names) - ours - brought):
        if name in distributions:  # else a word at the start of a line of prose
            assert {canonicalize_name(owner) for owner in distributions[name]} & direct, name


def test_the_two_commands_are_what_readme_makefile_and_ci_say():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"^ {4}make( |$)", readme, re.MULTILINE) and re.search(
        r"^ {4}make test( |$)", readme, re.MULTILINE
    )
    assert re.search(r"^make test$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100, "it must be executable"
    for target, command in {"all": "snakemake --cores 1 results/all", "test": "python -m pytest"}.items():
        told = subprocess.run(
            ["make", "-n", "-W", "requirements.lock", target], cwd=ROOT, capture_output=True, text=True
        )
        assert told.returncode == 0, told.stderr
        assert command in told.stdout and "pip install" in told.stdout and "-r requirements.lock" in told.stdout


def test_make_retry_forgets_what_failed_and_runs_the_rest():
    told = subprocess.run(["make", "-n", "retry"], cwd=ROOT, capture_output=True, text=True).stdout
    assert told.index("forget_failed.py results/quality") < told.index("snakemake --cores 1 results/all")
