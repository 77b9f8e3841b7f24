#!/usr/bin/env bash
# From nothing to a scored model in minutes on a CPU, with the commands that a real corpus takes; `make demo` runs this.
set -euo pipefail
folder=$(realpath -m "${DEMO_DIR:-$(dirname "${BASH_SOURCE[0]}")/../demo}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=shell.sh
source scripts/shell.sh

folder=$(realpath -m --relative-base=. "$folder") # short, where it is in the project
pairs=${DEMO_PAIRS:-20000} epochs=${DEMO_EPOCHS:-4} least_bleu=${DEMO_LEAST_BLEU:-95}
# More GPUs or threads do not help a model this small, and threads that spin while they wait slow a busy machine down.
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-0}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}

# run COMMAND...: shows what a user would type.
run() {
  printf '\n$%s\n' "$(printf ' %q' "$@")"
  "$@"
}

if [[ $# -gt 0 ]]; then
  [[ $1 == -h || $1 == --help ]] || die "unknown argument $1; -h shows the usage"
  cat <<'END'
usage: scripts/demo.sh

Teaches a small transformer_rskip_ln (lambda = 2) to turn English numbers into Vietnamese ones, and fails unless it
learns to. After Ctrl-C the same command resumes. Environment variables, with their defaults: DEMO_DIR=demo (where
everything goes), DEMO_PAIRS=20000 (training pairs), DEMO_EPOCHS=4, DEMO_LEAST_BLEU=95 (on held-out numbers).
END
  exit
fi

# The names of the folders say what they were made from.
corpus=$folder/corpus-$pairs data=$folder/data-$pairs model=$folder/model-$pairs-$epochs
if [[ ! -e $corpus/done ]]; then
  run python scripts/make_number_corpus.py "$corpus" --train "$pairs"
  touch "$corpus/done"
fi
run data-prep/prepare-corpus.sh --name numbers --src en --tgt vi --bpe-size 100 \
  --train-src "$corpus/train.en" --train-tgt "$corpus/train.vi" --valid-src "$corpus/valid.en" --valid-tgt "$corpus/valid.vi" \
  --test-src "$corpus/test.en" --test-tgt "$corpus/test.vi" "$data"
run scripts/train.sh "$data" transformer_rskip_ln_tiny --skip-lambda 2 --max-epoch "$epochs" --save-dir "$model" \
  --encoder-layers 2 --encoder-embed-dim 128 --encoder-ffn-embed-dim 256 --encoder-attention-heads 4 \
  --decoder-layers 2 --decoder-embed-dim 128 --decoder-ffn-embed-dim 256 --decoder-attention-heads 4
run scripts/evaluate.sh "$data" "$model" --average 2
printf '\nTen held-out numbers: source, translation, reference\n\n'
paste -d '\n' "$data/data-bin/raw/test.en" "$model/evaluation-test/hyp.txt" "$data/data-bin/raw/test.vi" |
  awk 'NR <= 30 { printf "%-4s%s\n", NR % 3 == 1 ? "en" : NR % 3 == 2 ? "vi" : "ref", $0 }'
python - "$model/evaluation-test/scores.json" "$least_bleu" <<'END'
import json, sys
score, least = json.load(open(sys.argv[1], encoding="utf-8"))["scores"][0], float(sys.argv[2])
print(f"{score['name']} on 500 numbers that were held out: {score['score']:.2f}")
sys.exit(f"error: held-out BLEU is {score['score']:.2f}; the demo needs {least:g}" if score["score"] < least else 0)
END
printf 'The demo is done; its files are in %s\n' "$folder"
