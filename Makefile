# `make help` lists all targets. Needs Python 3.11 or newer, make, and a package index that pip can reach.

PYTHON   ?= python3
VENV     := .venv
BIN      := $(VENV)/bin
STAMP    := $(VENV)/.installed
# Without the development tools.
SERVING  := $(VENV)/.serving
ARGS     ?=
PIP_ARGS ?=
# Test files that run in parallel.
TEST_FILES_AT_ONCE ?= 2
GRPC     := server/frontend/api/oip_grpc
BENCHMARKS := send_recv collectives detection idle_worlds scheduler_cost leader_cost frontend_cost elastic

.DEFAULT_GOAL := help
.PHONY: help install serve test containers check dist fmt rules bench chaos peers throughput gpu soak mutants proto docs release clean
.SILENT:

help: ## List all targets.
	echo "usage: make TARGET [ARGS=\"…\"] [PYTHON=python3.12] [PIP_ARGS=\"…\"]"
	echo
	sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 12

install: $(STAMP) ## Create the virtual environment .venv and install the project with its development tools.

serve: $(SERVING) ## Serve a model with local workers, for example: make serve ARGS="--model resnet18 --stages 3".
	exec $(BIN)/multiworld serve --weights auto $(ARGS)

test: $(STAMP) ## Run all tests, or a part: make test ARGS="tests/unit -k scheduler".
	exec $(BIN)/python -m pytest --numprocesses $(TEST_FILES_AT_ONCE) --dist loadfile --no-loadscope-reorder $(ARGS)

containers: $(STAMP) ## Test docker-compose.yml on the local Docker Engine; fails without one.
	exec $(BIN)/python -m pytest tests/containers --containers $(ARGS)

check: $(STAMP) ## Run the linters, type checks, import contracts, checks of the documentation, and compare sizes with their budgets.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.size
	$(BIN)/python -m pytest --quiet tests/unit/documents

fmt: $(STAMP) ## Format the code and apply the linter's automatic fixes.
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

RULES := deploy/kubernetes/base/frontends/prometheus-rules.yaml

