# A fresh clone needs python3 with venv, pip and make; every target builds the environment it uses.
#   PYTHON=python3.12     the interpreter of the environments
#   TORCH="torch==2.9.1"  the torch that pip installs
#   TORCH_INDEX=URL       the --index-url that serves it, such as one with CPU wheels
PYTHON ?= python3
TORCH ?=
TORCH_INDEX ?=
CPU_TORCH := torch==2.13.0+cpu
PROMPTS ?= "Explain in two sentences why the sky is blue." "Name three uses of a paper clip." \
  "How do I stay focused while studying?"

# What each environment has besides the package: Optimum Habana's pin, and the newest release.
EXTRAS_.venv := demo,dev
EXTRAS_.venv-newest := test
TRANSFORMERS_.venv := transformers==4.55.4
TRANSFORMERS_.venv-newest := transformers>=5,<6

HPU := $(shell command -v hl-smi)
GPU := $(shell command -v nvidia-smi)
PIP_INSTALL = $(1)/bin/python -m pip install --quiet --disable-pip-version-check
VENV_FLAGS := $(if $(HPU),--system-site-packages)

# Habana's torch comes with the machine and is never replaced. Elsewhere: what TORCH and TORCH_INDEX
# say, or else the CPU build where there is no GPU and pip finds it, or else the index's own choice.
define install_torch
$(if $(HPU),$(1)/bin/python -c "import torch",\
$(if $(TORCH)$(TORCH_INDEX),\
$(PIP_INSTALL) "$(or $(TORCH),torch)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)),\
$(if $(GPU),,$(PIP_INSTALL) "$(CPU_TORCH)" 2>/dev/null ||) $(PIP_INSTALL) torch))
endef

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-hpu test-newest benchmarks lint wheel clean

help: ## List the targets.
	@sed -n 's/^\([a-z.-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

.venv: .venv/.stamp ## Create or update the environment that the other targets use.

# One rule for both environments: reused until setup.py changes.
%/.stamp: setup.py
	@echo "Installing into $* (the first time takes minutes)"
	@test -x $*/bin/python || $(PYTHON) -m venv $(VENV_FLAGS) $*
	@$(call install_torch,$*)
	@$(call PIP_INSTALL,$*) -e ".[$(EXTRAS_$*)]" "$(TRANSFORMERS_$*)"
	@touch $@

demo: .venv/.stamp ## Generate with a real model and its packaged draft, and compare with plain decoding.
	.venv/bin/python examples/run_generation.py \
	  --model_name_or_path smollm2-135m-instruct --assistant_model smollm2-135m-draft \
	  --use_chat_template --max_new_tokens 64 --warmup 1 --n_iterations 1 --compare_baseline \
	  --prompt $(PROMPTS)

test: .venv/.stamp ## Run the tests.
	.venv/bin/python -m pytest

test-all: .venv/.stamp ## Run the tests, the slow ones too.
	.venv/bin/python -m pytest -m "not hpu and not cuda"

test-hpu: .venv/.stamp ## Run the tests that need a Gaudi card.
	.venv/bin/python -m pytest -m hpu tests/test_hpu.py

test-newest: .venv-newest/.stamp ## Run the tests that need no weights on the newest Transformers.
	.venv-newest/bin/python -m pytest tests -m "not hpu and not cuda and not slow and not model"

benchmarks: .venv/.stamp ## Measure on this machine (nothing else should run), and write docs/benchmarks.md.
	.venv/bin/python docs/make_benchmarks.py --measure

lint: .venv/.stamp ## Check style and format.
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

wheel: .venv/.stamp ## Build dist/*.whl.
	.venv/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean: ## Remove the environments and everything that was built.
	rm -rf .venv .venv-newest build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
