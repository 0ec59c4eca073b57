# structured-commit. `make` lists the targets; `make demo` and `make test` set themselves up.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-multi gpu lint format replay browser delivery formats check apply status diff export revert check-series bench bench-apply conform fuzz clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' Makefile

demo: $(READY) ## real Harmony streams lose tool calls under speculation, and keep them with the stage
	@$(RUN) -m scripts.demo $(ARGS)

test: $(READY) ## all tests, one process a core; ARGS="-k name" picks some
	@OMP_NUM_THREADS=1 $(RUN) -m pytest --numprocesses auto --dist loadfile $(ARGS)

test-multi: $(READY) ## the stage on 2 and 4 ranks, 10,000 windows each; NCCL where there is a GPU for each rank
	@MULTI_GPU_FULL=1 $(RUN) -m pytest tests/multi_gpu $(ARGS)

gpu: ## everything that needs a GPU, in a TensorRT-LLM container; see ci/README.md
	@bash ci/gpu.sh $(ARGS)

lint: $(READY) ## ruff: rules and format
	@$(RUN) -m ruff check . && $(RUN) -m ruff format --check .

format: $(READY) ## rewrite the code the way `lint` wants it
	@$(RUN) -m ruff check --fix . && $(RUN) -m ruff format .

replay: $(READY) ## replay report #17437 and print the verdict; TRACE=FILE shows a flight recorder's trace instead
	@$(RUN) -m $(if $(TRACE),scripts.incident "$(TRACE)",scripts.replay) $(ARGS)

browser: $(READY) ## a headless browser for the page's tests and pictures, inside .venv; no root needed
	@$(RUN) -m scripts.browser

delivery: $(READY) ## what streaming tool parsers lose of speculative deltas, and with the splitter; ARGS="--turns N --json"
	@$(RUN) -m scripts.delivery $(ARGS)

formats: $(READY) ## size and compile time of every built-in format
	@$(RUN) -m scripts.formats $(ARGS)

check: need-tree $(READY) ## say which patches fit TRTLLM=<checkout or site-packages>
	@$(RUN) -m scripts.installer check "$(TRTLLM)" $(ARGS)

apply: need-tree $(READY) ## put the overlay and the patches into TRTLLM=…
	@$(RUN) -m scripts.installer apply "$(TRTLLM)" $(ARGS)

status: need-tree $(READY) ## what is applied to TRTLLM=…, and whether it still matches
	@$(RUN) -m scripts.installer status "$(TRTLLM)" $(ARGS)

diff: need-tree $(READY) ## the unified diff that apply makes
	@$(RUN) -m scripts.installer diff "$(TRTLLM)" $(ARGS)

export: need-tree $(READY) ## write `git am` patches for TRTLLM=… into DIR=<folder>
	@$(RUN) -m scripts.installer export "$(TRTLLM)" "$(DIR)" $(ARGS)

revert: need-tree $(READY) ## take everything out of TRTLLM=… again, byte for byte
	@$(RUN) -m scripts.installer revert "$(TRTLLM)" $(ARGS)

check-series: $(READY) ## run every patch rule's own cases
	@$(RUN) -m scripts.installer check-series $(ARGS)

bench: $(READY) ## what a step costs, the stage and its peers; ARGS="--json FILE --png FILE" writes the figures
	@$(RUN) -m scripts.bench $(ARGS)

bench-apply: $(READY) ## time check and apply on a tree of 20,000 files against git status
	@$(RUN) -m scripts.bench_apply --tree tests/upstream/w13b $(ARGS)

conform: need-tree $(READY) ## compare TRTLLM=… with the facts that the patches rely on
	@$(RUN) -m scripts.conform "$(TRTLLM)" $(ARGS)

.PHONY: need-tree
need-tree:
	@test -n "$(TRTLLM)" || { echo "say where TensorRT-LLM is: make <target> TRTLLM=<checkout or site-packages>"; exit 2; }

fuzz: $(READY) ## a million windows through the stage, its definition and the host twin
	@OMP_NUM_THREADS=1 $(RUN) -m scripts.fuzz $(ARGS)

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis

$(READY): pyproject.toml Makefile
	@echo "setting up $(VENV) …"
	@$(PYTHON) -m venv $(VENV)
	@$(RUN) -c 'import tomllib; d = tomllib.load(open("pyproject.toml", "rb")); \
	  print(*d["project"]["optional-dependencies"]["dev"], sep="\n")' > $(VENV)/requirements.txt
	@$(RUN) -m pip install --quiet --disable-pip-version-check --requirement $(VENV)/requirements.txt
	@$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23 # its parsers; the rest needs CUDA
	@# The release on which transformers#47912 was reported, beside the installed one, with what it alone needs.
	@$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --upgrade \
	  --target $(VENV)/transformers-5.15.0 transformers==5.15.0 tokenizers==0.22.2 huggingface-hub==1.33.0 \
	  httpx==0.28.1 httpcore==1.0.9
	@# The package is found where it lies: an editable install would leave its metadata in the overlay.
	@$(RUN) -c 'import pathlib, sysconfig; folder = pathlib.Path(sysconfig.get_path("purelib")); \
	  (folder / "structured_commit.pth").write_text(str(pathlib.Path("overlay/tensorrt_llm/_torch/speculative").resolve()))'
	@touch $@
