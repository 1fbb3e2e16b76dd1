# Every target sets up what it needs. `make demo` and `make test` are the two to know.
#
#   make PYTHON=/path/to/python3.12 test     another interpreter than the newest supported one
#   make test PYTEST_ARGS="-k scheduler"     some of the tests
SHELL := bash
.DEFAULT_GOAL := help

PYTHON ?=
VENV ?= .venv
AOT_VENV ?= .venv-aot
FUTURE_VENV ?= .venv-future
# Of what hangs on JAX and on other packages: some minutes.
FUTURE_TESTS ?= tests/pallas_kernels/test_compat.py tests/pallas_kernels/cpu/test_native_int8_linear.py \
  tests/engine/execution/programs tests/engine/execution/test_step.py tests/engine/test_llm.py tests/models/loading \
  tests/server/test_grpc_service.py tests/server/http/test_openai_client.py
EXTRAS ?= test,http,check,plots,docs
BIN := $(VENV)/bin
PYTEST_ARGS ?=
# Tests run in this many processes, four at the most: a module's tests in one of them, which shares
# its engines. 0 is none but pytest's own. A process that dies, for lack of memory mostly, ends the run:
# one started in its place repeats the test that killed it, or waits for ever for its share of the tests.
TEST_WORKERS ?= logical
WORKERS := -n $(TEST_WORKERS) --maxprocesses 4 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder
SOAK_STEPS ?= 1000000
SOAK_SECONDS ?= 1800
FUZZ_MESSAGES ?= 100000
FUZZ_REQUESTS ?= 10000
# Of azure_2023_conv.csv and azure_2023_code.csv.
TRACE_DIR ?= traces
# Compiled steps are kept between test runs; empty turns it off.
export OCTAVO_TEST_CACHE ?= .jax_cache
# Images of containers often forbid byte code. Without it each process compiles all that it imports, and pytest
# rewrites every test in every run: 12 s of a core for each process that collects.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

.PHONY: venv
venv: ## build or refresh the virtual environment
	@tools/make_venv.sh $(VENV) $(EXTRAS) $(PYTHON)

.PHONY: demo
demo: venv ## generate from the packaged model, with a progress bar and a throughput line
	@$(BIN)/octavo generate --prompt "The capital of France is" --prompt "Water boils at" \
	  --prompt "def fibonacci(n):" --prompt "Once upon a time" --max-tokens 32 --temperature 0

.PHONY: test
test: venv ## run the tests
	@$(BIN)/python -m pytest $(WORKERS) $(PYTEST_ARGS)

.PHONY: soak
soak: venv ## run the property tests for long
	@$(BIN)/python -m pytest -m hypothesis --hypothesis-profile=soak $(PYTEST_ARGS)
	@$(BIN)/python -m octavo.engine.simulation.soak --steps $(SOAK_STEPS)

.PHONY: oracle
oracle: venv ## play all recorded runs of the scheduler, and say which decide otherwise
	@$(BIN)/python -m tests.oracle.record --check

.PHONY: oracle-record
oracle-record: venv ## record what the scheduler decides, after a change of decisions
	@$(BIN)/python -m tests.oracle.record

.PHONY: soak-server
soak-server: venv ## keep a live server at 1.5 times its capacity for half an hour
	@$(BIN)/python -m benchmarks.server_soak --seconds $(SOAK_SECONDS) $(ARGS)

.PHONY: multihost
multihost: venv ## run engines over groups of two and four processes, and kill members of them
	@OCTAVO_MULTIHOST=1 $(BIN)/python -m pytest tests/engine/hosts tests/server/route/test_group_behind_a_front.py $(PYTEST_ARGS)

.PHONY: fleet
fleet: venv ## run servers on a local Ray cluster behind a front, and kill some of them
	@tools/with_ray.sh $(BIN)/python -m pytest tests/server/ray/test_fleet.py $(PYTEST_ARGS)

.PHONY: chaos
chaos: venv ## kill a hundred servers behind two fronts, and stop, drain and replace others, under readers (ARGS="--kills 5")
	@$(BIN)/python -m benchmarks.chaos $(ARGS)

.PHONY: chaos-matrix
chaos-matrix: venv ## kill, stop, slow, part and repeat every part of a fleet, under readers (ARGS="--times 5 --part moving")
	@$(BIN)/python -m benchmarks.chaos_matrix $(ARGS)

.PHONY: chaos-ray
chaos-ray: venv ## kill a hundred servers on a local Ray cluster under readers (ARGS="--kills 5")
	@tools/with_ray.sh $(BIN)/python -m benchmarks.chaos_ray $(ARGS)

.PHONY: models
models: venv ## test every family and every kind of layer, those that `make test` leaves out too
	@OCTAVO_MODELS=1 $(BIN)/python -m pytest tests/models tests/engine/test_recurrent_layers.py tests/engine/test_windows.py tests/engine/test_gemma4.py $(PYTEST_ARGS)

