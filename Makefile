# Every target stands alone: it makes .venv and installs what it needs, once.
# Settings: PYTHON=python3.12 (to make .venv with), PIP_ARGS='...' (for pip install),
#           TEXT=path, STEPS=20 (for demo, zoo: your text, fewer training steps),
#           ONLY=name,name (for zoo, small: these models),
#           HUB=organisation, PUBLIC=1, DRY_RUN=1 (for zoo: publish to the Hub, in public, or only list the files),
#           WORKERS=2 (for test), TESTS='tests/x.py -k name' (for test: these alone, on constraints.txt alone),
#           RUNS=folder (for cards), VERSION=0.1.0 (for release, upload),
#           KERNELS='x86_64 aarch64' (for wheel, release: machines that get a wheel with kernels)

PYTHON ?= python3
PIP_ARGS ?=
WORKERS ?= 2
TESTS ?= tests
TEXT ?=
STEPS ?=
ONLY ?=
HUB ?=
PUBLIC ?=
DRY_RUN ?=
RUNS ?= runs
VERSION ?=
KERNELS ?= $(foreach machine,x86_64 aarch64,$(if $(shell command -v $(machine)-linux-gnu-gcc),$(machine)))

VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
# the oldest transformers that pyproject.toml admits, with those of its needs that the newest set lacks
OLDEST := transformers==5.17.0 huggingface_hub==1.33.0 httpx==0.28.1 httpcore==1.0.9
OLDEST_DIR := $(VENV)/transformers-5.17.0
# the torchao of constraints.txt, beside the rest: where it is installed, every import of transformers loads it
TORCHAO_DIR := $(VENV)/torchao
# onnx and onnxruntime of constraints.txt, beside the rest too: its checks take long
ONNX_DIR := $(VENV)/onnx
# twine in an environment of its own: it needs thirty packages, and only who releases needs it
TWINE := $(VENV)/twine/bin/twine
# the tests of the installed transformers; only its source distribution has them
SUITE := $(VENV)/transformers-tests
MODELS = $(wildcard $(RUNS)/*/model)
RESULTS = $(sort $(wildcard eval/results/*.json))
# checks of torch and PEFT, which are the same there
OF_TORCH := compile or fullgraph or export or onnx or jit_trace or lora_parameters
OLDEST_TESTS := $(wildcard tests/plugins tests/modeling/test_compat.py tests/modeling/test_modeling.py tests/modeling/stock/test_stock.py tests/modeling/stock/test_stock_states.py tests/modeling/test_batching.py)

# bytecode is kept, whatever the shell says: each process would compile torch and transformers anew, 15 s
export PYTHONDONTWRITEBYTECODE :=

# one thread per worker: workers that share cores with each other's threads wait for them
PYTEST = OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false \
	SSMZOO_TEST_TORCHAO=$(abspath $(TORCHAO_DIR)) SSMZOO_TEST_ONNX=$(abspath $(ONNX_DIR)) \
	$(PY) -m pytest -n $(WORKERS) --dist loadgroup

# the C library keeps freed memory: no call waits for new pages
STEADY = MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=2147483647

.PHONY: help install demo zoo small test quick test-kit test-gpu test-transformers lint format types bench cards pages site wheel release upload clean
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

install: $(INSTALLED) ## Make .venv and install the project with the versions of constraints.txt
	@echo "== ssmzoo is installed: $(VENV)/bin/ssmzoo list =="

demo: $(INSTALLED) ## Train, score, publish, reload a small Longhorn, or go on (TEXT=path, STEPS=20: your text, shorter)
	$(PY) eval/programs/demo.py $(if $(TEXT),--text "$(TEXT)") $(if $(STEPS),--steps "$(STEPS)")

zoo: $(INSTALLED) ## Train, score and publish the models of eval/zoo.yaml, or go on (ONLY=name,name, STEPS=n, TEXT=path, HUB=organisation)
	$(PY) eval/programs/zoo.py $(if $(ONLY),--only "$(ONLY)") $(if $(TEXT),--text "$(TEXT)") $(if $(STEPS),--steps "$(STEPS)") \
	  $(if $(HUB),--hub "$(HUB)") $(if $(filter-out 0,$(PUBLIC)),--public) $(if $(filter-out 0,$(DRY_RUN)),--dry-run)

small: $(INSTALLED) ## Train the models of eval/small.yaml into model_cards/small, or go on
	$(PY) eval/programs/zoo.py --list eval/small.yaml --output runs/small --publish model_cards/small --no-code \
	  $(if $(ONLY),--only "$(ONLY)")

test: $(INSTALLED) $(OLDEST_DIR)/.installed $(TORCHAO_DIR)/.installed $(ONNX_DIR)/.installed ## Run all tests, the model tests also on the oldest transformers
ifeq ($(TESTS),tests)
	@echo "== model tests on the oldest supported transformers =="
	$(if $(OLDEST_TESTS),,$(error no model tests found under tests/))
	PYTHONPATH=$(OLDEST_DIR) $(PYTEST) -p tests.versions -m "not slow and not gpu and not variant" \
	  -k "(promise or convert or modeling or compat or stock or batching) and not ($(OF_TORCH))" $(OLDEST_TESTS)
endif
	@echo "== all tests on the versions of constraints.txt =="
	$(PYTEST) -p tests.versions -p tests.skip_guard -m "not slow and not gpu" $(TESTS)

quick: $(INSTALLED) ## Run the tests of a few minutes, for the inner loop of a change outside the kernels
	$(PYTEST) -m "not slow and not gpu and not long and not variant" $(if $(filter tests,$(TESTS)),--ignore=tests/kernels) $(TESTS)

test-kit: $(INSTALLED) $(TORCHAO_DIR)/.installed $(ONNX_DIR)/.installed ## Run every check of the conformance kit on every family; write tests/kit.csv
	PYTHONPATH=$(TORCHAO_DIR):$(ONNX_DIR) $(PYTEST) -p tests.versions -p tests.kit_report -k promise tests

test-gpu: $(INSTALLED) ## Run the tests that need a CUDA device
	$(PY) -m pytest -p tests.versions -m gpu $(TESTS)

test-transformers: $(INSTALLED) $(SUITE)/.installed ## Run transformers' own common tests on every family
	CUDA_VISIBLE_DEVICES= PYTHONPATH=$(SUITE) $(PYTEST) -p tests.versions \
	  -p tests.transformers_common.listed -o addopts=--import-mode=importlib \
	  -W ignore::pytest.PytestUnknownMarkWarning tests/transformers_common/every_family.py

lint: $(INSTALLED) ## Check style and formatting
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(INSTALLED) ## Repair style and formatting where ruff can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

types: $(INSTALLED) ## Check types with pyright
	$(VENV)/bin/pyright --pythonpath $(PY)

bench: $(INSTALLED) ## Measure speed beside transformers' own models; write the committed CSV
	$(PY) kernels/benchmarks/run.py
	$(STEADY) $(PY) -m ssmzoo bench --runs 3 --memory \
	  --output kernels/benchmarks/results

cards: $(INSTALLED) ## Render the cards in model_cards/ again, and one for each trained model in RUNS
	for model in $(MODELS); do \
	  $(PY) -m ssmzoo card $$model $(addprefix --results ,$(RESULTS)) \
	    --output model_cards/$$(basename $$(dirname $$model)).md || exit 1; \
	done
	for card in $$(ls model_cards/*.json); do \
	  $(PY) -m ssmzoo card $$card $(addprefix --results ,$(RESULTS)) || exit 1; \
	done

pages: $(INSTALLED) ## Write the tables of docs/speed.md, eval/papers.md and eval/zoo.md from committed results
	$(PY) eval/programs/pages.py

site: $(INSTALLED) ## Build the site of all pages into build/site
	$(PY) eval/site/build.py

wheel: $(INSTALLED) ## Build the wheels into dist/: for any machine, and with kernels for KERNELS
	$(PY) -m build --wheel --no-isolation
	for machine in $(KERNELS); do SSMZOO_KERNELS=$$machine $(PY) -m build --wheel --no-isolation || exit 1; done

release: $(INSTALLED) $(TORCHAO_DIR)/.installed $(ONNX_DIR)/.installed $(TWINE) ## Cut, build, check and tag VERSION; uploads nothing (docs/releasing.md)
	KERNELS="$(KERNELS)" PYTHONPATH=$(TORCHAO_DIR):$(ONNX_DIR) $(PY) .ci/release.py $(VERSION) $(TWINE)

upload: $(TWINE) ## Upload what `make release` built, if TWINE_PASSWORD has a token
	@test -n "$$TWINE_PASSWORD" || { echo "upload: TWINE_PASSWORD must hold a token" >&2; exit 1; }
	@git tag --list --format='%(contents:body)' v$(VERSION) | (cd dist && sha256sum --check --strict --ignore-missing) || { \
	  echo "upload: dist/ must have the files that the tag v$(VERSION) names" >&2; exit 1; }
	$(TWINE) upload --non-interactive \
	  $$(git tag --list --format='%(contents:body)' v$(VERSION) | sed -nE 's,.*  (.*(whl|tar.gz))$$,dist/\1,p')

clean: ## Remove build outputs and caches; .venv stays
	rm -rf build dist .pytest_cache .ruff_cache
	find src kernels plugins tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "ssmzoo needs Python 3.11 or newer, got $$($(PYTHON) --version 2>&1);" \
	    "name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "== making $(VENV) with $$($(PYTHON) --version) =="
	$(PYTHON) -m venv $(VENV)

# src/ssmzoo/__init__.py has the version, which an installation writes down
$(INSTALLED): pyproject.toml constraints.txt src/ssmzoo/__init__.py | $(PY)
	@echo "== installing ssmzoo and all it needs into $(VENV): about 2 GB, a few minutes, once =="
	$(PY) -m pip install --quiet --no-compile --disable-pip-version-check $(PIP_ARGS) -e '.[dev]' -c constraints.txt
	@touch $@

$(TORCHAO_DIR)/.installed: constraints.txt $(INSTALLED)
	rm -rf $(TORCHAO_DIR)
	$(PY) -m pip install --quiet --no-compile --disable-pip-version-check $(PIP_ARGS) --no-deps \
	  --target $(TORCHAO_DIR) torchao -c constraints.txt
	@touch $@

$(ONNX_DIR)/.installed: constraints.txt $(INSTALLED)
	rm -rf $(ONNX_DIR)
	$(PY) -m pip install --quiet --no-compile --disable-pip-version-check $(PIP_ARGS) --no-deps \
	  --target $(ONNX_DIR) onnx onnxscript onnxruntime onnx-ir ml_dtypes protobuf flatbuffers \
	  -c constraints.txt
	@touch $@

$(TWINE): Makefile $(INSTALLED)
	@echo "== installing twine, for releases =="
	$(PY) -m venv --clear $(VENV)/twine
	$(VENV)/twine/bin/python -m pip install --quiet --no-compile --disable-pip-version-check $(PIP_ARGS) twine==7.0.0
	@touch $@

$(OLDEST_DIR)/.installed: Makefile $(INSTALLED)
	@echo "== installing transformers 5.17.0 beside the newest, for the tests =="
	rm -rf $(OLDEST_DIR)
	$(PY) -m pip install --quiet --no-compile --disable-pip-version-check $(PIP_ARGS) --no-deps \
	  --target $(OLDEST_DIR) $(OLDEST)
	@touch $@

$(SUITE)/.installed: Makefile $(INSTALLED)
	@echo "== fetching the tests of the installed transformers =="
	rm -rf $(SUITE)
	$(PY) -m pip download --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps \
	  --no-binary transformers --no-build-isolation --dest $(SUITE)/sdist \
	  "transformers==$$($(PY) -c 'from importlib.metadata import version; print(version("transformers"))')"
	tar -xzf $(SUITE)/sdist/transformers-*.tar.gz -C $(SUITE)/sdist
	mv $(SUITE)/sdist/transformers-*/tests $(SUITE)/transformers_tests
	rm -rf $(SUITE)/sdist
	@touch $(SUITE)/transformers_tests/__init__.py $@
