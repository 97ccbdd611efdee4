# The checked configuration, and what the other rules share.

import os
import sys

from engine.errors import UserError
from engine.policies import BASELINE
from evals.settings import check

try:
    SETTINGS = check(config, " + ".join(str(path) for path in workflow.configfiles))
except UserError as exc:
    print(f"error: {exc}", file=sys.stderr)
    os._exit(2)  # Snakemake would wrap the line in its own traceback; no job has started yet

MODELS = list(SETTINGS.models)
POLICIES = list(SETTINGS.policies)
TEXTS = [*SETTINGS.calibration_texts, *SETTINGS.test_texts]
SLOTS = " ".join(f"{name}={percent:g}" for name, percent in SETTINGS.slots.items())
# A rule runs again when the code that makes its numbers changes; figures depend on their own script alone.
ENGINE = [f"engine/{name}.py" for name in ("decision", "emulator", "hook", "log", "policies", "residency", "trace")]
EVALS = [f"evals/{name}.py" for name in ("jobs", "perplexity", "quality")]


wildcard_constraints:
    model="|".join(MODELS),
    policy="|".join(POLICIES),
    text="|".join(TEXTS),


def model_dir(wildcards):
    """Folder or hub id that the model is loaded from."""
    model = SETTINGS.models[wildcards.model]
    return f"results/models/{model.id}" if model.packed else model.source


def model_input(wildcards):
    """The unpacked folder, where there is something to unpack."""
    return [f"results/models/{wildcards.model}"] if SETTINGS.models[wildcards.model].packed else []


def model_flags(wildcards):
    model = SETTINGS.models[wildcards.model]
    revision = f" --revision {model.revision}" if model.revision else ""
    return f"--model-dir {model_dir(wildcards)} --dtype {model.dtype}{revision}"


def policy_row(wildcards):
    """The policy as text: a changed row re-runs that policy alone."""
    return str(SETTINGS.policies[wildcards.policy])


DOCUMENTS = f"--documents {SETTINGS.documents}" if SETTINGS.documents else ""
