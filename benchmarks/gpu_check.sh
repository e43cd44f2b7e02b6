#!/bin/sh
# Everything about GPUs, checked on a machine with one, in under ten minutes: the tests marked `gpu`, then one
# table of speed and memory. Ends with the tests' exit code; 2 where there is no GPU.
#   benchmarks/gpu_check.sh [a model's folder; default: SmolLM2-135M]
set -eu
cd "$(dirname "$0")/.."
if ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    echo "gpu_check: nvidia-smi finds no GPU here; nothing was checked" >&2
    exit 2
fi
nvidia-smi -L
make -s .venv/.smol
if ! .venv/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_check: .venv has a torch that sees no GPU; remove .venv, or install torch's build for this GPU into it" >&2
    exit 2
fi
[ $# -gt 0 ] || make -s runs/smollm2/config.json
tests=0
.venv/bin/python -m pytest -q -m gpu tests/gpu || tests=$?
.venv/bin/python benchmarks/gpu_check.py --model "${1:-runs/smollm2}"
exit $tests
