# `make` alone lists what there is. Each target is one thing that CI or a person also types by hand.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# For set-up: the Python to build on, a mirror of PyTorch's CPU builds, a folder of wheels to take
# everything from, and 1 to take torch's CUDA build without a prompt.
PYTHON ?=
TORCH_INDEX ?=
WHEELHOUSE ?=
TORCH_CUDA ?=
VENV ?= .venv
VENV_IPEX ?= .venv-ipex
# The config of make run; none = fine-tune the packaged model.
CONFIG ?=
QUICKSTART := payload/configs/quickstart.toml
# Unique, so that concurrent runs do not meet.
RUN_ID ?= $(if $(CONFIG),quickstart-$(shell date -u +%Y%m%dT%H%M%SZ)-$(shell echo $$$$))
RUN_ID := $(RUN_ID)
# More arguments for pytest, orchestrate run or a benchmark: make test ARGS="-k resume -x"
ARGS ?=
# Tests that run side by side: one more than cores, as many wait for machines or processes.
WORKERS ?= 3
# The same for the other tests of make test-all, which wait for machines for half of their time.
LONG_WORKERS ?= 3
UPGRADE ?=
# A run's id, for the dashboard; none = the newest.
RUN ?=
# One of benchmarks by its file's name, as in BENCH=step; none = the short set.
BENCH ?=

PY := $(VENV)/bin/python
GET := bash bootstrap/install-payload.sh --from-make --writable data --writable runs \
	$(if $(PYTHON),--python "$(PYTHON)") $(if $(TORCH_INDEX),--torch-index "$(TORCH_INDEX)") \
	$(if $(TORCH_CUDA),--torch-cuda)
INSTALL := $(GET) $(if $(WHEELHOUSE),--wheelhouse "$(WHEELHOUSE)")
SETUP_EXTRAS := train,quant,fp8,orchestrate,infra,monitor,dev
# The one command, beside the environment's python.
LINK_COMMAND = ln -sfn "$(CURDIR)/bootstrap/tileforge" $(VENV)/bin/tileforge
SHELL_FILES := bootstrap/tileforge bootstrap/install-payload.sh bootstrap/node-setup.sh bootstrap/shared-storage.sh tests/install_packages.sh tests/nfs/init.sh .ci/run
# make itself ends with 2, whatever failed.
# payload/first_run/__main__.py
NO_PACKAGE := 3
# A recipe with the name MAKE itself would also run under make -n.
AGAIN = $(MAKE)
OR_SAY = || { code=$$?; echo "make $@: exit code $$code (docs/reference/exit_codes.md)" >&2; exit $$code; }
SHOWN = @printf '%s\n' '$(subst ','\'',$(1))'; $(1) $(OR_SAY)
# For the tests marked `sshd`, `rig` and `nfs`; the browser that tests/report and tests/docs open
# pages in; shells that tests/cli complete in; the mount whose server tests/storage stop.
TEST_PACKAGES := openssh-server openssh-client debootstrap iproute2 systemd-container \
	user-mode-linux nfs-kernel-server kmod \
	chromium chromium-driver fish zsh prometheus prometheus-node-exporter sshfs
# The tests that `make test` leaves to `make test-all`; `engine` and `ipex` have their own targets.
LONG_TESTS := slow or sshd or rig or nfs
# Their files. Each of pytest's workers would import all others too, many with transformers.
LONG_FILES = $(shell grep -rlE 'mark\.($(subst $() or ,|,$(LONG_TESTS)))\b' tests --include='test_*.py' | sort)
PYTEST := $(PY) -m pytest --no-loadscope-reorder --numprocesses

.PHONY: help run data test test-all test-packages test-engine test-seeds test-ipex check fix dashboard bench docs lock setup setup-run setup-ipex wheels site clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{ printf "  make %-13s %s\n", $$1, $$2 }'

# Make's -C leaves the shell where it is; a command that a hint shows must fit that folder.
run: export TILEFORGE_SHELL_FOLDER := $(PWD)
ifneq ($(CONFIG),)
run: data
	$(call SHOWN,$(PY) -m payload.orchestrate run --inventory local --config $(CONFIG) --run-id $(RUN_ID) $(ARGS))
	$(call SHOWN,$(PY) -m payload.generate --model runs/$(RUN_ID) --prompt "def test_" --num-samples 1)
