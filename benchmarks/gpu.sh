#!/usr/bin/env bash
# Every GPU test and benchmark in one call of under 10 minutes; JSON results under $OUT (default benchmarks/results).
#   OUT=results benchmarks/gpu.sh
# TRL is measured where it is installed.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OUT=${OUT:-benchmarks/results} TEST_ON_GPU=1 HF_HUB_OFFLINE=1
mkdir -p "$OUT"
python=${PYTHON:-python3}
status=0
timeout 240 "$python" -m pytest tests/test_gpu.py -q 2>&1 | tee "$OUT/gpu-tests.log" | tail -15 || status=1
grep -q " passed" "$OUT/gpu-tests.log" && ! grep -q " failed" "$OUT/gpu-tests.log" || status=1
"$python" -m anyqlora doctor 2>&1 | tee "$OUT/gpu-doctor.log" | tail -15
if "$python" -c "import trl" 2>/dev/null; then
  timeout 280 "$python" benchmarks/train_speed.py --shape llama-3-8b --batch 4 --length 2048 --steps 6 --warmup 2 --rounds 1 --name gpu-train-llama-3-8b || status=1
fi
exit $status
