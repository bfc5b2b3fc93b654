# make lab     set everything up and open JupyterLab on the first lab
# make test    set everything up and run every test
# make check   the inner loop: lint, types, rules of the house, fast tests
# make bench | notebooks | clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The constraints always apply: they pin everything, and torch to a version whose wheel is known to work here.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

# Two files of tests at once, in order; those that drive the browser share it, and go one after the other.
TWO := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: lab test check bench notebooks clean lint
.DELETE_ON_ERROR:

lab: $(VENV)/.has-run
	$(BIN)/labkit lab

test: $(VENV)/.has-browser lint
	$(BIN)/python -m pytest tests $(TWO)

check: lint
	$(BIN)/python -m pytest tests -q $(TWO) -m "not slow and not browser and not faults"

lint: $(VENV)/.has-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.has-bench
	mkdir -p benchmarks/results
	$(BIN)/python benchmarks/launch.py --json benchmarks/results/launch.json
	$(BIN)/python benchmarks/collectives.py --json benchmarks/results/collectives.json
	$(BIN)/python benchmarks/strategies.py --json benchmarks/results/strategies.json
	$(BIN)/python benchmarks/probes.py --json benchmarks/results/probes.json
	$(BIN)/python benchmarks/held.py --json benchmarks/results/held.json
	$(BIN)/python benchmarks/shaped.py --json benchmarks/results/shaped.json
	$(BIN)/python benchmarks/planner.py --json benchmarks/results/planner.json
	$(BIN)/python benchmarks/rehearsal.py --json benchmarks/results/rehearsal.json
	$(BIN)/python benchmarks/labs.py --json benchmarks/results/labs.json
	$(BIN)/python benchmarks/classroom.py --json benchmarks/results/classroom.json
	$(BIN)/python benchmarks/capstone.py --json benchmarks/results/capstone.json
	$(BIN)/python benchmarks/mutation.py --json benchmarks/results/mutation.json
	$(BIN)/python benchmarks/draws.py --json benchmarks/results/draws.json

notebooks: $(VENV)/.has-test
	$(BIN)/jupyter nbconvert --log-level=WARN --to notebook --execute --inplace \
		--ExecutePreprocessor.record_timing=False $(wildcard notebooks/[0-9]*.ipynb)

# The stamps live inside the environment: whoever removes it removes them too.
$(VENV)/.has-pip:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
		echo "labkit needs Python 3.11, 3.12 or 3.13; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
		     "Name another one: make PYTHON=python3.12 lab"; exit 1; }
	@if $(BIN)/python -m pip --version >/dev/null 2>&1; then touch $@; \
	else $(PYTHON) -m venv $(VENV) && echo "made by make" >$@; fi

$(VENV)/.has-run: pyproject.toml constraints.txt | $(VENV)/.has-pip
	$(PIP) --editable .
	@touch $@

$(VENV)/.has-test: pyproject.toml constraints.txt | $(VENV)/.has-pip
	$(PIP) --editable '.[test,dev]'
	@touch $@ $(VENV)/.has-run

$(VENV)/.has-bench: pyproject.toml constraints.txt | $(VENV)/.has-pip
	$(PIP) --editable '.[bench]'
	@touch $@ $(VENV)/.has-run

# The browser tests drive a Chromium that is already there, or Debian's; they download no browser of their own.
$(VENV)/.has-browser: | $(VENV)/.has-test
	@root=; [ "$$(id -u)" = 0 ] || root="sudo -n"; \
	if command -v chromium || command -v chromium-browser || command -v google-chrome; then :; \
	elif command -v apt-get && $$root true; then \
		$$root apt-get update -qq && \
		$$root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-liberation; \
	else false; fi >/dev/null 2>&1 || { echo "No Chromium here, and the browser tests need one:" \
		"apt-get install chromium (Debian), brew install chromium (macOS)"; exit 1; }
	@touch $@

clean:
	if [ -s $(VENV)/.has-pip ]; then rm -rf $(VENV); fi  # an environment that was there before make is kept
	rm -rf .ruff_cache .mypy_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
