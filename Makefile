# A bare machine needs python3 (3.11 to 3.13, with venv and pip), git and make. Only pip uses the network.
#   make test        everything that CI checks
#   make install     what all others begin with: the environment in .venv
#   make demo        the demonstration, into results/demo
#   make docs        the documentation's pages as a site, into site
#   make format      rewrite the code in the project's format
#   make slow        the tests that take long
#   make benchmark   the benchmarks
#   make clean       remove what `make` installed and cached (results stay)
# Another Python: make test PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin
# The name holds the interpreter, so that another PYTHON makes the environment anew.
INSTALLED := .venv/installed-with-$(notdir $(PYTHON))

export MPLBACKEND := Agg
# The tests start hundreds of processes, each of which would read all sources anew.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := test
.PHONY: test install demo docs format slow benchmark clean

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
		echo "Motley needs Python 3.11 to 3.13, but $(PYTHON) is $$($(PYTHON) --version 2>&1 | tail -n 1);" \
			"name another one: make PYTHON=python3.12" >&2; exit 1; }
	@echo "== making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear .venv
	@echo "== installing Motley, torch and the tools into .venv (a minute or two)"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs,runtime]'
	@touch $@

install: $(INSTALLED)

# One thread a process: there are as many workers as cores, and threads that wait for one another only take time from them.
test: $(INSTALLED)
	@echo "== ruff"
	@$(BIN)/python -m ruff check --quiet .
	@$(BIN)/python -m ruff format --quiet --check . || { \
		echo "some files are not in the project's format; 'make format' rewrites them:" >&2; \
		$(BIN)/python -m ruff format --check . >&2; exit 1; }
	@echo "== mypy; beside it, what is compiled once on a machine"
	@$(BIN)/python -W ignore::RuntimeWarning -m partition.estimated & compilation=$$!; \
		$(BIN)/python -m mypy || { wait $$compilation; exit 1; }; \
		wait $$compilation || true
	@echo "== import arrows"
	@$(BIN)/lint-imports
	@echo "== pytest"
	@OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal

demo: $(INSTALLED)
	@$(BIN)/motley demo --out results/demo
	@echo "The results lie in results/demo:"
	@ls results/demo

docs: $(INSTALLED)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "Open site/index.html in a browser; '$(PYTHON) -m http.server -d site' serves it, with search."

format: $(INSTALLED)
	@$(BIN)/python -m ruff check --quiet --fix .
	@$(BIN)/python -m ruff format .

slow: $(INSTALLED)
	@$(BIN)/python -m pytest -q -m slow

benchmark: $(INSTALLED)
	@if [ -f benchmarks/run.py ]; then $(BIN)/python benchmarks/run.py; else echo "there is no benchmarks/run.py"; fi

clean:
	rm -rf .venv .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist site *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
