# make lab       set everything up and open JupyterLab on a tour of ten minutes
# make check     the inner loop, 3 minutes: style, types, rules of the house, and every test that takes under a second;
#                it leaves out the labs' runs, the browser, faults, the judge's mutants, and whatever else is slow
# make test      set everything up and test every part of labkit, in 32 minutes: two of the labs, each class of
#                fault, a tenth of the mutants, one journey through JupyterLab
# make rest      what make test leaves out: most labs, all labs with other numbers of ranks, all mutants, every widget in a
#                browser, the documentation site, more
# make test-all  everything, over an hour
# make test-newest  the tests of make check and the tour with today's newest packages, in an environment of its own; CI
#                never runs it: it fetches the newest torch, on Linux with CUDA, 5 GB
# make test-oldest  the same tests, but for style and types, with the oldest packages that pyproject.toml takes, chosen by
#                uv; also 5 GB
# make test-colab   labkit's core in an environment as Colab's: pip's own report, the tour and three labs; also 5 GB
# make test-versions  all three, and again with other Pythons: make PYTHON=python3.13 test-versions
# make gpu       on a machine with a GPU or several: all checks in order, then numbers; half an hour at most; installs nothing
# make site      one static site: the course, with pages that compute in the browser (npm fetches what they run), and in
#                site/docs the documentation, with a search that needs no server
# make bench     measure everything on this machine, and write benchmarks/README.md
# make pictures  those of README and docs/labs.md anew: one run of four ranks, and the screens of what the labs store
# make notebooks | clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The constraints always apply: they pin everything, and torch to a version whose wheel is known to work here.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

# What `make test-newest` installs into, without the constraints: what pip and conda give to anybody today.
NEWEST := .venv-newest
OLDEST := .venv-oldest
COLAB := .venv-colab

# Three workers, since labs and browsers wait as often as they compute. Each takes one file after the other
# (tests/conftest.py says what else stays together).
# Their plug-ins for notebooks and for anyio would only take half a second to import, in each worker.
PYTEST = $(BIN)/python -m pytest tests -q -n 3 --dist loadscope --no-loadscope-reorder -p no:nbval -p no:anyio
QUICK := not slow and not rest and not browser and not faults
# Kernels, ranks and command lines import labkit hundreds of times: compiled once, not each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: lab test check rest test-all test-newest test-oldest test-colab test-versions gpu site bench pictures notebooks clean
.DELETE_ON_ERROR:

lab: $(VENV)/.has-run
	@echo "JupyterLab's cells and terminals find the command labkit. In any other terminal, in this folder, first type"
	@echo "    source $(BIN)/activate"
	@$(BIN)/labkit lab

test: $(VENV)/.has-browser
	$(PYTEST) -m "not rest" $(MORE)

rest: $(VENV)/.has-browser
	$(PYTEST) -m rest $(MORE)

test-all: $(VENV)/.has-browser
	$(PYTEST) $(MORE)

check: $(VENV)/.has-test
	$(PYTEST) -m "$(QUICK)" $(MORE)

test-newest: BIN := $(NEWEST)/bin
test-newest:
	$(PYTHON) -m venv $(NEWEST)
	$(BIN)/python -m pip install --upgrade --upgrade-strategy eager --editable '.[all,test,dev]'
	$(BIN)/python -m pip check
	$(PYTEST) -m "$(QUICK)" $(MORE)
	$(BIN)/jupyter nbconvert --log-level=WARN --to notebook --execute --output-dir $(NEWEST) notebooks/ten_minutes.ipynb

test-oldest: BIN := $(OLDEST)/bin
test-oldest:
	$(PYTHON) -m venv $(OLDEST)
	$(BIN)/python -m pip install uv
	$(BIN)/uv pip install --python $(BIN)/python --resolution lowest-direct --editable '.[all,test,dev]'
	$(PYTEST) -m "$(QUICK)" --ignore tests/test_lint.py $(MORE)

test-colab:
	$(PYTHON) -m venv $(COLAB)
	$(COLAB)/bin/python -m pip install --requirement tests/colab.txt
	$(COLAB)/bin/python tests/colab.py

test-versions: test-oldest test-newest test-colab

# With the environment of `make lab` if its torch finds a GPU, and otherwise with a Python that has what labkit imports.
gpu:
	@python=$(PYTHON); \
	if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
		python=$(BIN)/python; fi; \
	$$python -c 'import cloudpickle, numpy, psutil, pytest, pytest_timeout, hypothesis, rich, torch, yaml, zmq' || { \
		echo "$$python lacks one of the few packages that this needs; it takes no other: make PYTHON=... gpu"; exit 1; }; \
	PYTHONPATH=. $$python benchmarks/gpu.py $(MORE)

site: $(VENV)/.has-docs
	$(BIN)/sphinx-build -q -E -W --keep-going -b html -d $(VENV)/doctrees docs site/docs
	$(BIN)/labkit export site --live

