# make        the environment, then the main job: every policy scored, tables, figures, results/all
# make test   the environment, then the whole test suite
# make bench  ratios of decision, simulator, emulator and fetch path, in one run
# make report the main job, then its results as one page, results/report.html
# make cluster  on a Slurm cluster: every host whose profile names its node measured, then the main job; SITE='options'
# make mutants  planted faults: each must make its named test fail

PYTHON ?= python3.11
VENV := .venv
SITE ?=
BIN := $(VENV)/bin
# Snakemake and its jobs find python and the packages in the environment
RUN := PATH="$(CURDIR)/$(BIN):$$PATH"

.PHONY: all report test bench cluster mutants retry lint publish clean

all: $(VENV)/ready
	$(RUN) snakemake --cores 1 results/all --quiet host reason
	@cat results/all

$(VENV)/ready: requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; expected Python 3.11; install it or say make PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/slurm: $(VENV)/ready requirements-slurm.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock -r requirements-slurm.lock
	@touch $@

# what was measured is collected by a run that begins after it, also where a host was refused
cluster: $(VENV)/slurm
	-$(RUN) snakemake --profile workflow/profiles/slurm results/measured/cluster $(SITE)
	$(RUN) snakemake --profile workflow/profiles/slurm results/all $(SITE)

report: all
	$(RUN) snakemake --cores 1 --report results/report.html --quiet all

test: $(VENV)/ready
	$(RUN) python -m pytest

bench: $(VENV)/ready
	$(RUN) python tests/bench.py

mutants: $(VENV)/ready
	$(RUN) python tests/mutants.py

# forget the records with failed cells, then run what is missing
retry: $(VENV)/ready
	$(RUN) python workflow/scripts/forget_failed.py results/quality
	$(RUN) snakemake --cores 1 results/all --quiet host reason

lint: $(VENV)/ready
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) snakefmt --check Snakefile workflow/rules

# copy this machine's tables, records and figures into results/published
publish: $(VENV)/ready
	$(RUN) python workflow/scripts/publish.py

clean:
	rm -rf $(VENV) .snakemake