.PHONY: guidellm
guidellm: venv ## have GuideLLM, a benchmark client that nobody here wrote, measure a live server
	@tools/check_guidellm.sh $(BIN)/python

.PHONY: routers
routers: venv ## have routers that nobody here wrote spread requests over two live servers
	@tools/check_routers.sh $(BIN)/python

.PHONY: manifests
manifests: venv ## check deploy/kubernetes against Kubernetes' schemas (ARGS="--crds FOLDER" for those of other kinds)
	@tools/check_manifests.sh $(BIN)/python $(ARGS)

.PHONY: clients
clients: venv ## have clients and frameworks that nobody here wrote use a live server (ARGS=--all for more of them)
	@tools/check_clients.sh $(BIN)/python $(ARGS)

.PHONY: lm-eval
lm-eval: venv ## have lm-evaluation-harness score texts by a live server
	@tools/check_lm_eval.sh $(BIN)/python

.PHONY: fuzz
fuzz: venv ## send a live server 100,000 messages that no sane client sends
	@$(BIN)/python -m benchmarks.fuzz --messages $(FUZZ_MESSAGES) $(ARGS)

.PHONY: fuzz-http
fuzz-http: venv ## send live servers 10,000 bodies that are nearly right, to every route of the HTTP API
	@$(BIN)/python -m benchmarks.fuzz_http --requests $(FUZZ_REQUESTS) $(ARGS)

.PHONY: hostile
hostile: venv ## attack a live server beside one sane stream, and say who stood still (ARGS=--shared on a shared machine)
	@$(BIN)/python -m benchmarks.hostile.run $(ARGS)

.PHONY: check
check: venv proto-check ## lint, format, types, import layers, generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports

.PHONY: format
format: venv ## fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: serve
serve: venv ## serve the packaged model over gRPC on this machine
	@$(BIN)/octavo serve $(ARGS)

.PHONY: bench
bench: venv ## measure throughput on the packaged model
	@$(BIN)/octavo bench throughput --num-prompts 128 --prompt-len 16:256 --output-len 16:128 --seed 1 $(ARGS)

.PHONY: goodput-tune
goodput-tune: venv ## tune scheduling policies for each workload and load (TRACE_DIR=folder of the Azure traces)
	@$(BIN)/python -m benchmarks.goodput_matrix tune --trace-dir $(TRACE_DIR) $(ARGS)

.PHONY: goodput-matrix
goodput-matrix: venv ## compare `slo` with other policies, tuned, over workloads and loads; fails where it falls short
	@$(BIN)/python -m benchmarks.goodput_matrix evaluate --trace-dir $(TRACE_DIR) $(ARGS)

.PHONY: aot-venv
aot-venv: ## build or refresh the environment of `make aot`
	@tools/make_venv.sh $(AOT_VENV) aot $(PYTHON)

.PHONY: aot
aot: aot-venv ## compile kernels and steps for TPUs and GPUs that are not there (ARGS="v6e h200 --only attention")
	@$(AOT_VENV)/bin/python -m benchmarks.aot $(ARGS)

.PHONY: aot-families
aot-families: aot-venv ## compile steps of every family in real sizes for TPUs and GPUs that are not there (ARGS="v6e --only DeepSeek")
	@$(AOT_VENV)/bin/python -m benchmarks.aot.families $(ARGS)

.PHONY: future
future: ## try versions of JAX and of other dependencies that are not out yet, in an environment of its own
	@tools/check_future.sh $(FUTURE_VENV) test,http "$(FUTURE_TESTS) $(PYTEST_ARGS)" $(PYTHON)

.PHONY: proto
proto: venv ## generate the gRPC code from server/proto
	@$(BIN)/python -m octavo.server.proto.generate

.PHONY: proto-check
proto-check: venv ## check that the generated gRPC code is current
	@$(BIN)/python -m octavo.server.proto.generate --check

.PHONY: notebook
notebook: venv ## run the notebooks' cells
	@$(BIN)/python -m pytest tests/notebooks $(PYTEST_ARGS)

.PHONY: docs
docs: venv ## build the documentation and the public API's pages into site/; a broken link fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

.PHONY: constraints
constraints: venv ## pin the newest versions that resolve together on every supported Python
	@tools/compile_constraints.sh $(BIN)/python

.PHONY: wheel-check
wheel-check: venv ## build the wheel through the sdist and try it in an environment of its own
	@tools/check_wheel.sh $(BIN)/python

.PHONY: clean
clean: ## remove environments, caches and builds
	rm -rf .venv .venv-* build dist site src/octavo.egg-info .jax_cache .jax_cache-* .pytest_cache .mypy_cache \
	  .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
