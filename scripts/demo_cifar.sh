#!/usr/bin/env bash
# PreAct-ResNet-20 with the recursive skip learns handwritten digits; `make demo-cifar` runs this.
set -euo pipefail
parent=$(realpath -m "${DEMO_DIR:-$(dirname "${BASH_SOURCE[0]}")/../demo}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=shell.sh
source scripts/shell.sh
# Threads that spin while they wait crawl on a busy machine.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
iterations=${DEMO_ITERATIONS:-160} most_error=${DEMO_MOST_ERROR:-5}

if (($#)); then
  [[ $1 == -h || $1 == --help ]] || die "unknown argument $1; -h shows the usage"
  cat <<'EOF'
usage: scripts/demo_cifar.sh

Trains a PreAct-ResNet-20 with y = LN2(x + LN1(x + F(x))) on scikit-learn's handwritten digits (nothing to download) in less
than a minute on two cores, draws its learning curve, and fails if its test error is above 5 %. Run it again to resume.

  DEMO_DIR=folder      write into folder/cifar-<key of code and schedule> (default: demo, of the project)
  DEMO_ITERATIONS=n    updates of 32 images (160)
  DEMO_MOST_ERROR=x    accepted test error in % (5)
EOF
  exit
fi

options=(--data digits --depth 20 --skip-kind rskip --skip-lambda 2 --skip-norm layer --device cpu)
options+=(--iterations "$iterations" --warmup-iterations "$((iterations / 16))" --batch-size 32 --crop 2)
key=$({ printf '%s\n' "${options[@]}"; cat fairseq_rskip/*.py fairseq_rskip/{vision,residual,norms,parameters,analysis}/*.py; } | sha256sum)
folder=$parent/cifar-${key:0:12}
python scripts/train_cifar.py "${options[@]}" --output "$folder" --resume
python -m fairseq_rskip.tools analyze curves "ResNet-20, 2rSkip+LN=$folder" --output "$folder/curve"
python -c 'import json, sys; error = json.load(open(sys.argv[1]))["error"]; error <= float(sys.argv[2]) or sys.exit(
  f"error: the test error is {error} %, the demo wants at most {sys.argv[2]} %")' "$folder/seed1/result.json" "$most_error"
printf 'The demo is done; its files are in %s\n' "$folder"
