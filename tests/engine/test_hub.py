"""Hub ids: files come from a hub of our own on the loopback, once; afterwards from its cache; errors are one line.

End to end where a command of ours asks it; the client is the true one, and no other network is asked.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_cases import save

from engine.hub import commit_of, is_hub_id
from engine.store import read_manifest
from tests.hub import COMMIT, ID, files_of, serve

ROOT = Path(__file__).parents[2]
OTHER = "f" * 40
ELSEWHERE = {"original/model.safetensors": b"other", "consolidated.safetensors": b"other", "README.md": b"# tiny"}


@pytest.fixture(scope="module")
def hub(tiny_moe, tmp_path_factory):
    """hub(module, *flags, expect=0, **environment) -> a finished command; all share a cache."""
    folder, home = save(tiny_moe("qwen3_moe"), tmp_path_factory.mktemp("tiny")), tmp_path_factory.mktemp("home")
    with serve(files_of(folder) | ELSEWHERE) as served:

        def run(module, *flags, expect=0, **how):
            environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
            environment |= served.environment(home, **how) | {"PYTHONPATH": str(ROOT)}
            command = [sys.executable, "-m", module, *map(str, flags)]
            ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
            assert ended.returncode == expect, ended.stderr
            return ended

        run.asked, run.folder = served.asked, folder
        yield run


def test_a_commit_is_fetched_once_and_only_what_is_read(hub):
    found = Path(hub("engine.hub", "--model", ID, "--revision", COMMIT).stdout.strip())
    assert files_of(found) == files_of(hub.folder)
    assert commit_of(found) == COMMIT
    hub.asked.clear()
    assert Path(hub("engine.hub", "--model", ID, "--revision", COMMIT).stdout.strip()) == found
    assert not any("resolve" in path for path in hub.asked)
    assert Path(hub("engine.hub", "--model", ID).stdout.strip()) == found  # its main branch, which is that commit
    hub.asked.clear()
    assert Path(hub("engine.hub", "--model", ID, "--revision", COMMIT, offline=True).stdout.strip()) == found
    assert not hub.asked


def test_a_folder_of_links_knows_its_commit_and_is_written_once(hub, tmp_path):
    flags = ("--model", ID, "--revision", "main", "--out", tmp_path / "models" / "tiny")
    found = Path(hub("engine.hub", *flags).stdout.strip())
    assert commit_of(found) == COMMIT
    assert (found / "model.safetensors").read_bytes() == (hub.folder / "model.safetensors").read_bytes()
    assert "exists" in hub("engine.hub", *flags, expect=2).stderr


def test_a_store_of_a_hub_model_knows_the_commit_and_is_the_store_of_its_files(hub, tmp_path):
    """Given by id, as a folder of links, and as a plain folder."""
    hub("engine.hub", "--model", ID, "--revision", COMMIT, "--out", tmp_path / "links")
    given = {"id": [ID, "--revision", "main"], "links": [tmp_path / "links"], "folder": [hub.folder]}
    for name, flags in given.items():
        hub("engine.offload", "pack", "--model", *flags, "--out", tmp_path / f"of_{name}")
    stores = {name: read_manifest(tmp_path / f"of_{name}") for name in given}
    assert len({store.identity for store in stores.values()}) == 1
    assert len({store.facts["model"] for store in stores.values()}) == 1
    assert [commit_of(tmp_path / f"of_{name}") for name in given] == [COMMIT, COMMIT, None]


NOBODY = 9  # a port that nobody listens at
UNREACHED = "is not whole in the hub's cache, and the hub is not to be reached"
ERRORS = {
    "no folder": (["/no/where"], {}, "/no/where is no folder; expected a folder, or a hub id such as owner/name"),
    "no model": (["owner/nothing"], {}, "owner/nothing is no folder, and no model that the hub shows you"),
    "not open": (["owner/closed"], {}, "the hub does not open owner/closed to you"),
    "no branch": ([ID, "--revision", "dev"], {}, f"{ID} has no revision 'dev'; expected a commit, branch or tag"),
    "no commit": ([ID, "--revision", OTHER], {}, f"{ID} has no revision '{OTHER}'"),
    "a folder's revision": ([ROOT, "--revision", "main"], {}, "a folder; expected one of a hub id"),
    "offline": (["owner/other", "--revision", COMMIT], {"offline": True}, UNREACHED),
    "a hub that is not there": (["owner/other"], {"port": NOBODY}, UNREACHED),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_is_not_to_be_had_is_one_line(hub, case):
    flags, how, message = ERRORS[case]
    ended = hub("engine.hub", "--model", *flags, expect=2, **how)
    (line,) = ended.stderr.strip().splitlines()
    assert line.startswith("error: ") and message in line and not ended.stdout


@pytest.mark.parametrize("source", ["owner/name", "gpt2", "Qwen/Qwen3-30B-A3B"])
def test_what_can_be_an_id(source):
    assert is_hub_id(source)


@pytest.mark.parametrize("source", ["/a/b", "./a", "a/b/c", "~/a", "a b", "../a", "a/", ""])
def test_what_can_be_none(source):
    assert not is_hub_id(source)
