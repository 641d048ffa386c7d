# `make demo` and `make test` do all the set-up themselves; python3 with its venv module is all they need.
# Pass PYTHON=python3.12 for another interpreter, ARGS="..." for options of demo, gpu-check and test.

PYTHON ?= python3
ARGS ?=
# The oldest supported transformers; some tests run in it what a user of that release would.
OLDEST_TRANSFORMERS := 5.17.0

VENV := .venv
BIN := $(VENV)/bin
OLDEST := $(VENV)/oldest
READY := $(VENV)/.ready
OLDEST_READY := $(OLDEST)/.ready-$(OLDEST_TRANSFORMERS)
# Errors only; bytecode is compiled for what is imported, not for everything installed.
PIP := -m pip install -qq --no-input --no-compile --disable-pip-version-check
# With an NVIDIA GPU torch is left to the user's choice of CUDA build; without one it is pinned.
CONSTRAINTS := $(if $(shell command -v nvidia-smi),,-c constraints.txt)

.PHONY: demo test style quality gpu-check card clean

demo: $(READY)
	$(BIN)/dspark demo $(ARGS)

test: $(READY) $(OLDEST_READY)
	DSPARK_OLDEST_PYTHON=$(abspath $(OLDEST)/bin/python) $(BIN)/python -m pytest $(ARGS)

style: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

quality: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The interpreter that already has a torch with CUDA, else the environment made here.
gpu-check:
	@if $(PYTHON) -c "import torch, transformers, pytest; assert torch.cuda.is_available()" 2>/dev/null; \
	then $(PYTHON) evaluation/gpu_check.py $(ARGS); \
	else $(MAKE) --no-print-directory $(READY) && $(BIN)/python evaluation/gpu_check.py $(ARGS); fi

# After a change of the code that is shipped with a checkpoint.
card: $(READY)
	$(BIN)/python -m dspark.evaluation.build_card $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once; about a minute, more where torch comes over a slow line)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(PIP) $(CONSTRAINTS) -e ".[dev,train,demo]"
	@touch $@

# A second, light environment: its own transformers in front of the first one's packages. The path is a plain line, so
# packages installed as editable (this one) are not importable there.
$(OLDEST_READY): $(READY)
	@echo "setting up $(OLDEST) with transformers $(OLDEST_TRANSFORMERS)"
	@rm -rf $(OLDEST)
	@$(PYTHON) -m venv --without-pip $(OLDEST)
	@$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		"$$($(OLDEST)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/behind.pth"
	@$(BIN)/python -m pip --python $(OLDEST)/bin/python $(wordlist 3,99,$(PIP)) transformers==$(OLDEST_TRANSFORMERS)
	@$(OLDEST)/bin/python -c "import transformers as t; assert t.__version__ == '$(OLDEST_TRANSFORMERS)', t"
	@touch $@
