"""Where are a model's files? In a folder, or on the hub under an id and a revision: then in the hub's own cache.

What is fetched is what we read: configuration, tokenizer and safetensors of the repository's root. A revision may be a
branch or a tag where a command line is tried out; what is recorded is always the commit that it meant.

    folder = resolve("allenai/OLMoE-1B-7B-0924", "6d84c48581ece794365f2b8e9cfb043c68ade9c5")
    resolve("my-model")                                                     # a folder is itself
    python -m engine.hub --model ID --revision COMMIT [--out FOLDER]        # a folder of links into the cache
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from engine.errors import error, main_guard
from engine.files import atomic_folder

READ = ("*.json", "*.jinja", "*.model", "*.safetensors", "*.tiktoken", "*.txt")
UNREAD = ("*/*", "consolidated*")  # other copies of the weights, in layouts that transformers does not read
MANIFEST = "store.json"  # of a packed store
COMMIT = re.compile("[0-9a-f]{40}")
ORIGIN = "from_hub"  # in a folder of links: the id and the commit
_CONNECT = "connect to it (HF_HUB_OFFLINE unset), or give a folder that has the files"


def is_hub_id(source: str) -> bool:
    """Whether it can be one: `owner/name`, or a name of the hub's first days."""
    try:
        validate_repo_id(source)
    except HFValidationError:
        return False
    return True


def resolve(source: str | Path, revision: str | None = None) -> Path:
    """The folder of a model's files, fetched first where it is a hub id. revision: of an id; None: its main branch.

    UserError: neither folder nor id, no such model or revision, not open to you, or neither reached nor in the cache.
    """
    if Path(source).is_dir():
        if revision:
            raise error(f"revision '{revision}' of {source}, a folder", "one of a hub id", "leave the revision out")
        return Path(source)
    source, where = str(source), f"revision '{revision}'" if revision else "its main branch"
    if not is_hub_id(source):
        raise error(f"{source} is no folder", "a folder, or a hub id such as owner/name", "check the path")
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=READ, ignore_patterns=UNREAD))
    except GatedRepoError:
        todo = "accept its terms on its page, then `hf auth login`"
        raise error(f"the hub does not open {source} to you", "a model that you may read", todo) from None
    except RepositoryNotFoundError:
        raise error(f"{source} is no folder, and no model that the hub shows you", "one of them", "check it") from None
    except RevisionNotFoundError:
        raise error(f"{source} has no {where}", "a commit, branch or tag of it", "check it on its page") from None
    except LocalEntryNotFoundError:
        found = f"{source} is no folder, {where} is not whole in the hub's cache, and the hub is not to be reached"
        raise error(found, "one of them", _CONNECT) from None
    except (HTTPError, OSError) as exc:
        found = f"{source}, {where}: {' '.join(str(exc).split())[:200]}"
        raise error(
            found, "its files from the hub", "run it again: what is there already is not fetched twice"
        ) from None


def commit_of(folder: str | Path) -> str | None:
    """The commit of what `resolve` or `link` found, or of what was packed of it; None of what is not from the hub."""
    folder = Path(folder)
    if (folder / ORIGIN).is_file():
        return (folder / ORIGIN).read_text(encoding="utf-8").split()[1]
    if (folder / MANIFEST).is_file():
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["facts"].get("revision")
    return folder.name if folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name) else None


def link(source: str, revision: str | None, out: str | Path) -> Path:
    """A folder at a place of its own, of links to the fetched files and a note of where they came from."""
    folder = resolve(source, revision)
    with atomic_folder(out, 0) as building:
        for file in sorted(folder.iterdir()):
            (building / file.name).symlink_to(file.absolute())
        (building / ORIGIN).write_text(f"{source} {commit_of(folder)}\n", encoding="utf-8")
    return Path(out)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.hub", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a hub id")
    parser.add_argument("--revision", help="a commit, branch or tag; default its main branch")
    parser.add_argument("--out", help="a folder of links to write; default: print where the files are")
    a = parser.parse_args()
    print(link(a.model, a.revision, a.out) if a.out else resolve(a.model, a.revision))


if __name__ == "__main__":
    main_guard(main)
