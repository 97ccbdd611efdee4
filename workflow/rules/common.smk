# The checked configuration, and what the other rules share.

import contextlib
import fcntl
import functools
import os
import shlex
import shutil
import sys
from pathlib import Path

import yaml

from engine.errors import UserError, error
from engine.overlay import replace_whole
from engine.policies import BASELINE, BUNDLES, distinct, load_policies
from evals.cluster import submitted, tell_jobs
from evals.settings import check


def hold_alive():
    """Remove the lock of a killed run, which Snakemake leaves behind: `make` goes on without being asked to unlock.

    Every run shares a lock that the system gives back when its process dies. Who can have it alone is the only one
    alive. Returns the open file, which is held to the end of the process, and whether no other run is alive.
    """
    os.makedirs(".snakemake", exist_ok=True)
    alive = open(".snakemake/expertmiss.alive", "w")
    alone = False
    # refused: another run is alive, or the file system has no such locks
    with contextlib.suppress(OSError):
        fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alone = True
        shutil.rmtree(".snakemake/locks", ignore_errors=True)
    with contextlib.suppress(OSError):
        fcntl.flock(alive, fcntl.LOCK_SH)
    return alive, alone


# a job that a cluster runs for it reads this too: the lock is then another's
ALIVE, ALONE = hold_alive() if workflow.is_main_process else (None, False)

# of a second configuration, which Snakemake merges into the first
replace_whole(config, workflow.config_settings.overwrite_config)


def origins():
    """The file that each top-level key was taken from: later ones are laid over the first, --config over them all."""
    keys = {}
    for path in [*workflow.configfiles, *workflow.config_settings.configfiles]:
        with open(path, encoding="utf-8") as file:
            keys |= dict.fromkeys(yaml.safe_load(file) or {}, os.path.relpath(path))
    return keys | dict.fromkeys(workflow.config_settings.config, "--config")


def refuse(exc):
    """End the run with the one line. Raised, Snakemake would wrap it in its own traceback; no job has started yet."""
    print(f"error: {' '.join(str(exc).split())}", file=sys.stderr, flush=True)
    os._exit(2)


try:
    # a node reads this again for its job, and would find another machine, with other cores
    SETTINGS = check(
        config, origins(), None if workflow.is_main_process else submitted()
    )
except UserError as exc:
    refuse(exc)

if workflow.is_main_process:
    tell_jobs(SETTINGS.this_host, SETTINGS.threads)

MODELS = list(SETTINGS.models)
POLICIES = list(SETTINGS.policies)
TEXTS = [*SETTINGS.calibration_texts, *SETTINGS.test_texts]
SLOTS = " ".join(f"{name}={percent!r}" for name, percent in SETTINGS.slots.items())
# A rule runs again when the code that makes its numbers changes; figures depend on their own script alone.
ENGINE = expand(
    "engine/{name}.py",
    name="decision emulator hook log phase policies residency score_rules trace trace_file trace_schema".split(),
)
EVALS = [f"evals/{name}.py" for name in ("jobs", "parallel", "perplexity", "quality")]


wildcard_constraints:
    model="|".join(MODELS),
    policy="|".join(POLICIES),
    text="|".join(TEXTS),


def source_dir(wildcards):
    """Folder of the model as it was published."""
    return SETTINGS.models[wildcards.model].folder


def source_input(wildcards):
    """What that is made of: the files of a plain folder, or the folder that a rule unpacks or fetches."""
    model = SETTINGS.models[wildcards.model]
    return model_files(model.source) if model.folder == model.source else [model.folder]


def model_dir(wildcards):
    """What is scored, timed and simulated: where experts are stored in fewer bits, that store, else the source."""
    model = SETTINGS.models[wildcards.model]
    return f"results/packed/{model.id}/own" if model.bits else source_dir(wildcards)


def model_input(wildcards):
    model = SETTINGS.models[wildcards.model]
    return [model_dir(wildcards)] if model.bits else source_input(wildcards)


def bits_flags(model):
    return f" --bits {model.bits} --group {model.group}" if model.bits else ""


def model_files(source):
    folder = Path(source)
    return sorted(
        str(path)
        for suffix in ("json", "safetensors")
        for path in folder.glob(f"*.{suffix}")
    )


def model_flags(wildcards):
    model = SETTINGS.models[wildcards.model]
    return f"--model-dir {shlex.quote(model_dir(wildcards))} --dtype {model.dtype}"


def timed_flags(wildcards):
    """The model as it is timed: inflated to the sizes of its row, its experts in the bits of its row."""
    model = SETTINGS.models[wildcards.model]
    sizes = {"width": model.timed_width, "expert-width": model.timed_expert_width}
    widths = "".join(f" --{name} {size}" for name, size in sizes.items() if size)
    return f"--model-dir {shlex.quote(model_dir(wildcards))}{widths}{bits_flags(model)}"


def policy_row(wildcards):
    """The policy as text: a changed row re-runs that policy alone."""
    return str(SETTINGS.policies[wildcards.policy])


def policy_rows(names):
    """Rows of the sheet as text: what reads several policies runs again when one of them changes."""
    sheet = load_policies(config["policies_sheet"])
    return " ".join(str(sheet[name]) for name in names if name in sheet)


PREFETCH = (
    f"--prefetch {shlex.quote(config['prefetch']['sheet'])}"
    f" --prefetch-slots {SETTINGS.prefetch.slots}={SETTINGS.slots[SETTINGS.prefetch.slots]!r}"
)
PREFETCH_ROWS = " ".join(map(str, SETTINGS.prefetch.policies.values()))
DOCUMENTS = f"--documents {SETTINGS.documents}" if SETTINGS.documents else ""