else
run: export TILEFORGE_CONSOLE ?= $(if $(filter $(PWD),$(CURDIR)),,$(CURDIR)/)$(VENV)/bin/tileforge
run: setup-run  ## set up if needed, then fine-tune a small chat model on this machine, before and after
	@code=0; $(PY) -m payload.first_run $(if $(RUN_ID),--run-id $(RUN_ID)) \
		$(if $(WHEELHOUSE),--wheelhouse "$(WHEELHOUSE)") $(ARGS) || code=$$?; \
	if [ $$code = $(NO_PACKAGE) ]; then \
		echo "make run: without the packaged model, the quickstart trains a small model from scratch" >&2; \
		exec env -u TILEFORGE_CONSOLE $(AGAIN) --no-print-directory run CONFIG=$(QUICKSTART) ARGS=; \
	fi; [ $$code = 0 ] || { echo "make $@: exit code $$code (docs/reference/exit_codes.md)" >&2; exit $$code; }
endif

data: setup-run  ## tokenize the quickstart's text, the Python standard library's source
	@test -f data/stdlib/meta.json || $(PY) -m payload.data prepare --source stdlib --out data/stdlib --wait $(OR_SAY)

test: setup  ## set up if needed, then the tests of minutes: no machines, no servers that need root
	$(PYTEST) $(WORKERS) -m 'not ($(LONG_TESTS) or engine or ipex or seeds)' $(ARGS)

test-all: test-packages test  ## make test, then every other test that needs no cloud (as root on Debian)
	$(PYTEST) $(LONG_WORKERS) -m '($(LONG_TESTS)) and not seeds' $(if $(filter tests/%,$(ARGS)),,$(LONG_FILES)) $(ARGS)
	$(MAKE) test-ipex

test-packages:  ## as root on Debian or Ubuntu: install what tests start besides
	@bash tests/install_packages.sh $(TEST_PACKAGES)

test-ipex: setup-ipex  ## the tests of the archived engine, in an environment of their own (7 GB)
	$(VENV_IPEX)/bin/python -m pytest tests/ipex -m ipex $(ARGS)

# The provider of the version that the lock has; Pulumi's CLI fetches it where it is not installed.
test-engine: setup  ## the tests on Pulumi's real engine, where `pulumi` is on PATH
	@if command -v pulumi >/dev/null && ! command -v pulumi-resource-gcp >/dev/null; then \
		pulumi plugin install resource gcp \
			"$$($(PY) -c 'from importlib.metadata import version; print(version("pulumi-gcp"))')"; fi
	$(PY) -m pytest tests/engine -m engine $(ARGS)

test-seeds: setup  ## the other seeds and variants of long tests, every chat template, a newcomer
	$(PYTEST) $(LONG_WORKERS) -m 'seeds and not engine' $(ARGS)

check: setup  ## everything that CI checks without running the program
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/shellcheck $(SHELL_FILES)
	$(PY) -m tests.support.prose
	git ls-files -z | xargs -0 $(VENV)/bin/codespell
	$(BUILD_SITE)

fix: setup  ## repair what ruff can repair
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

dashboard: setup  ## Prometheus, and Grafana where it is installed, for the newest run (RUN=ID: that one)
	$(PY) -m payload.orchestrate dashboard $(RUN) $(ARGS) $(OR_SAY)

bench: setup data  ## run the short set, in about two minutes; BENCH=NAME: one benchmark
	$(PY) -m benchmarks$(if $(BENCH),.$(BENCH), --short) $(ARGS)

docs: setup  ## rewrite the tables in docs that follow from the code
	$(PY) -m tests.support.config_reference

# A warning is an error: a link or an anchor without target, a page in no table of contents.
# From scratch, as the navigation of a page that did not change would lack new pages.
BUILD_SITE = $(PY) -m sphinx -E -a -W --keep-going --quiet -b html docs site

site: setup  ## build the docs site, for reading offline: site/index.html
	$(BUILD_SITE)

lock: setup  ## pin all packages for pyproject.toml again (UPGRADE=1: the newest allowed)
	$(PY) bootstrap/make_lock.py --uv $(VENV)/bin/uv $(if $(UPGRADE),--upgrade)

setup:  ## make .venv from the lock, for running, testing and checking
	@$(INSTALL) --venv $(VENV) --extras $(SETUP_EXTRAS) $(OR_SAY)
	@$(LINK_COMMAND)

wheels:  ## download the wheels for make setup on a machine without internet, into WHEELHOUSE=DIR
	@$(GET) --download "$(or $(WHEELHOUSE),../wheels)" --extras $(SETUP_EXTRAS) $(OR_SAY)

setup-run:
	@$(INSTALL) --venv $(VENV) --extras train,orchestrate $(OR_SAY)
	@$(LINK_COMMAND)

setup-ipex:  ## make .venv-ipex: torch 2.8 with intel-extension-for-pytorch
	@$(INSTALL) --venv $(VENV_IPEX) --extras intel,ccl,orchestrate,dev $(OR_SAY)

clean:  ## remove environments and caches; data/ and runs/ stay
	rm -rf $(VENV) $(VENV_IPEX) site .mypy_cache .ruff_cache .pytest_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
