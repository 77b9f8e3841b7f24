#!/usr/bin/env bash
# PreAct-ResNet-20 with the recursive skip learns handwritten digits; `make demo-cifar` runs this. `-h` says more.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=${DEMO_DIR:-demo}/cifar
iterations=${DEMO_ITERATIONS:-200}
most_error=${DEMO_MOST_ERROR:-5}
# Threads that spin while they wait crawl on a busy machine.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

usage() {
  cat <<'EOF'
usage: scripts/demo_cifar.sh

Trains a PreAct-ResNet-20 with y = LN2(x + LN1(x + F(x))) on scikit-learn's handwritten digits (1,438 to train on, 359 to
test, nothing to download), on a CPU, in a minute or two, draws its learning curve, and fails unless it has learned.
A finished demo is not trained again; after Ctrl-C the next run goes on.

  DEMO_DIR=folder      everything goes into folder/cifar (default: demo)
  DEMO_ITERATIONS=n    updates of 128 images (200)
  DEMO_MOST_ERROR=x    test error in % above which the demo has failed (5)
EOF
}

case ${1:-} in
  '') ;;
  -h | --help) usage && exit ;;
  *)
    printf 'error: unknown argument %s; -h shows the usage\n' "$1" >&2
    exit 1
    ;;
esac

options=(--data digits --depth 20 --skip-kind rskip --skip-lambda 2 --skip-norm layer --device cpu)
options+=(--iterations "$iterations" --warmup-iterations "$((iterations / 10))")
# What another version or another schedule left behind is trained anew.
key=$({
  printf '%s\n' "${options[@]}"
  find fairseq_rskip -maxdepth 1 -name '*.py' -exec sha256sum {} + | sort
  find fairseq_rskip/vision -name '*.py' -exec sha256sum {} + | sort
} | sha256sum | cut -d ' ' -f 1)
if [[ ! -e $folder/key || $(<"$folder/key") != "$key" ]]; then
  rm -rf -- "$folder"
  mkdir -p "$folder"
  printf '%s\n' "$key" >"$folder/key"
fi

python scripts/train_cifar.py "${options[@]}" --output "$folder" --resume
python scripts/plot_runs.py "$folder" --output "$folder/curve.png" --labels 'ResNet-20, 2rSkip+LN'
error=$(python -c 'import json, sys; print(json.load(open(sys.argv[1], encoding="utf-8"))["error"])' \
  "$folder/seed1/result.json")
awk -v error="$error" -v most="$most_error" 'BEGIN { exit !(error <= most) }' || {
  printf 'error: the test error is %s %%, the demo wants at most %s %%\n' "$error" "$most_error" >&2
  exit 1
}
printf 'The demo is done; its files are in %s\n' "$folder"
