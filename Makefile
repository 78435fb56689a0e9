# Every target sets itself up: a virtual environment in .venv, packages from pyproject.toml, pinned by constraints.txt.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
OUT    ?= runs

.PHONY: demo test test-full check docs tune bench bench-full proofs recipes soak sanitize setup setup-dev clean
.DEFAULT_GOAL := demo

$(VENV)/.base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "ingot needs Python 3.11 or newer; set PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (once; torch is large)"
	@$(BIN)/pip install --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	@$(BIN)/pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(VENV)/.full: $(VENV)/.dev
	@$(BIN)/pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev,ray]'
	@touch $@

setup: $(VENV)/.base
setup-dev: $(VENV)/.dev

# The whole main job on text that is on every machine: clean, tokenize, pretrain, fine-tune, evaluate, report.
demo: $(VENV)/.base
	@$(BIN)/ingot run src/ingot/recipes/stdlib.toml --out $(OUT)
	@echo "        . $(BIN)/activate puts ingot on your path; ingot init --text DIR mine.toml: your own text"

test: $(VENV)/.dev
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not long" tests

# What takes longer: matrices of the kernels, kills, other tools' interpreters, the demo from end to end.
test-full: $(VENV)/.full
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "slow and not long" tests

check: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright
	@$(BIN)/lint-imports
	@$(MAKE) --no-print-directory test

# The documents as a site with search, site/index.html, from an environment of its own that needs no torch.
docs: .venv-docs/.installed
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet
	@echo "wrote site/index.html"

.venv-docs/.installed: pyproject.toml
	@test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/pip install --quiet --disable-pip-version-check "$$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')"
	@touch $@

# Measure the fastest way to compute a train stage here; the next run of it uses that.
RECIPE ?= src/ingot/recipes/stdlib.toml
STAGE  ?= base
tune: $(VENV)/.base
	@$(BIN)/ingot tune $(RECIPE) --stage $(STAGE) --out $(OUT)

# Speed and memory on this machine beside litgpt's and transformers', written to docs/BENCHMARKS.md. Peers are installed
# in environments of their own below ~/.cache/ingot. bench-full adds a 124M model and fp32; it resumes.
bench: $(VENV)/.base
	@$(BIN)/python -m benchmarks all --to docs/BENCHMARKS.md > /dev/null

bench-full: $(VENV)/.base
	@$(BIN)/python -m benchmarks all --full --resume --to docs/BENCHMARKS.md > /dev/null

# Experiments with known answers, three seeds each, and docs/PROOFS.md from them. It resumes.
proofs: $(VENV)/.base
	@OMP_NUM_THREADS=1 $(BIN)/python -m proofs --results $(OUT)/proofs --to docs/PROOFS.md

# The claims of the shipped recipes, three seeds each, and docs/CLAIMS.md from them. Recipes that need data take it from
# DATA. It resumes; from nothing it takes hours.
DATA ?= ../shared/data
recipes: $(VENV)/.base
	@$(BIN)/python -m proofs.recipes --data $(DATA) --results $(OUT)/recipes --to docs/CLAIMS.md

# A hundred kills of a pipeline at random moments, half of them while it saves, and twenty SIGTERMs in each phase of
# training (CI does six and one each); ten kills of an annotation (CI does two), and the tests that train for minutes. The
# kills resume in OUT/soak.
soak: $(VENV)/.dev
	@INGOT_KILLS=100 INGOT_TERMS=20 INGOT_SOAK=$(abspath $(OUT))/soak $(BIN)/python -m pytest -q -s tests/pipeline/test_kill.py tests/pipeline/test_annotate_runs.py -o timeout=0
	@$(BIN)/python -m pytest -m long tests -o timeout=0

# The C++ under AddressSanitizer, in a build and a cache of its own; torch.compile takes no compiler with options.
SANITIZED = CXX="g++ -fsanitize=address -fno-omit-frame-pointer -g" INGOT_CACHE=$(abspath $(OUT))/sanitize \
  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so.6)" \
  ASAN_OPTIONS=detect_leaks=0 $(BIN)/python
sanitize: $(VENV)/.dev
	@$(SANITIZED) -c "from ingot.kernels.cpu_decode import _library; assert _library(), 'the sanitized build failed'"
	@$(SANITIZED) -m pytest -s -m "not long" -k "not compiled" -o timeout=0 tests/kernels tests/backends tests/infer

clean:
	@rm -rf $(VENV) .venv-docs site build dist .pytest_cache .ruff_cache
