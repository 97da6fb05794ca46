PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ready

DOCS := .venv/.docs
PEERS := .venv-bench/.ready
TRITON := .venv-kernels/.ready
MODELS := .venv-models/.ready
FLOWER := .venv-flower/.ready

.PHONY: demo check test tests plain kernels models federation lint docs bench bench-parts bench-bytes bench-methods bench-ranks evidence-tables setup clean

demo: $(STAMP)                  ## FedAvg against seven ways to send less, on the embedded digits
	$(BIN)/sparing demo

check: lint $(STAMP)            ## for every edit: core, laws and parts without what is marked slow, and one short run
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow" tests/core tests/laws tests/parts
	$(BIN)/sparing run method=psfed+topk+int8+memory rounds=2 sample=4 --out $$(mktemp -d)/run --json > /dev/null

test: $(STAMP)                  ## everything CI checks, the code's looks beside the tests
	$(MAKE) --no-print-directory --jobs 2 lint tests

tests: $(STAMP)                 ## the tests alone
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

plain: $(STAMP)                 ## core, laws, parts and recipes without accelerators
	OMP_NUM_THREADS=1 SPARING_PLAIN=1 $(BIN)/python -m pytest -n auto --dist worksteal tests/core tests/laws tests/parts tests/recipes

kernels: $(TRITON)              ## the Triton kernels in Triton's interpreter, without a GPU, installed in .venv-kernels
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 .venv-kernels/bin/python -m pytest -n auto tests/accel/test_kernels_interpreted.py

models: $(MODELS)               ## models of transformers, peft, timm and torchvision, installed in .venv-models
	OMP_NUM_THREADS=1 .venv-models/bin/python -m pytest -n auto tests/models_of_others

federation: $(STAMP) $(FLOWER)  ## a SuperLink and four SuperNodes on this machine, with TLS; Flower in .venv-flower
	$(BIN)/python benchmarks/federation.py

bench-ranks: $(STAMP)           ## docs/cluster.md: several processes play one run, and one of them is killed
	$(BIN)/python benchmarks/ranks.py
	$(BIN)/python benchmarks/ranks.py kill

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

docs: $(DOCS)                   ## the pages as a site: open build/site/index.html
	$(BIN)/python docs/reference/write.py
	$(BIN)/zensical build --clean --strict

bench: $(PEERS)                 ## docs/speed.md: against pfl, Flower and a plain loop, installed in .venv-bench
	.venv-bench/bin/python benchmarks/speed.py --cohorts 10 100 1000 10000 --plot runs/speed.png
	.venv-bench/bin/python benchmarks/codec_costs.py --shapes digits cnn

bench-parts: $(STAMP)           ## the figures in docs/benchmarks.md
	$(BIN)/python benchmarks/fold.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/kill.py
	$(BIN)/python benchmarks/corrupt.py
	$(BIN)/python benchmarks/intrude.py
	$(BIN)/python benchmarks/fuzz_wire.py --count 100000
	$(BIN)/python benchmarks/fuzz_data.py --count 100000
	$(BIN)/python benchmarks/decompose.py

bench-bytes: $(STAMP)           ## real updates through every scheme, side by side
	$(BIN)/python benchmarks/bytes.py

bench-methods: $(STAMP)         ## docs/early-results.md: hours on 2 cores; the data must be where `sparing data` finds it
	$(BIN)/python benchmarks/methods.py writers
	$(BIN)/python benchmarks/methods.py fashion
	$(BIN)/python benchmarks/methods.py cifar100 --device auto
	$(BIN)/python benchmarks/fedscr.py

evidence-tables: $(STAMP)       ## every table and figure of docs/results.md, from benchmarks/evidence/results
	$(BIN)/python benchmarks/evidence/tables.py

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

# Flower asks for older versions than constraints.txt has, and pfl for an older dp-accounting, but it runs with ours.
$(PEERS): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-bench
	grep -E '^(torch|numpy|scipy)==' constraints.txt > .venv-bench/constraints.txt
	.venv-bench/bin/python -m pip install --quiet --constraint .venv-bench/constraints.txt --editable ".[bench]"
	.venv-bench/bin/python -m pip install --quiet --no-deps pfl==0.6.0
	touch $@

# About 2 GB. The version of Triton is the one that torch of constraints.txt asks for where it comes with CUDA.
$(TRITON): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-kernels
	.venv-kernels/bin/python -m pip install --quiet --constraint constraints.txt --editable . pytest pytest-xdist triton==3.7.1
	touch $@

# Built from configs, nothing is downloaded but the packages.
$(MODELS): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-models
	.venv-models/bin/python -m pip install --quiet --constraint constraints.txt --editable . pytest pytest-xdist \
		transformers==5.22.2 peft==0.21.2 datasets==5.2.0 timm==1.0.30 torchvision==0.28.0 torchmetrics==1.9.0
	touch $@

# Flower asks for other versions than constraints.txt has, and for Python 3.11; only bytes pass between the two.
$(FLOWER): constraints-flower.txt
	$(PYTHON) -m venv .venv-flower
	.venv-flower/bin/python -m pip install --quiet --constraint constraints-flower.txt flwr==1.41.0
	touch $@

clean:
	rm -rf .venv .venv-bench .venv-kernels .venv-models .venv-flower build dist .cache
