# `make demo` and `make test` work as the first command in a fresh clone: they create .venv and install what is pinned.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

LOCKS := deploy/docker/locks
PROTOS := $(wildcard proto/smc/v1/*.proto)

.PHONY: help install proto demo test test-kernels test-deploy test-benchmarks test-all lint format clean
help:            ## Show the targets
	@grep -hE '^[a-z-]+: .*##|^[a-z-]+:  *##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 20

install: $(STAMP)  ## Create .venv with the pinned dependencies

# Every file that is installed has a hash in a lock. torch's is checked unless there are local wheels: its wheel for CPUs is none of PyPI's.
# uv resolves and unpacks several times faster than pip; UV_FIND_LINKS lets it use the same local wheels as pip, if any. Bytecode: every
# process of a service imports torch, in half the time if it is there, and nothing else writes it where PYTHONDONTWRITEBYTECODE is set. A
# service imports a twentieth of all files, so that importing them once takes less time than compiling all.
$(STAMP): pyproject.toml constraints.txt setup.py proto/build.py $(PROTOS) $(wildcard $(LOCKS)/*.txt)
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: make PYTHON=python3.12 ..."'
	@echo "Setting up .venv: about 190 packages are fetched and unpacked. This takes a minute or two."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --require-hashes -r $(LOCKS)/uv.txt
	@UV_FIND_LINKS="$${PIP_FIND_LINKS:-}" bash -o pipefail -c "$(BIN)/uv pip install --python $(BIN)/python \
		-c constraints.txt -c $(LOCKS)/install.txt $(if $(PIP_FIND_LINKS),,-c $(LOCKS)/torch.txt) -b $(LOCKS)/build.txt \
		-e '.[dev]' 2>&1 | grep --line-buffered -v '^ + '"
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -c 'import services.cli.main, services.gateway.server, services.launch.service, \
		services.openai.server, services.workers.process'
	@touch $@

proto: install   ## Generate services/pb from proto/
	$(BIN)/python proto/build.py

demo: install    ## Answer three questions with the shipped model pair
	$(BIN)/smcserve demo

# Tests run real processes against limits of time. What fails is run once more, alone: what fails twice is a failure. Three run at once:
# those that need a cluster run one by one and mostly wait, and leave both cores to the others.
# Bytecode of the checkout is written, too: most of these processes import half of it.
define tests
	export PYTHONDONTWRITEBYTECODE=; $(BIN)/python -m pytest -n 3 -m $(1) $(2) || \
		{ [ $$? -eq 1 ] && echo "Once more, one at a time:" && \
		$(BIN)/python -m pytest -m $(1) $(2) -n 0 --last-failed --last-failed-no-failures none; }
endef
KERNELS := tests/kernels tests/attention
DEPLOY := tests/deploy
BENCHMARKS := tests/benchmarks tests/loadtest

test: install    ## Run the tests of the engine and of the services that are not slow
	$(call tests,"not slow",tests $(addprefix --ignore ,$(KERNELS) $(DEPLOY) $(BENCHMARKS)))

test-kernels: install ## Run the tests of the kernels, in Triton's interpreter
	$(call tests,"not slow",$(KERNELS))

test-deploy: install ## Run the tests of the chart, the images and the monitoring
	$(call tests,"not slow",$(DEPLOY))

test-benchmarks: install ## Run the tests of the benchmarks and of the load test
	$(call tests,"not slow",$(BENCHMARKS))

test-all: install ## Run all tests, the slow ones as well, in one run
	$(call tests,"slow or not slow",tests)

lint: install    ## Check style and types
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	cd proto && ../$(BIN)/buf lint && ../$(BIN)/buf format --diff --exit-code

format: install  ## Fix style
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .
	cd proto && ../$(BIN)/buf format --write

clean:           ## Remove .venv and caches
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
