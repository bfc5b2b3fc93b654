# make lab    set everything up and open JupyterLab on the first lab
# make test   set everything up and run every test
# make check  the inner loop: lint, types, house rules, fast tests (under 3 minutes)
# make bench | notebooks | clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := .make
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
LABS := $(wildcard notebooks/[0-9]*.ipynb)

.PHONY: lab test check bench notebooks clean
.DELETE_ON_ERROR:

lab: $(STAMPS)/run
	$(BIN)/labkit lab

test: $(STAMPS)/test $(STAMPS)/browser
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests

check: $(STAMPS)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests -m "not slow and not browser and not faults" -q

bench: $(STAMPS)/bench
	$(BIN)/python benchmarks/launch.py --json benchmarks/results/launch.json
	$(BIN)/python benchmarks/collectives.py --json benchmarks/results/collectives.json

notebooks: $(STAMPS)/test
	for lab in $(LABS); do $(BIN)/papermill --cwd notebooks --kernel python3 $$lab $$lab || exit 1; done

$(STAMPS)/python:
	@mkdir -p $(STAMPS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "labkit needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version): make PYTHON=python3.12 lab"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@touch $@

$(STAMPS)/run: pyproject.toml constraints.txt | $(STAMPS)/python
	$(PIP) --editable .
	@touch $@

$(STAMPS)/test: pyproject.toml constraints.txt | $(STAMPS)/python
	$(PIP) --editable '.[test,dev]'
	@touch $@ $(STAMPS)/run

$(STAMPS)/bench: pyproject.toml constraints.txt | $(STAMPS)/python
	$(PIP) --editable '.[bench]'
	@touch $@

# The browser tests drive a Chromium that is already there, or Debian's; they never download a browser of their own.
$(STAMPS)/browser: | $(STAMPS)/python
	@if command -v chromium chromium-browser google-chrome >/dev/null 2>&1; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; \
	elif command -v apt-get >/dev/null && sudo -n true 2>/dev/null; then \
		sudo apt-get update -qq && sudo DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; \
	else echo "No Chromium found: the browser tests need one (Debian: apt-get install chromium; macOS: brew install chromium)"; exit 1; fi
	@touch $@

clean:
	rm -rf $(VENV) $(STAMPS) .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
