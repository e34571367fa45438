# draftree: `make demo` runs the main job on a real model, `make test` the tests, `make test-all` also the longest of
# them, `make quick` the shortest; each sets everything up.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
CONSTRAINTS ?= constraints.txt
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: setup demo test test-all test-rest quick durations check bench peers clients docs site notebooks figures wheel clean

setup: $(VENV)/.setup-done

# torch first and by itself, so that the build named in TORCH (a CPU or a CUDA one) is the one that stays;
# CONSTRAINTS= takes the newest of all else that pyproject.toml allows
$(VENV)/.setup-done: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "draftree needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet "$(TORCH)"
	$(PIP) install --quiet --editable ".[dev]" $(addprefix --constraint ,$(CONSTRAINTS))
	touch $@

demo: setup
	$(BIN)/draftree demo

# a thousand modules are compiled once and not by every process of the tests
unexport PYTHONDONTWRITEBYTECODE

PYTEST = $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# most of the tests, in at most seven minutes on two cores; ARGS='--random-order 7' shuffles them
test: setup
	$(PYTEST) --tier test $(ARGS)

# all tests, and those that `make test` leaves
test-all: setup
	$(PYTEST) $(ARGS)

test-rest: setup
	$(PYTEST) --tier rest $(ARGS)

# for the inner loop, at most one minute
quick: setup
	$(PYTEST) --tier quick $(ARGS) tests/unit tests/exact

# records what decides which tests `make test` and `make quick` run; on an idle machine
durations: setup
	$(PYTEST) --record-durations

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/unit/test_imports.py

# everything that the lab notes tell, into BENCH; hours. `make peers bench` has other engines take part.
BENCH   ?= build/bench
PROMPTS ?=
bench: setup
	$(BIN)/python benchmarks/full.py --to $(BENCH) $(addprefix --prompts ,$(PROMPTS)) $(if $(wildcard build/peers),--peers build/peers)

peers: setup
	sh benchmarks/peers/install.sh build/peers

# environments of the clients that tests/server/test_clients.py runs; what is there already is left as it is
clients: setup
	$(BIN)/python tests/support/client_environments.py build/clients

docs: setup
	$(BIN)/python docs/build.py

# the documentation as static pages, into SITE/html; no page sends a request to another host
SITE ?= build/site
site: setup
	$(BIN)/python docs/build_site.py $(SITE)

# runs the notebooks and stores their outputs
notebooks: setup
	$(BIN)/python docs/execute_notebooks.py

# the figures of docs/gallery.md into FIGURES, with their numbers as CSV; about five minutes. LIMIT=2 takes two prompts of
# each category, as the gallery does
FIGURES ?= build/figures
LIMIT   ?= 1
RECORDED = distributions-tinyllama-stories15m tinyllama-untrained tinyllama-trained-greedy passes-tinyllama-trees \
           passes-stories15m-trees passes-smollm2-drafts end-and-cloud-smollm2
figures: setup
	test ! -e $(FIGURES)/traces || { echo "$(FIGURES) has figures already: remove it, or name another FIGURES="; exit 1; }
	$(BIN)/draftree analyse smollm2-135m-instruct --draft head:smollm2-135m-instruct --limit $(LIMIT) \
	  $(patsubst %,--results benchmarks/results/%.jsonl,$(RECORDED)) --output $(FIGURES)

# a wheel for this platform with the native kernels of every variant of its architecture, into dist/
wheel: setup
	rm -rf build/kernels
	$(BIN)/python -m draftree.models.native.build --to build/kernels
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=true $(PIP) wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
