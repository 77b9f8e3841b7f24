#!/usr/bin/env bash
# Trains an architecture on a corpus with that corpus's settings; `-h` says how, docs/training.md says why.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly here
# shellcheck source=scripts/shell.sh
source "$here/shell.sh"

usage() {
  cat <<'EOF'
usage: scripts/train.sh CORPUS ARCH [--dry-run [--gpus N]] [--no-fp16] [fairseq-train option ...]
       scripts/train.sh --archs

Trains ARCH on CORPUS with the paper's settings for it (docs/training.md), on all GPUs that torch sees, or on the CPU.
The same command again goes on from SAVE-DIR/checkpoint_last.pt.

  CORPUS               iwslt15-en-vi, wmt14-en-de, wmt14-en-fr, multi30k-en-de, multi30k-en-fr or numbers, prepared in
                       data/CORPUS/data-bin; or a folder: a data-bin of fairseq-preprocess, or the folder around it
  ARCH                 an architecture of fairseq or of this plugin; --archs lists them all
  --dry-run            print the fairseq-train command alone, and do nothing; the data need not be there yet
  --gpus N             with --dry-run: as on a machine with N GPUs
  --no-fp16            train in single precision on a GPU that could do otherwise
  fairseq-train option any; what is given here wins over the settings. --save-dir is checkpoints/CORPUS/ARCH unless given

  MAX_TOKENS_PER_GPU=n the largest batch a GPU takes at once (4096); the tokens of a step do not depend on it
  CUDA_VISIBLE_DEVICES chooses among the GPUs
EOF
}

# shellcheck disable=SC2329 # stop_job calls it
stopped() {
  if [[ -e $save/checkpoint_last.pt ]]; then
    printf 'stopped; the same command goes on from %s\n' "$save/checkpoint_last.pt"
  else
    printf 'stopped before the first checkpoint was written\n'
  fi
}

# shellcheck disable=SC2329 # run_job calls it
logged() { { printf '%s\n' "$text" && "$@" 2>&1 </dev/null; } | tee -a -- "$save/train.log"; }

# Why fairseq-train ended with status $1: the last error in what it wrote to train.log from byte $2 on, else its last line.
reason() {
  local said line
  if [[ $1 -eq 137 ]]; then
    printf 'killed, out of memory perhaps'
    return
  fi
  said=$(tail -c "+$(($2 + 1))" -- "$save/train.log" | tr '\r' '\n' | grep -a '[^[:space:]]' |
    sed -E '/^Exception ignored in/,/^[A-Za-z0-9_.]*(Error|Exception)(:|$)/d') || true # what went wrong while it ended
  line=$(grep -aE '(^|[a-z]: )error: |^[A-Za-z0-9_.]*(Error|Exception|Exit)(:|$)' <<<"$said" | tail -n 1) || true
  line=${line:-${said##*$'\n'}}
  line=${line#error: }
  printf '%s' "${line:0:500}"
}

# evaluate.sh averages what has a number in its name; fairseq gives none to where --max-update ends an epoch midway.
say_what_can_be_averaged() {
  local path found=0
  for path in "$save"/checkpoint*.pt; do
    [[ ${path##*/} =~ ^checkpoint(_[0-9]+_)?[0-9]+\.pt$ ]] && found=$((found + 1))
  done
  [[ $found -ge 2 ]] || printf 'train.sh: %s\n' "$found numbered checkpoint(s) in $save: nothing to average, evaluate.sh \
will take a single one. fairseq writes them where an epoch ends, or every N updates with --save-interval-updates N" >&2
}

train() {
  local save=$1 text=$2 job_status before=0
  shift 2
  if command -v flock >/dev/null; then
    exec 9>"$save/train.lock" # fairseq-train inherits it: it is held as long as anything writes there
    flock --nonblock 9 || die "another training writes to $save"
  fi
  [[ ! -e $save/train.log ]] || before=$(wc -c <"$save/train.log")
  run_job logged "$@"
  [[ $job_status -eq 0 ]] ||
    die "fairseq-train ended with status $job_status: $(reason "$job_status" "$before"); its output is in $save/train.log"
  say_what_can_be_averaged
}

main() {
  local word dry_run='' plan
  for word in "$@"; do
    case $word in
      -h | --help)
        usage
        return
        ;;
      --dry-run | --archs) dry_run=1 ;;
    esac
  done
  use_environment fairseq-train
  if [[ -n $dry_run ]]; then
    exec python "$here/training" "$@"
  fi
  mapfile -d '' -t plan < <(exec python "$here/training" "$@")
  wait "$!" || exit 1
  [[ ${#plan[@]} -eq 0 ]] || train "${plan[@]}"
}

main "$@"
exit # bash reads a script as it runs: not on, into a version that was put here meanwhile
