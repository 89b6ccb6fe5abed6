#!/usr/bin/env bash
# Every CPU benchmark in one call (about two hours on two idle cores); JSON results, plots and logs under $OUT (default benchmarks/results).
#   PYTHON=.venv/bin/python UNSLOTH_PYTHON=.venv-unsloth/bin/python benchmarks/cpu.sh [part ...]
# Peers are measured where they are installed: TRL and mlx-lm beside us, Unsloth in an environment of its own (it pins other versions).
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OUT=${OUT:-benchmarks/results} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 CUDA_VISIBLE_DEVICES=
mkdir -p "$OUT"
python=${PYTHON:-python3} only=" $* " status=0
unsloth=(${UNSLOTH_PYTHON:+--unsloth-python "$UNSLOTH_PYTHON"})

part() { # name, command ...
  local name=$1 began=$SECONDS
  shift
  [[ $only = "  " || $only = *" $name "* ]] || return
  "$@" 2>&1 | tee "$OUT/cpu-$name.log"
  local code=${PIPESTATUS[0]}
  echo "== $name: $([ "$code" = 0 ] && echo ok || echo "FAILED ($code)") in $((SECONDS - began)) s"
  [ "$code" = 0 ] || status=1
}

speed() { # name, arguments of train_speed.py ...
  local name=$1
  shift
  part "$name" "$python" benchmarks/train_speed.py "${unsloth[@]}" "$@"
}

if "$python" -c "import trl" 2>/dev/null; then
  speed losses-fp32 --shape demo --precision fp32 --steps 50 --rounds 1
  speed losses-bf16 --shape demo --steps 50 --rounds 1 --products full,int8_backward,int8
  part losses "$python" benchmarks/losses.py
  speed equal --settings equal --products full,int8_backward,int8
  speed best --settings best --checkpointing both --products full,int8_backward,int8 --rounds 2
  speed wide-equal --shape wide --settings equal --products full,int8_backward,int8
  speed wide-best --shape wide --settings best --checkpointing both --products full,int8_backward,int8 --rounds 2
  speed mixed --settings best --length 0 --steps 16 --warmup 2 --products full,int8_backward,int8 --rounds 2
  part start "$python" benchmarks/start.py
else
  echo "== training: left out, TRL is not installed (pip install '.[bench]')"
fi
if "$python" -c "import mlx_lm" 2>/dev/null; then
  part mlx "$python" benchmarks/mlx_speed.py
else
  echo "== mlx: left out, mlx-lm is not installed (pip install 'mlx[cpu]' mlx-lm)"
fi
part kernels "$python" benchmarks/kernel_speed.py --device cpu --cut 32
part memory "$python" benchmarks/memory.py
part cost "$python" benchmarks/cost.py
[ "$OUT" != benchmarks/results ] || part table "$python" benchmarks/table.py
exit $status
