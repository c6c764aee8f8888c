# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTOS := $(shell find protos -name '*.proto')
PROTO_VENV := .venv-protos
# The floor that pyproject.toml names: stubs refuse to run on anything older than they were made with.
PROTO_TOOLS := grpcio-tools==1.76.0
# What docs/clients.md is tried with: Python's libraries in two environments, for LlamaIndex takes no openai 3,
# and where there is npm the CLIs of agents (2 GB).
CLIENTS := .venv-clients
CLIENT_ENVIRONMENTS := $(CLIENTS)/openai2 $(CLIENTS)/openai3 $(if $(shell command -v npm),$(CLIENTS)/npm)
# What stands before pairs on Ray (2.6 GB): Ray brings as much as all the rest.
RAY := .venv-ray
# Tests and checks start dozens of interpreters: each would compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-clients test-ray test-pages test-gpu gpu-report coverage mutants structure test-failed flakes test-long test-systemd wheel check protos train clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(PROTO_VENV)/.installed: Makefile
	$(PYTHON) -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/pip install --quiet $(PROTO_TOOLS) 'setuptools<81'
	touch $@

$(CLIENTS)/openai%/.installed: tests/clients/openai%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --requirement $<
	touch $@

$(CLIENTS)/npm/.installed: tests/clients/package.json
	mkdir -p $(@D)
	cp $< $(@D)
	npm install --prefix $(@D) --no-audit --no-fund --no-package-lock
	touch $@

$(RAY)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/pip install --quiet --constraint constraints.txt --editable '.[dev,ray]'
	touch $@

# Real conversations through the real pair, checked against recomputation.
demo: $(VENV)/.installed
	$(BIN)/inference-svc demo

# What `make test` leaves to other targets.
USUAL := not long and not systemd and not clients and not ray
# One more worker than two cores: a sixth of the time is waiting. Who is done first takes over from others.
WORKERS ?= 3
test: $(VENV)/.installed
	$(BIN)/pytest -m '$(USUAL)' -n $(WORKERS) --dist worksteal \
		$(if $(SKIP_CORES),$(addprefix --ignore=,$(CORE_TESTS)))

# The cores' tests alone, with the branches that they take: each core is to be tested by its own tests.
# The bound is what is reached, rounded down; raise it with what you add. SKIP_CORES=1 leaves these
# tests out of `make test`, which then runs the rest (.ci/run does both).
CORES := kvd/core inference_svc/core
CORE_TESTS := $(addprefix tests/,$(CORES))
coverage: $(VENV)/.installed
	$(BIN)/pytest $(addprefix --cov=,$(CORES)) --cov-branch --cov-fail-under=98 \
		--cov-report=term-missing:skip-covered $(CORE_TESTS)

# What failed in the last run, without a neighbour on the machine. Nothing failed: nothing runs.
test-failed: $(VENV)/.installed
	$(BIN)/pytest -m '$(USUAL)' --last-failed --last-failed-no-failures none

# All tests several times beside busy neighbours, in random orders: what fails now and then fails here.
# RUNS, BURNERS, WORKERS and SEED: see .ci/flakes. FLAKES names the tests, as FLAKES=tests/fault.
FLAKES ?=
flakes: $(VENV)/.installed
	.ci/flakes $(FLAKES)

# Full counts of what `make test` samples; among them 200 clients for 10 minutes (LOAD_CLIENTS, LOAD_MINUTES).
test-long: $(VENV)/.installed
	$(BIN)/pytest -m 'not systemd and not clients and not ray'

# docs/clients.md, by its own blocks: each client beside the real pair, through a kill of kvd. Needs the
# registries of Python and npm the first time; without npm the agents are skipped.
test-clients: $(VENV)/.installed $(addsuffix /.installed,$(CLIENT_ENVIRONMENTS))
	CLIENTS_DIR=$(CLIENTS) $(BIN)/pytest -m clients -rs tests/clients

# Pairs behind Ray Serve: a cluster of this machine alone, and what else needs Ray. A machine that is busy
# may keep Ray from starting.
test-ray: $(RAY)/.installed
	$(RAY)/bin/pytest -rs --disable-warnings tests/inference_svc/ray_serve tests/examples/test_ray_serve.py tests/examples/test_moving_ray.py

