# `make help` lists everything. Needs Python 3.11 or newer, make, and a package registry that pip can reach.

PYTHON   ?= python3
VENV     := .venv
BIN      := $(VENV)/bin
STAMP    := $(VENV)/.installed
ARGS     ?=
PIP_ARGS ?=
# Files of tests that run side by side: many wait more than they compute.
TEST_FILES_AT_ONCE ?= 2
BENCHMARKS := send_recv collectives detection idle_worlds scheduler_cost scrape_cost elastic

.DEFAULT_GOAL := help
.PHONY: help install serve test containers check fmt bench chaos peers throughput soak docs clean
.SILENT:

help: ## Show this list.
	echo "usage: make TARGET [ARGS=\"…\"] [PYTHON=python3.12] [PIP_ARGS=\"…\"]"
	echo
	sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 12

install: $(STAMP) ## Make the virtual environment .venv and install the project with its tools into it.

serve: $(STAMP) ## Serve a model with local workers: make serve ARGS="--model resnet18 --stages 3".
	exec $(BIN)/multiworld serve --weights auto $(ARGS)

test: $(STAMP) ## Run the whole test suite, or a part: make test ARGS="tests/unit -k scheduler".
	exec $(BIN)/python -m pytest --numprocesses $(TEST_FILES_AT_ONCE) --dist loadfile --no-loadscope-reorder $(ARGS)

containers: $(STAMP) ## Test docker-compose.yml on the Docker Engine that runs here, failing where there is none.
	exec $(BIN)/python -m pytest tests/containers --containers $(ARGS)

check: $(STAMP) ## Lint, formatting and types, as CI does.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fmt: $(STAMP) ## Format the code and mend what the linter can.
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

bench: $(STAMP) ## Run the benchmarks, one script a claim; or one: make bench ARGS="send_recv --rounds 3".
	set -e; if [ -n "$(ARGS)" ]; then exec $(BIN)/python -m benchmarks.$(ARGS); fi; \
	for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python -m benchmarks.$$script; done

chaos: $(STAMP) ## Every kind of fault under load, about two minutes; longer: make chaos ARGS="--rounds 6".
	exec $(BIN)/multiworld chaos $(ARGS)

peers: $(STAMP) .venv-peers/.installed ## Kill workers of LitServe, mosec and this service, side by side.
	exec $(BIN)/python -m benchmarks.kill_peers --python .venv-peers/bin/python $(ARGS)

throughput: $(STAMP) .venv-peers/.installed ## Images a second and latency beside FastAPI, LitServe and mosec, about ten minutes.
	exec $(BIN)/python -m benchmarks.throughput --python .venv-peers/bin/python $(ARGS)

soak: $(STAMP) ## Simulate the scheduler with fresh seeds for hours: make soak ARGS="--hours 2".
	exec $(BIN)/python -m simulation soak $(ARGS)

docs: .venv-docs/.installed ## Build the documentation, reference included, into site/; a warning or a broken link is an error.
	exec .venv-docs/bin/python -m mkdocs build --strict $(ARGS)

clean: ## Remove everything that make and the tools made, the virtual environment included.
	rm -rf $(VENV) .venv-peers .venv-docs build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv-peers/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS) ".[peers]"
	touch $@

# Not the project itself, which would bring torch: docstrings are read, not run, and only the settings are imported.
.venv-docs/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	$(PYTHON) -c "$$DOCS_REQUIREMENTS" > .venv-docs/requirements.txt
	.venv-docs/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS) --requirement .venv-docs/requirements.txt
	touch $@

define DOCS_REQUIREMENTS_SCRIPT
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
settings = [requirement for requirement in project["dependencies"] if requirement.startswith("pydantic")]
print(*project["optional-dependencies"]["docs"], *settings, sep="\n")
endef
.venv-docs/.installed: export DOCS_REQUIREMENTS = $(DOCS_REQUIREMENTS_SCRIPT)

# Two makes may start at once: the first installs, the second waits for it and finds it done.
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || { \
		echo "make: $(PYTHON) is missing or older than Python 3.11: try make PYTHON=python3.12" >&2; exit 1; }
	mkdir -p $(VENV)
	$(PYTHON) -c "$$INSTALL" $(VENV) $(STAMP) $(PIP_ARGS)

define INSTALL_SCRIPT
import fcntl, os, subprocess, sys
venv, stamp, *pip_args = sys.argv[1:]
with open(os.path.join(venv, ".lock"), "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if os.path.exists(stamp) and os.path.getmtime(stamp) >= os.path.getmtime("pyproject.toml"):
        sys.exit()
    print("installing into", venv, "(the first time takes some minutes: torch is large)", flush=True)
    pip = os.path.join(venv, "bin", "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"
    try:
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        subprocess.run([*pip, *pip_args, "--editable", ".[dev]"], check=True)
    except subprocess.CalledProcessError as error:
        sys.exit(f"make: the installation failed: {' '.join(error.cmd)}")
    open(stamp, "w").close()
endef
$(STAMP): export INSTALL = $(INSTALL_SCRIPT)