bench: $(VENV)/.has-bench
	mkdir -p benchmarks/results
	$(BIN)/python benchmarks/launch.py --json benchmarks/results/launch.json
	$(BIN)/python benchmarks/collectives.py --json benchmarks/results/collectives.json
	$(BIN)/python benchmarks/strategies.py --json benchmarks/results/strategies.json
	$(BIN)/python benchmarks/bridge.py --json benchmarks/results/bridge.json
	$(BIN)/python benchmarks/torch_suite.py --json benchmarks/results/torch_suite.json
	$(BIN)/python benchmarks/probes.py --json benchmarks/results/probes.json
	$(BIN)/python benchmarks/held.py --json benchmarks/results/held.json
	$(BIN)/python benchmarks/shaped.py --json benchmarks/results/shaped.json
	$(BIN)/python benchmarks/planner.py --json benchmarks/results/planner.json
	$(BIN)/python benchmarks/published.py --json benchmarks/results/published.json
	$(BIN)/python benchmarks/uncertainty.py --json benchmarks/results/uncertainty.json
	$(BIN)/python benchmarks/foretold.py --json benchmarks/results/foretold.json
	$(BIN)/python benchmarks/rehearsal.py --json benchmarks/results/rehearsal.json
	$(BIN)/python benchmarks/labs.py --json benchmarks/results/labs.json
	$(BIN)/python benchmarks/classroom.py --json benchmarks/results/classroom.json
	$(BIN)/python benchmarks/capstone.py --json benchmarks/results/capstone.json
	$(BIN)/python benchmarks/mutation.py --json benchmarks/results/mutation.json
	$(BIN)/python benchmarks/draws.py --json benchmarks/results/draws.json
	$(BIN)/python benchmarks/tables.py

pictures: $(VENV)/.has-run
	$(BIN)/python docs/first.py
	$(BIN)/python docs/screens.py

notebooks: $(VENV)/.has-test
	$(BIN)/python -c 'from labkit.course.reading.glossary import write; write("notebooks")'
	$(BIN)/jupyter nbconvert --log-level=WARN --to notebook --execute --inplace \
		--ExecutePreprocessor.record_timing=False --ExecutePreprocessor.store_widget_state=False \
		$(wildcard notebooks/[0-9]*.ipynb) notebooks/ten_minutes.ipynb
	$(BIN)/python -c 'from labkit.course.server.trust import note; note("notebooks")'
	$(BIN)/python docs/screens.py

# The stamps live inside the environment: whoever removes it removes them too.
$(VENV)/.has-pip:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
		echo "labkit needs Python 3.11, 3.12 or 3.13; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
		     "Name another one: make PYTHON=python3.12 lab"; exit 1; }
	@if $(BIN)/python -m pip --version >/dev/null 2>&1; then touch $@; \
	else echo "Making the environment $(VENV) with $$($(PYTHON) --version)"; \
		$(PYTHON) -m venv $(VENV) && echo "made by make" >$@; fi

# pip says what it fetches and, since 25.1, how far it has come with installing it.
comma := ,
define install
@echo "Installing $(1) into $(VENV): about $(2) packages, PyTorch the largest; one to three minutes as a rule, and once."
@$(PIP) --quiet --upgrade 'pip>=25.1'
@$(PIP) --editable '$(3)'
@echo "Installed. From now on make begins at once, until a list of packages changes."
endef

$(VENV)/.has-run: pyproject.toml constraints.txt | $(VENV)/.has-pip
	$(call install,labkit and JupyterLab,120,.[lab])
	@touch $@

$(VENV)/.has-test: pyproject.toml constraints.txt | $(VENV)/.has-pip
	$(call install,labkit with JupyterLab and the tests,150,.[all$(comma)test$(comma)dev])
	@touch $@ $(VENV)/.has-run

$(VENV)/.has-docs: pyproject.toml constraints.txt | $(VENV)/.has-pip
	$(call install,labkit and what makes its site,140,.[lab$(comma)docs])
	@touch $@ $(VENV)/.has-run

$(VENV)/.has-bench: pyproject.toml constraints.txt | $(VENV)/.has-pip
	$(call install,labkit and what the benchmarks compare it with,140,.[lab$(comma)bench])
	@touch $@ $(VENV)/.has-run

# The browser tests drive a Chromium that is already there, or Debian's; they download no browser of their own.
$(VENV)/.has-browser: | $(VENV)/.has-test
	@root=; [ "$$(id -u)" = 0 ] || root="sudo -n"; \
	if command -v chromium || command -v chromium-browser || command -v google-chrome; then :; \
	elif command -v apt-get && $$root true; then \
		echo "Installing Chromium for the browser tests: half a minute as a rule" >&3; \
		$$root apt-get update -qq && \
		$$root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-liberation; \
	else false; fi 3>&1 >/dev/null 2>&1 || { echo "No Chromium here, and the browser tests need one:" \
		"apt-get install chromium (Debian), brew install chromium (macOS)"; exit 1; }
	@touch $@

clean:
	if [ -s $(VENV)/.has-pip ]; then rm -rf $(VENV); fi  # an environment that was there before make is kept
	rm -rf $(NEWEST) $(OLDEST) $(COLAB) .ruff_cache .mypy_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