# What runs an engine, with its KV on pages (scheduler.working_kv).
test-pages: $(VENV)/.installed
	INFERENCE_SCHEDULER__WORKING_KV=pages $(BIN)/pytest -m '$(USUAL)' -n $(WORKERS) --dist worksteal \
		tests/integration tests/fault tests/inference_svc/runtime/engine tests/inference_svc/runtime/turns

# What runs on a GPU, in a few minutes. With GPU_TESTS_DEVICE=cpu an interpreter and a simulated device
# stand in for one, as in `make test`.
GPU_TESTS_DEVICE ?= cuda
test-gpu: $(VENV)/.installed
	GPU_TESTS_DEVICE=$(GPU_TESTS_DEVICE) $(BIN)/pytest tests/gpu

# What a GPU is to show, in nine minutes: tests and benches, into docs/results. GPU_REPORT=--tiny shows on
# a CPU that it comes to its end.
gpu-report: $(VENV)/.installed
	$(BIN)/python -m tests.gpu.report $(GPU_REPORT)

# Would a test notice? Mutants of the cores, the tiers and the runtime, drawn with a seed, each judged
# by the tests that run its line, then by the random tests of everything; at least 95 % are to be killed,
# but for those of tests/mutants.toml.
# The first run, and each after a change, records which test runs which line (.mutants/).
# MUTANTS='--only kvd/tiers --count 40 --seed 7' looks elsewhere. See .ci/mutants.py.
mutants: $(VENV)/.installed
	$(BIN)/python .ci/mutants.py $(MUTANTS)

# How the code is built: chains and knots of imports, sizes, what only forwards, each beside its bound.
# `make check` runs it with --check, which fails on a knot and on a file of more than 400 lines;
# STRUCTURE=--verbose lists what is behind each figure. See .ci/structure.py.
structure: $(VENV)/.installed
	$(BIN)/python .ci/structure.py $(STRUCTURE)

# The pair under a real systemd, booted in a container: needs root, and a Debian mirror the first time.
# SYSTEMD_SUITE=trixie for systemd 257; inference services take part where both Pythons are of one version.
SYSTEMD_SUITE ?= bookworm
SYSTEMD_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/cachedattention/systemd
test-systemd: $(VENV)/.installed
	tests/systemd/prepare.sh '$(SYSTEMD_CACHE)' $(abspath $(BIN)/python) $(SYSTEMD_SUITE)
	SYSTEMD_CACHE='$(SYSTEMD_CACHE)' SYSTEMD_SUITE=$(SYSTEMD_SUITE) $(BIN)/pytest -m systemd -rP tests/systemd

# The demo's model, trained again: hours on one thread. TEXT is WikiText-2's valid part, CONVERSATIONS are
# MT-Bench-101's dialogues; see inference_svc/demo/model/README.md.
MINUTES ?= 80
MODEL_OUT ?= demo-model
train: $(VENV)/.installed
	$(BIN)/python -m tests.demo_training.train --text '$(TEXT)' --conversations '$(CONVERSATIONS)' \
		--out '$(MODEL_OUT)' --minutes $(MINUTES)

# What `pip install cachedattention` is made of, in dist/: for hosts without a checkout.
DIST ?= dist
wheel: $(VENV)/.installed
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir '$(DIST)' .

check: $(VENV)/.installed $(PROTO_VENV)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/structure.py --check > $(VENV)/structure.txt
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive inference_svc kvd shared
	$(BIN)/python .ci/audit.py
	$(MAKE) --no-print-directory OUT=$(VENV)/stubs generate-stubs
	diff -r -x __pycache__ -x __init__.py shared/pb $(VENV)/stubs/shared/pb

protos: $(PROTO_VENV)/.installed
	$(MAKE) --no-print-directory OUT=. generate-stubs

# `-I shared/pb=protos` puts the stubs of package kvd.v1 under shared/pb, away from our package kvd.
.PHONY: generate-stubs
generate-stubs:
	mkdir -p $(OUT)
	$(PROTO_VENV)/bin/python -m grpc_tools.protoc -I shared/pb=protos \
		--python_out=$(OUT) --grpc_python_out=$(OUT) --pyi_out=$(OUT) $(PROTOS)

clean:
	rm -rf $(VENV) $(PROTO_VENV) $(CLIENTS) $(RAY) dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
