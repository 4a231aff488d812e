# Plain `make` lists the targets. Everything runs in .venv, which is made with python3, or with `make PYTHON=python3.12`.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

BASE_MODEL ?= models/tiny_flux/base
ADAPTERS ?= models/tiny_flux/adapters
CACHE ?= .run/cache
ARGS ?=

SOURCES := client adapter_store executor models deploy examples benchmarks tests
PROTOS := protos/loraplex/v1/*.proto
STUBS := client/loraplex/v1
PROTOC := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I protos

.DEFAULT_GOAL := help
.PHONY: help install demo test fuzz check protos run run-store run-executor bench train-tiny-flux clean
.PHONY: check-style check-types check-stubs check-protos check-breaking check-imports

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Make .venv and install everything, pinned by constraints.txt

$(INSTALLED): pyproject.toml constraints.txt
	@began=$$(date +%s) && \
	{ test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); } && \
	echo "installing into $(VENV), a minute or more" && \
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]' && \
	echo $$(($$(date +%s) - began)) > $@

demo: protos ## Start both services, draw with every adapter over gRPC, write demo.png, stop
	@$(BIN)/python -m examples.demo demo.png --installed-in "$$(cat $(INSTALLED))"

test: $(INSTALLED) ## Run the tests; ARGS="-k drain" picks some
	$(BIN)/python -m pytest $(ARGS)

fuzz: $(INSTALLED) ## Fuzz the store with 100,000 mutated files; ARGS="--cases 1000000 --seed 2"
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.hostile.fuzz $(ARGS)

check: check-style check-types check-stubs check-protos check-breaking check-imports ## Format, lint, types, stubs, protos, imports

protos: $(INSTALLED) ## Generate client/loraplex/v1 from protos/
	@$(PROTOC) --python_out=client --grpc_python_out=client --mypy_out=quiet:client --mypy_grpc_out=quiet:client $(PROTOS)

run: $(INSTALLED) ## Run both services in the foreground; Ctrl-C drains and stops both
	@$(BIN)/python -m deploy.local --base-model $(BASE_MODEL) --adapters $(ADAPTERS) --cache $(CACHE)

run-store: $(INSTALLED) ## Run the adapter store alone; ARGS="--help" lists its flags
	@$(BIN)/python -m adapter_store --local-roots $(ADAPTERS) --cache-dir $(CACHE) $(ARGS)

run-executor: $(INSTALLED) ## Run the executor alone, on tiny-flux; it waits for the store
	@set -a; . deploy/tiny_flux.env; set +a; exec $(BIN)/python -m executor $(ARGS)

bench: $(INSTALLED) ## Print the benchmarks' tables
	$(BIN)/python -m benchmarks $(ARGS)

train-tiny-flux: $(INSTALLED) ## Train the embedded base model and its adapters again (hours)
	$(BIN)/python -m models.tiny_flux.train $(ARGS)

clean: ## Remove .venv, caches, and what runs left behind
	rm -rf $(VENV) .run .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

check-style: $(INSTALLED)
	$(BIN)/ruff format --check
	$(BIN)/ruff check

check-types: $(INSTALLED)
	$(BIN)/mypy

check-stubs: $(INSTALLED)
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && \
	$(PROTOC) --python_out=$$fresh --grpc_python_out=$$fresh --mypy_out=quiet:$$fresh --mypy_grpc_out=quiet:$$fresh $(PROTOS) && \
	diff -r -x __init__.py -x __pycache__ "$$fresh/loraplex/v1" $(STUBS) || { echo 'stubs are stale: run make protos'; exit 1; }
	@echo 'stubs are fresh'

check-protos: $(INSTALLED)
	$(BIN)/buf lint protos
	$(BIN)/buf format --diff --exit-code protos

# The protos of main are unpacked rather than read by buf, so that worktrees, shallow clones and detached heads do.
check-breaking: $(INSTALLED)
	@main=$$(git rev-parse --verify --quiet main || git rev-parse --verify --quiet origin/main) || true; \
	if [ -z "$$main" ]; then echo 'no main here: nothing to compare the protos with'; exit 0; fi; \
	if ! git cat-file -e "$$main:protos/buf.yaml" 2>/dev/null; then echo 'main has no protos yet: nothing to compare with'; exit 0; fi; \
	old=$$(mktemp -d) && trap 'rm -rf "$$old"' EXIT && \
	git archive "$$main" protos | tar -x -C "$$old" && \
	$(BIN)/buf breaking protos --against "$$old/protos" && echo "protos are compatible with main"

check-imports: $(INSTALLED)
	$(BIN)/python -m pytest -q tests/test_architecture.py
