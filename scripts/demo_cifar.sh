#!/usr/bin/env bash
# PreAct-ResNet-20 with the recursive skip learns handwritten digits; `make demo-cifar` runs this. `-h` says more.
set -euo pipefail
caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=shell.sh
source scripts/shell.sh

parent=${DEMO_DIR:-demo}
iterations=${DEMO_ITERATIONS:-160}
most_error=${DEMO_MOST_ERROR:-5}
[[ -z ${DEMO_DIR:-} || $parent == /* ]] || parent=$caller/$parent
# Threads that spin while they wait crawl on a busy machine.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

usage() {
  cat <<'EOF'
usage: scripts/demo_cifar.sh

Trains a PreAct-ResNet-20 with y = LN2(x + LN1(x + F(x))) on scikit-learn's handwritten digits (1,438 to train on, 359 to
test, nothing to download), on two cores in less than a minute, draws its learning curve, and fails unless it has
learned. A finished demo is not trained again; after Ctrl-C the next run resumes.

  DEMO_DIR=folder      everything goes into folder/cifar-<key of code and schedule> (default: demo, of the project)
  DEMO_ITERATIONS=n    updates of 32 images (160)
  DEMO_MOST_ERROR=x    test error in % above which the demo has failed (5)
EOF
}

case ${1:-} in
  '') ;;
  -h | --help) usage && exit ;;
  *) die "unknown argument $1; -h shows the usage" ;;
esac
[[ $iterations =~ ^[1-9][0-9]{0,8}$ ]] || die "DEMO_ITERATIONS=$iterations: expected an integer >= 1"
[[ $most_error =~ ^[0-9]+(\.[0-9]+)?$ ]] || die "DEMO_MOST_ERROR=$most_error: expected a number >= 0, in %"

options=(--data digits --depth 20 --skip-kind rskip --skip-lambda 2 --skip-norm layer --device cpu)
options+=(--iterations "$iterations" --warmup-iterations "$((iterations / 16))" --batch-size 32 --crop 2)
# Another version or another schedule gets a folder of its own.
key=$({
  printf '%s\n' "${options[@]}"
  find fairseq_rskip -maxdepth 1 -name '*.py' -exec sha256sum {} + | sort
  find fairseq_rskip/{vision,residual,norms} -name '*.py' -exec sha256sum {} + | sort
} | sha256sum)
folder=$parent/cifar-${key:0:12}

python scripts/train_cifar.py "${options[@]}" --output "$folder" --resume
python scripts/analyze.py curves "ResNet-20, 2rSkip+LN=$folder" --output "$folder/curve"
error=$(python -c 'import json, sys; print(json.load(open(sys.argv[1], encoding="utf-8"))["error"])' \
  "$folder/seed1/result.json")
awk -v error="$error" -v most="$most_error" 'BEGIN { exit !(error + 0 <= most + 0) }' ||
  die "the test error is $error %, the demo wants at most $most_error %"
printf 'The demo is done; its files are in %s\n' "$folder"
