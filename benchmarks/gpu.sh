#!/usr/bin/env bash
# Every GPU test and benchmark in one call of under 10 minutes; JSON results and logs under $OUT (default benchmarks/results).
#   OUT=results benchmarks/gpu.sh                     all parts
#   OUT=results benchmarks/gpu.sh doctor train        these parts
# Wheels in WHEELS (a directory) are unpacked and found before what is installed. TRL is measured where it is installed.
# Each part is a process with a time limit of its own, so that one that hangs takes nothing from the others; what each
# came to is in $OUT/gpu-parts.jsonl at once.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OUT=${OUT:-benchmarks/results} TEST_ON_GPU=1 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
mkdir -p "$OUT"
python=${PYTHON:-python3}
asked=" $* "
status=0
if [ -n "${WHEELS:-}" ]; then
  site=$(mktemp -d)
  for wheel in "$WHEELS"/*.whl; do "$python" -m zipfile -e "$wheel" "$site"; done
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi

part() { # name, seconds, command ...
  local name=$1 seconds=$2 began=$SECONDS
  shift 2
  [ "$asked" = "  " ] || [[ $asked == *" $name "* ]] || return
  timeout -k 5 "$seconds" "$@" > "$OUT/gpu-$name.log" 2>&1
  local code=$?
  tail -"${LINES_SHOWN:-25}" "$OUT/gpu-$name.log"
  echo "== $name: $([ $code = 0 ] && echo ok || echo "FAILED ($code)") in $((SECONDS - began)) s"
  echo "{\"part\": \"$name\", \"code\": $code, \"seconds\": $((SECONDS - began))}" >> "$OUT/gpu-parts.jsonl"
  [ $code = 0 ] || status=1
}

test_of() { # of one process, which goes on after a failure
  "$python" -m pytest -o addopts="" -p no:cacheprovider -q --tb=short "$@"
}
export -f test_of
export python
wide="--shape llama-3-8b --batch 4 --length 2048 --steps 6 --warmup 2 --rounds 1"

part doctor 40 "$python" -m anyqlora doctor
part kernel-tests 140 bash -c 'test_of tests/on_torch/kernels/test_triton.py -k "not test_a_run"'  # test_gpu.py has whole runs
part kernels 60 "$python" benchmarks/kernel_speed.py --name gpu-kernels
part trace 90 "$python" benchmarks/step_trace.py --name gpu-step-trace
part tests 150 bash -c 'test_of tests/on_torch/test_gpu.py'
if "$python" -c "import trl" 2> /dev/null; then
  part train-8 120 "$python" benchmarks/train_speed.py $wide --layers 8 --name train-gpu-llama-3-8b-8-layers
  part train 260 "$python" benchmarks/train_speed.py $wide --kernels triton,auto --products full,fp8 --name train-gpu-llama-3-8b
else
  echo "== train: left out, TRL is not installed"
fi
exit $status
