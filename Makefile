# make demo    the whole pipeline on a real 135M model, from an empty checkout to a draft that has met the gate
# make test    every test; make check   style, types, packaging; make mutants   do the tests notice breaks of the core?
# make image   a container image, where docker is there; make clean, make distclean
# make test-vllm   counts against vLLM's, and what speculators reads, in an environment of its own (2.4 GB in .cache)
# Needs Python 3.11 or later and make; everything else goes into .venv.

PYTHON ?= python3
BIN := .venv/bin
COMMA := ,
PIP := $(BIN)/python -m pip -qq --no-input --disable-pip-version-check
# uv installs in a fifth of pip's time. It reads no settings of pip's: those of the environment are handed over, and where
# it fails, pip does it.
UV := $(if $(PIP_INDEX_URL),UV_DEFAULT_INDEX='$(PIP_INDEX_URL)') $(if $(PIP_EXTRA_INDEX_URL),UV_INDEX='$(PIP_EXTRA_INDEX_URL)') \
	$(if $(PIP_FIND_LINKS),UV_FIND_LINKS='$(subst $() ,$(COMMA),$(strip $(PIP_FIND_LINKS)))') $(if $(PIP_CERT),SSL_CERT_FILE='$(PIP_CERT)') \
	$(BIN)/python -m uv pip install -q --python $(BIN)/python
INSTALLED := .venv/.installed
TESTED := .venv/.installed-dev
LINK := .typing/draftforge
TARGET := .cache/smollm2-135m-instruct
VLLM_VENV ?= $(abspath .cache/vllm)
WORKERS ?= 2
# Tests write and remove thousands of folders: in memory, where that has 8 GB of room, and only those of failures stay.
MEMORY := /dev/shm/draftforge-$(shell id -u)
ROOM := $(shell test -w /dev/shm && df -k /dev/shm | awk 'NR == 2 && $$4 > 8e6 { print "yes" }')
# A container image often sets this. Each process of the tests would compile all that it imports, some for ten seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install target browser demo test mutants test-vllm check image format clean distclean
.DELETE_ON_ERROR:

help:
	@sed -n '1,5s/^# //p' Makefile

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: $(PYTHON) is older than Python 3.11; name another: make PYTHON=python3.12"; exit 2; }
	@echo "[1/2] .venv ($$($(PYTHON) --version))"
	@$(PYTHON) -m venv .venv
	@$(PIP) install uv || echo "no uv here: pip installs, which takes longer"
	@echo "[2/2] draftforge and what it runs on, with torch 2.13.0 (half a minute; with pip two)"
	@$(UV) torch==2.13.0 -e . || $(PIP) install torch==2.13.0 -e .
	@$(BIN)/python -c 'import draftforge.pipeline.distill, draftforge.registry.listing'
	@touch $@

$(TESTED): $(INSTALLED)
	@echo "what the tests need"
	@$(UV) torch==2.13.0 -e '.[dev]' || $(PIP) install torch==2.13.0 -e '.[dev]'
	@touch $@

$(LINK):
	@mkdir -p .typing
	@ln -sfn .. $@

target: $(TARGET)

$(TARGET): | $(INSTALLED)
	@$(BIN)/python scripts/fetch_target.py $@

# The browser of the report's tests. Without the right to install it they are skipped, and say so.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || { \
		echo "installing chromium, for the report's tests"; \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; }

demo: $(INSTALLED) $(TARGET)
	@$(BIN)/draftforge distill configs/demo.yaml || { code=$$?; test $$code -eq 5 || exit $$code; \
		echo "The draft is registered as candidate. If it is merely not worth serving on this machine, this promotes it:"; \
		echo "  $(BIN)/draftforge promote configs/demo.yaml gate.min_speedup=0"; }

# In the order of tests/conftest.py: slow files first. By itself xdist would begin with those of the most tests.
test: $(TESTED) $(TARGET)
	@$(if $(ROOM),mkdir -p $(MEMORY) && TMPDIR=$(MEMORY)) OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
		-n $(WORKERS) --dist loadfile --no-loadscope-reorder $(if $(ROOM),-o tmp_path_retention_policy=failed) tests

mutants: $(TESTED) $(TARGET)
	@OMP_NUM_THREADS=1 $(BIN)/python scripts/mutants.py --sample 10 --jobs $(WORKERS)

test-vllm: $(TESTED) $(LINK)
	@scripts/make_vllm_venv.sh $(VLLM_VENV) $(PYTHON)
	@PYTHONPATH=$(abspath .typing) OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest tests/specdec/formats/test_speculators_oracle.py
	@OMP_NUM_THREADS=1 VLLM_VENV=$(VLLM_VENV) $(BIN)/python -m pytest -m vllm --durations=0 tests/engines

check: $(TESTED) $(LINK)
	@echo "ruff check" && $(BIN)/ruff check --quiet .
	@echo "ruff format --check" && $(BIN)/ruff format --check --quiet .
	@echo "mypy --strict: package, tests and scripts" && MYPYPATH=.typing $(BIN)/mypy -p draftforge
	@echo "mutants fit the code" && $(BIN)/python scripts/mutants.py --check
	@echo "packaging" && $(BIN)/python -m pytest tests/test_packaging.py

image:
	@docker build $(if $(PIP_INDEX_URL),--build-arg PIP_INDEX_URL) $(if $(PIP_EXTRA_INDEX_URL),--build-arg PIP_EXTRA_INDEX_URL) \
		-t draftforge .
	@docker run --rm draftforge --version

format: $(TESTED)
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

clean:
	rm -rf build dist runs mlruns *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .typing $(MEMORY)
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf .venv .cache
