#!/usr/bin/env bash
# Every GPU test and benchmark in one call of under 10 minutes; JSON results and logs under $OUT (default benchmarks/results).
#   OUT=results benchmarks/gpu.sh
# TRL is measured where it is installed. Each part has a limit of its own, so that one that hangs takes nothing from the others.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OUT=${OUT:-benchmarks/results} TEST_ON_GPU=1 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
mkdir -p "$OUT"
python=${PYTHON:-python3}
status=0

part() { # name, seconds, command ...
  local name=$1 seconds=$2 began=$SECONDS
  shift 2
  timeout "$seconds" "$@" > "$OUT/gpu-$name.log" 2>&1
  local code=$?
  tail -15 "$OUT/gpu-$name.log"
  echo "== $name: $([ $code = 0 ] && echo ok || echo "FAILED ($code)") in $((SECONDS - began)) s"
  [ $code = 0 ] || status=1
}

part kernels-tests 140 "$python" -m pytest tests/test_triton.py -q --tb=short -k "not test_a_run"  # test_gpu.py has whole runs
part kernels 60 "$python" benchmarks/kernel_speed.py --name gpu-kernels
part tests 120 "$python" -m pytest tests/test_gpu.py -q --tb=short
part doctor 40 "$python" -m anyqlora doctor
if "$python" -c "import trl" 2>/dev/null; then
  part train 225 "$python" benchmarks/train_speed.py --shape llama-3-8b --batch 4 --length 2048 --steps 6 --warmup 2 --rounds 1 \
    --kernels auto,triton,portable --products full,fp8 --name train-gpu-llama-3-8b
else
  echo "== train: left out, TRL is not installed"
fi
exit $status
