#!/bin/sh
# Checks that need an NVIDIA GPU, under six minutes on a big one. From a clean clone:
#
#   python3 -m venv .venv && .venv/bin/pip install -e '.[cuda,dev]'
#   sh scripts/gpu_check.sh            results on the terminal and in gpu-check/
#
# PYTHON     the Python that has OpenRL
# MODEL      what is trained and sampled
# Each part is tried, whatever became of those before; the exit code is the number of parts that failed.
set -u
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
MODEL=${MODEL:-smollm2-135m-instruct}
OPENRL="$(dirname "$PYTHON")/openrl"
OUT=gpu-check
mkdir -p "$OUT"
failed=0

part() { # part NAME SECONDS COMMAND...: run it, show its end, count its failure
  name=$1 seconds=$2
  shift 2
  began=$(date +%s)
  if timeout "$seconds" "$@" >"$OUT/$name.txt" 2>&1; then state=passed; else state="FAILED ($?)" failed=$((failed + 1)); fi
  echo "== $name: $state after $(($(date +%s) - began)) s"
  tail -n 12 "$OUT/$name.txt"
}

part machine 30 sh -c "nvidia-smi; '$PYTHON' -m pip list | grep -iE '^(torch|vllm|transformers|triton|flashinfer|openrl) '"
part model 60 "$OPENRL" models pull "$MODEL"
# Kernels that only a GPU has, against the engine's other ways: attention over packed sequences, weights in four bits.
part kernels 60 "$PYTHON" -m pytest -q -k gpu tests/contract/test_packed_attention.py tests/contract/test_nf4.py
# The contract's quick part on the GPU: our own engine, then with vLLM as the sampler.
part engine 60 env OPENRL_SAMPLER=engine "$OPENRL" doctor --self-test --backend cuda
part vllm 90 "$OPENRL" doctor --self-test --backend cuda --vllm-python "$PYTHON" --family llama
# Learning through the SDK, vLLM as the sampler: rewards rise, sampler and trainer agree, samplers are frozen.
part learning 120 env E2E_BACKEND=cuda E2E_VLLM_PYTHON="$PYTHON" "$PYTHON" -m pytest -q tests/e2e/test_learning.py
# Two GPUs, where there are: the numbers of one, and the contract's quick part over NCCL.
if [ "$(nvidia-smi -L | wc -l)" -ge 2 ]; then
  part two_gpus 60 "$PYTHON" -m pytest -q -m 'slow or not slow' -k gpus tests/contract/test_several_devices.py
  part two_gpus_engine 90 env OPENRL_SAMPLER=engine OPENRL_DEVICES=2 "$OPENRL" doctor --self-test --backend cuda --family llama
fi
# How fast our own engine is there.
part bench 60 env OPENRL_SAMPLER=engine "$OPENRL" bench sample train --model "$MODEL" --rounds 1 --dtype bfloat16

echo "$failed parts failed; the whole output is in $OUT/"
exit "$failed"
