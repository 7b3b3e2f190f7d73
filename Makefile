# make quickstart   sets up .venv and trains a small model on 4 CPU ranks
# make test         sets up .venv and runs all tests
# make explore      searches for counterexamples, others in every run: 100,000 fault schedules of the simulated cluster
#                   (make explore SCHEDULES=1000 for fewer), 2,000 tiny plans beside the best of all (PLANS=200 for
#                   fewer), far more examples of properties
# make chaos        long runs that lose processes, nodes, messages and disks (half an hour)
# make dashboards   writes boards and rules again from their code
# make image        builds the image for CPUs and trains in it (as root, with buildah and debootstrap; ten minutes)
# make check        format, lint, types, import rules, sizes
#
# PYTHON       an interpreter of 3.11 or newer:  make quickstart PYTHON=python3.12
# TORCH_INDEX  a package index that has torch's CPU builds, far smaller than the default ones on Linux:
#              make quickstart TORCH_INDEX=https://download.pytorch.org/whl/cpu
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH_INDEX ?=
SCHEDULES ?= 100000
PLANS ?= 2000

BIN := .venv/bin
# Modules are compiled when they are first imported: most of what is installed never is.
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q --no-compile
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test kernels explore chaos image check dashboards setup setup-dev packages clean

quickstart: setup
	$(BIN)/rayfcp train jobs/quickstart.yaml

test: setup-dev kernels
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

# What planners and simulator compile, by two processes, once: tests do not wait for it.
kernels: setup-dev
	$(BIN)/python -m tests.precompile

explore: setup-dev kernels
	$(BIN)/python -m tests.simulated --first $$(date +%s)00000 --count $(SCHEDULES)
	$(BIN)/python -m tests.plan.oracle --first $$(date +%s)0000 --count $(PLANS)
	$(BIN)/python -m pytest -n auto --dist loadscope --no-loadscope-reorder --timeout 0 --hypothesis-profile=explore -m hypothesis tests

chaos: setup-dev
	$(BIN)/python -m tests.chaos.long

image:
	jobs/docker/check.sh

dashboards: setup-dev
	$(BIN)/python -m dashboards.generate

check: setup-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/test_house.py

setup: .venv/installed
setup-dev: packages .venv/installed-dev

# Programs that tests start: Prometheus, Chromium.
packages:
	@.ci/install-packages

# Stamps, so that the set-up runs once, and again when what it installs has changed.
.venv/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "PYTHON is '$(PYTHON)', must be Python 3.11 or newer; run make PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	touch $@

# torch first and pinned exactly: left to the resolver, the newest build with CUDA would win over a CPU build.
.venv/torch: .venv/made constraints.txt
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt \
		"$$(grep '^torch==' constraints.txt)"
	touch $@

.venv/installed: .venv/torch pyproject.toml
	$(PIP) -c constraints.txt -e .
	touch $@

.venv/installed-dev: .venv/torch pyproject.toml
	$(PIP) -c constraints.txt -e '.[dev]'
	touch $@ .venv/installed

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
