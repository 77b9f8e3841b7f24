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

# Ends every process of the job $job, then the script.
# shellcheck disable=SC2329 # the traps call it
stop() {
  local tenths=100
  trap '' INT TERM HUP
  { kill -TERM -- "-$job" && wait "$job"; } 2>/dev/null || true
  while kill -0 -- "-$job" 2>/dev/null && ((tenths--)); do sleep 0.1; done
  kill -KILL -- "-$job" 2>/dev/null || true
  if [[ -e $save/checkpoint_last.pt ]]; then
    printf 'stopped; the same command goes on from %s\n' "$save/checkpoint_last.pt" >&2
  else
    printf 'stopped before the first checkpoint was written\n' >&2
  fi
  exit "$1"
}

train() {
  local save=$1 text=$2 job status=0
  shift 2
  if command -v flock >/dev/null; then
    exec 9>"$save/train.lock" # fairseq-train inherits it: it is held as long as anything writes there
    flock --nonblock 9 || die "another training writes to $save"
  fi
  set -m # a process group of its own, so that stopping reaches every process that fairseq-train starts
  ({ printf '%s\n' "$text" && "$@" 2>&1 </dev/null; } | tee -a -- "$save/train.log") &
  job=$!
  set +m
  trap 'stop 130' INT
  trap 'stop 143' TERM HUP
  wait "$job" || status=$?
  [[ $status -eq 0 ]] || die "fairseq-train ended with status $status; its output is in $save/train.log, too"
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
