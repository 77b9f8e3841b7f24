#!/usr/bin/env bash
# From nothing to a scored model in minutes on a CPU, with the scripts that a real corpus takes; `make demo` runs this.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=shell.sh
source scripts/shell.sh

folder=${DEMO_DIR:-demo}
pairs=${DEMO_PAIRS:-20000}
epochs=${DEMO_EPOCHS:-4}
least_bleu=${DEMO_LEAST_BLEU:-95}
# A model this small gains nothing from more GPUs or threads, and threads that spin while they wait crawl on a busy
# machine.
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-0}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

usage() {
  cat <<'EOF'
usage: scripts/demo.sh

Teaches a small transformer_rskip_ln (lambda = 2) to turn English numbers into Vietnamese ones, on a CPU, in minutes,
and fails unless it has learned to. What is complete is not done again; after Ctrl-C the next run resumes.

  DEMO_DIR=folder      where everything goes (default: demo)
  DEMO_PAIRS=n         training pairs (20000)
  DEMO_EPOCHS=n        passes over them (4)
  DEMO_LEAST_BLEU=x    held-out BLEU below which the demo has failed (95)
EOF
}

# run COMMAND...: shows what a user would type.
run() {
  printf '\n$'
  printf ' %q' "$@"
  printf '\n'
  "$@"
}

ten_translations() {
  printf '\nTen held-out numbers: source, translation, reference\n\n'
  paste -d '\n' "$data/data-bin/raw/test.en" "$model/evaluation-test/hyp.txt" "$data/data-bin/raw/test.vi" |
    awk 'BEGIN { split("en vi ref", label, " ") }
         NR > 30 { next }
         { printf "%-4s%s\n", label[(NR - 1) % 3 + 1], $0 }
         NR % 3 == 0 { print "" }'
}

case ${1:-} in
  '') ;;
  -h | --help) usage && exit ;;
  *) die "unknown argument $1; -h shows the usage" ;;
esac

# What a folder was made from is in its name: another number of pairs or epochs starts where it must.
corpus=$folder/corpus-$pairs data=$folder/data-$pairs model=$folder/model-$pairs-$epochs
if [[ ! -e $corpus/done ]]; then
  run python scripts/make_number_corpus.py "$corpus" --train "$pairs"
  touch "$corpus/done"
fi
run data-prep/prepare-corpus.sh --name numbers --src en --tgt vi --bpe-size 100 \
  --train "$corpus/train" --valid "$corpus/valid" --test "$corpus/test" "$data"
run scripts/train.sh "$data" transformer_rskip_ln_tiny --skip-lambda 2 --max-epoch "$epochs" --save-dir "$model" \
  --encoder-layers 2 --encoder-embed-dim 128 --encoder-ffn-embed-dim 256 --encoder-attention-heads 4 \
  --decoder-layers 2 --decoder-embed-dim 128 --decoder-ffn-embed-dim 256 --decoder-attention-heads 4
run scripts/evaluate.sh "$data" "$model" --average 2
ten_translations
python - "$model/evaluation-test/scores.json" "$least_bleu" <<'EOF'
import json, sys
scores = json.load(open(sys.argv[1], encoding="utf-8"))["scores"]
bleu, least = scores[0]["score"], float(sys.argv[2])
print(f"{scores[0]['name']} on 500 numbers that were held out: {bleu:.1f}")
sys.exit(f"error: held-out BLEU is {bleu:.1f}, the demo wants at least {least:g}" if bleu < least else 0)
EOF
printf 'The demo is done; its files are in %s\n' "$folder"
