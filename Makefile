# `make help` lists the targets. Each sets up .venv first, and again when pyproject.toml or constraints.txt has changed.
#
# If PYTHON has a torch when .venv is made, .venv looks through to PYTHON's packages and keeps that torch, so that a GPU
# host without a network needs nothing downloaded. Otherwise .venv gets the versions in constraints.txt. `make clean`
# before trying another PYTHON.

PYTHON ?= python3
TRITON ?= 3.9.0
OLDER_TRITON := 3.6.0
EXTRAS := test,policy,tools,bench,clients

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet
STAMP := $(VENV)/installed
HOST_TORCH := $(VENV)/host-torch.txt
TRITON36 := .venv-triton$(OLDER_TRITON)
TILELANG := .venv-tilelang
WITH_TRITON36 := PYTHONPATH=$(CURDIR)/$(TRITON36)

PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest
PYTEST_ARGS ?= -n 2

.DELETE_ON_ERROR:
.PHONY: help demo test test-full test-changed test-backends test-triton36 test-tilelang lint style types format bench clean setup

help:
	@sed -n 's/^#: //p' Makefile

#: make demo           train a small model, and show which backend served each function
demo: $(STAMP)
	$(PY) -m examples.language_model $(DEMO_ARGS)

# WHOLE: test files whose grids run whole.
#: make test           every test, with a subset of each expensive grid (tests/tiers.py): minutes
test: $(STAMP)
	$(PYTEST) $(PYTEST_ARGS) $(addprefix --whole=,$(WHOLE)) tests

#: make test-full      every test with its whole grid: about an hour on two cores
test-full: $(STAMP)
	$(PYTEST) $(PYTEST_ARGS) --grids=all tests

#: make test-changed   the whole grids of the tests that depend on files changed since SINCE=main
SINCE ?= main
test-changed: $(STAMP)
	@tests=$$($(PY) scripts/find_dependent_tests.py --since $(SINCE)) && \
	    if [ -n "$$tests" ]; then $(PYTEST) $(PYTEST_ARGS) --grids=all $$tests; else echo 'No test depends on the changes.'; fi

#: make test-backends  each backend alone, and kernels without the dispatcher, as users' CI runs them
test-backends: $(STAMP)
	$(PYTEST) $(PYTEST_ARGS) --grids=all tests/test_served.py
	FLA_DISABLE_BACKEND_DISPATCH=1 TRITON_INTERPRET=1 $(PYTEST) $(PYTEST_ARGS) -p tests.baseline -m interpreted --grids=one \
	    tests/ops tests/modules

# An older release that GPU hosts still have. It stands in a folder of its own, first on the path: a second environment would
# cost another copy of torch.
#: make test-triton36  what depends on the release of Triton, with Triton $(OLDER_TRITON)
test-triton36: $(STAMP) $(TRITON36)/installed
	$(WITH_TRITON36) $(PY) -c 'import triton; print("Triton", triton.__version__); assert triton.__version__ == "$(OLDER_TRITON)"'
	@$(WITH_TRITON36) $(PYTEST) $(PYTEST_ARGS) -m triton --grids=one tests || { status=$$?; \
	    [ $$status -eq 5 ] || exit $$status; echo 'Triton $(OLDER_TRITON): NOTHING RAN, no test is marked triton.'; }

# In a folder of its own, which no other test sees: the others expect a machine without TileLang.
#: make test-tilelang  compile TileLang kernels for a GPU that is not here (needs nvcc)
test-tilelang: $(STAMP) $(TILELANG)/installed
	PYTHONPATH=$(CURDIR)/$(TILELANG) TILELANG_CACHE_DIR=$(CURDIR)/$(TILELANG)/cache $(PYTEST) $(PYTEST_ARGS) -m tilelang \
	    --grids=all tests

#: make lint           ruff and mypy
lint: style types

style: $(STAMP)
	$(PY) -m ruff check
	$(PY) -m ruff format --check

types: $(STAMP)
	$(PY) -m mypy

#: make format         what ruff can fix
format: $(STAMP)
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

#: make bench          every benchmark
bench: $(STAMP)
	@for script in $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py)); do \
	    echo "== $$script"; $(PY) $$script $(BENCH_ARGS) || exit; \
	done

#: make clean          remove the environments
clean:
	rm -rf $(VENV) $(TRITON36) $(TILELANG)

#: make setup          make .venv, which the others do by themselves
setup: $(STAMP)

# PYTHON may itself be a virtual environment, whose packages --system-site-packages would not show; a .pth file does.
# Its pip and setuptools are used as well: those that venv brings may be too old, or missing from the host.
$(PY):
	@if $(PYTHON) -c 'import torch' 2>/dev/null; then set -e; \
	    $(PYTHON) -m venv --without-pip $(VENV); \
	    site=$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	    $(PYTHON) -c 'import sys; print(*filter(None, sys.path), sep="\n")' > "$$site/host.pth"; \
	    $(PY) -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $(HOST_TORCH); \
	    $(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip; \
	    echo "Keeping the $$(cat $(HOST_TORCH)) of $(PYTHON)."; \
	else $(PYTHON) -m venv $(VENV); fi

# Requirements that are met are not looked up, so the second install needs a network only for what the host lacks.
$(STAMP): pyproject.toml constraints.txt | $(PY)
	@echo 'Setting up $(VENV), which can take some minutes.'
	@set -e; if [ -f $(HOST_TORCH) ]; then \
	    $(PIP) --no-build-isolation --no-deps -e .; \
	    $(PIP) --no-build-isolation --retries 0 -c $(HOST_TORCH) -e '.[$(EXTRAS)]' || \
	        echo 'Some of the optional packages ($(EXTRAS)) could not be installed; going on with those of the host.'; \
	else \
	    $(PIP) -c constraints.txt -e '.[$(EXTRAS)]'; \
	    $(BRINGS_TRITON) || $(PIP) triton==$(TRITON); \
	fi
	@touch $@

BRINGS_TRITON := $(PY) -c 'import importlib.metadata as m; assert any("triton" in r for r in m.requires("torch"))' \
    2>/dev/null

# Without dependencies, which include torch. Releases that work together.
$(TILELANG)/installed: | $(STAMP)
	rm -rf $(TILELANG)
	$(PIP) --no-deps --target $(TILELANG) tilelang==0.1.15 apache-tvm-ffi==0.1.12 torch-c-dlpack-ext==0.1.5 \
	    z3-solver==4.15.4.0 cloudpickle==3.1.3 ml-dtypes==0.6.0 psutil==7.2.2 tqdm
	@touch $@

$(TRITON36)/installed: | $(STAMP)
	rm -rf $(TRITON36)
	$(PIP) --no-deps --target $(TRITON36) triton==$(OLDER_TRITON)
	@touch $@