rules: ## Copy the rules of deploy/prometheus/rules into the PrometheusRule resource for Kubernetes.
	{ sed '/^  groups:$$/q' $(RULES); sed -s '1,/^groups:$$/d; s/^./  &/' deploy/prometheus/rules/*.yml; } > $(RULES).new
	mv $(RULES).new $(RULES)

bench: $(STAMP) ## Run the benchmarks, or one of them: make bench ARGS="send_recv --rounds 3".
	set -e; if [ -n "$(ARGS)" ]; then exec $(BIN)/python -m benchmarks.$(ARGS); fi; \
	for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python -m benchmarks.$$script; done

chaos: $(STAMP) ## Inject every kind of fault under load, about two minutes; longer: make chaos ARGS="--rounds 6".
	exec $(BIN)/multiworld chaos $(ARGS)

peers: $(STAMP) .venv-peers/.installed ## Kill workers of LitServe, mosec, Ray Serve and this service, and compare the effects.
	exec $(BIN)/python -m benchmarks.kill_peers --python .venv-peers/bin/python $(ARGS)

throughput: $(STAMP) .venv-peers/.installed ## Compare throughput and latency with FastAPI, LitServe, mosec and Ray Serve, about ten minutes.
	exec $(BIN)/python -m benchmarks.throughput --python .venv-peers/bin/python $(ARGS)

gpu: $(STAMP) ## Check a GPU in at most nine minutes; results in build/gpu. Without a GPU, the steps are rehearsed on the CPU.
	exec $(BIN)/python -m benchmarks.gpu_check $(ARGS)

soak: $(STAMP) ## Test scheduler and worlds under random faults with new seeds: make soak ARGS="--hours 3".
	status=0; \
	for program in tests.simulation tests.torture.worlds; do $(BIN)/python -m $$program $(ARGS) || status=1; done; \
	MULTIWORLD_TEST_CYCLES=1000 $(BIN)/python -m pytest -q tests/integration/test_worlds_reclaim.py -k leak_nothing || status=1; \
	exit $$status

mutants: $(STAMP) ## Plant known bugs, one at a time, and list the bugs that no test detects. Takes about 30 minutes.
	exec $(BIN)/python -m tests.mutations $(ARGS)

proto: ## Compile open_inference.proto after a change of it; the descriptor is committed.
	$(PYTHON) -m venv .venv-proto
	.venv-proto/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS) "grpcio-tools>=1.71"
	.venv-proto/bin/python -m grpc_tools.protoc -I $(GRPC) --descriptor_set_out=$(GRPC)/open_inference.binpb $(GRPC)/open_inference.proto

docs: .venv-docs/.installed ## Build the documentation site into site/; warnings and broken links are errors.
	exec .venv-docs/bin/python -m mkdocs build --strict $(ARGS)

dist: $(STAMP) ## Build wheel and sdist of multiworld-serving, multiworld and multiworld-client into dist/, and check them.
	rm -rf dist build
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m build --outdir dist packaging/library
	$(BIN)/python -m build --outdir dist packaging/client
	$(BIN)/python -m twine check --strict dist/*

VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

release: dist ## Build all that a release publishes: dist/, and the image multiworld-serving:VERSION, for example: make release ARGS="--build-arg TORCH_INDEX=…".
	docker build $(ARGS) --label org.opencontainers.image.version=$(VERSION) --tag multiworld-serving:$(VERSION) .
	docker run --rm multiworld-serving:$(VERSION) --version

clean: ## Remove all generated files, including the virtual environments.
	rm -rf $(VENV) .venv-peers .venv-docs .venv-proto build dist site *.egg-info packaging/*/build packaging/*/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv-peers/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS) ".[peers]"
	touch $@

# Without the project itself, which depends on torch: docstrings are parsed, nothing is imported.
.venv-docs/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	$(PYTHON) -c "$$DOCS_REQUIREMENTS" > .venv-docs/requirements.txt
	.venv-docs/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS) --requirement .venv-docs/requirements.txt
	touch $@

define DOCS_REQUIREMENTS_SCRIPT
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["optional-dependencies"]["docs"], sep="\n")
endef
.venv-docs/.installed: export DOCS_REQUIREMENTS = $(DOCS_REQUIREMENTS_SCRIPT)

# Safe when two makes run at once: the second waits for the lock and finds the stamp. The development tools include what serving needs.
$(STAMP): EXTRAS := [dev]
$(STAMP) $(SERVING): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || { \
		echo "make: $(PYTHON) is missing or older than Python 3.11: try make PYTHON=python3.12" >&2; exit 1; }
	mkdir -p $(VENV)
	$(PYTHON) -c "$$INSTALL" $(VENV) $@ $(STAMP) ".$(EXTRAS)" $(PIP_ARGS)

define INSTALL_SCRIPT
import fcntl, os, subprocess, sys
venv, stamp, all_stamp, project, *pip_args = sys.argv[1:]
is_fresh = lambda file: os.path.exists(file) and os.path.getmtime(file) >= os.path.getmtime("pyproject.toml")
with open(os.path.join(venv, ".lock"), "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if is_fresh(stamp) or is_fresh(all_stamp):
        open(stamp, "w").close()
        sys.exit()
    print("installing", project, "into", venv, "(the first run downloads 2.5 GB, most of it torch)", flush=True)
    pip = os.path.join(venv, "bin", "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"
    try:
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        subprocess.run([*pip, "--no-compile", *pip_args, "--editable", project], check=True)
        # Compiling the 19,000 modules takes a minute, so it runs in the background. Python compiles a module itself if it imports it earlier.
        compiler = "nice", pip[0], "-m", "compileall", "-qq", "-j", "0", os.path.join(venv, "lib")
        subprocess.Popen(compiler, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    except subprocess.CalledProcessError as error:
        sys.exit(f"make: the installation failed: {' '.join(error.cmd)}")
    open(stamp, "w").close()
endef
$(STAMP) $(SERVING): export INSTALL = $(INSTALL_SCRIPT)
