#!/usr/bin/env bash
# A small corpus, a model trained on it, its translations and their score; `make demo` runs this. `-h` says more.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=${DEMO_DIR:-demo}
pairs=${DEMO_PAIRS:-20000}
epochs=${DEMO_EPOCHS:-6}
least_bleu=${DEMO_LEAST_BLEU:-90}
# A model this small gains nothing from more threads, and threads that spin while they wait crawl on a busy machine.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

usage() {
  cat <<'EOF'
usage: scripts/demo.sh

Teaches a small transformer_rskip_ln (lambda = 2) to turn English numbers into Vietnamese ones, on a CPU, in minutes,
and fails unless it has learned to. What is complete is not done again; after Ctrl-C the next run goes on.

  DEMO_DIR=folder      where everything goes (default: demo)
  DEMO_PAIRS=n         training pairs (20000)
  DEMO_EPOCHS=n        passes over them (6)
  DEMO_LEAST_BLEU=x    held-out BLEU below which the demo has failed (90)
EOF
}

# Runs the function $1, which fills the folder $1, unless it did so before. The key of a stage is all that it depends
# on: the stage before, its own commands, the files named after it. Another key means: start that stage anew.
stage() {
  local name=$1
  shift
  key=$({
    printf '%s\n' "$key"
    declare -f "$name"
    find "$@" -name '*.py' -exec sha256sum {} + | sort
  } | sha256sum | cut -d ' ' -f 1)
  out=$folder/$name
  if [[ -e $out/done && $(<"$out/done") == "$key" ]]; then
    printf '== %s: up to date\n' "$name"
    return
  fi
  if [[ ! -e $out/key || $(<"$out/key") != "$key" ]]; then
    rm -rf -- "$out"
    mkdir -p "$out"
    printf '%s\n' "$key" >"$out/key"
  fi
  printf '== %s\n' "$name"
  "$name"
  printf '%s\n' "$key" >"$out/done"
}

corpus() {
  python scripts/make_number_corpus.py "$out" --train "$pairs"
}

# Whole words: the corpus has some fifty of them, there is nothing for BPE to split.
binarised() {
  fairseq-preprocess --source-lang en --target-lang vi --joined-dictionary --destdir "$out" \
    --trainpref "$folder/corpus/train" --validpref "$folder/corpus/valid" --testpref "$folder/corpus/test"
}

model() {
  fairseq-train "$folder/binarised" --user-dir "$plugin" --save-dir "$out" --cpu --seed 1 \
    --arch transformer_rskip_ln_tiny --skip-lambda 2 --encoder-layers 2 --decoder-layers 2 --share-all-embeddings \
    --encoder-embed-dim 128 --encoder-ffn-embed-dim 256 --encoder-attention-heads 4 \
    --decoder-embed-dim 128 --decoder-ffn-embed-dim 256 --decoder-attention-heads 4 --dropout 0.1 \
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --optimizer adam --adam-betas '(0.9, 0.98)' \
    --lr 0.002 --lr-scheduler inverse_sqrt --warmup-updates 400 --max-tokens 2000 --max-epoch "$epochs" \
    --no-epoch-checkpoints --num-workers 0 --log-format simple --log-interval 50
}

translations() {
  fairseq-generate "$folder/binarised" --user-dir "$plugin" --path "$folder/model/checkpoint_best.pt" --cpu \
    --gen-subset test --beam 4 --max-tokens 4000 --num-workers 0 >"$out/generate.log"
  sed -n 's/^H-//p' "$out/generate.log" | sort -n | cut -f 3 >"$out/test.vi"
}

report() {
  local reference=$folder/corpus/test.vi hypothesis=$folder/translations/test.vi bleu
  printf '\nTen held-out numbers: source, translation, reference\n\n'
  paste -d '\n' "$folder/corpus/test.en" "$hypothesis" "$reference" |
    awk 'BEGIN { split("en vi ref", label, " ") }
         NR > 30 { next }
         { printf "%-4s%s\n", label[(NR - 1) % 3 + 1], $0 }
         NR % 3 == 0 { print "" }'
  sacrebleu "$reference" --input "$hypothesis" --metrics bleu --format text
  bleu=$(sacrebleu "$reference" --input "$hypothesis" --metrics bleu --score-only)
  awk -v bleu="$bleu" -v least="$least_bleu" 'BEGIN { exit !(bleu >= least) }' || {
    printf 'error: held-out BLEU is %s, the demo wants at least %s\n' "$bleu" "$least_bleu" >&2
    exit 1
  }
  printf 'The demo is done; its files are in %s\n' "$folder"
}

case ${1:-} in
  '') ;;
  -h | --help) usage && exit ;;
  *)
    printf 'error: unknown argument %s; -h shows the usage\n' "$1" >&2
    exit 1
    ;;
esac
plugin=$(python -m fairseq_rskip)
key=$pairs
stage corpus scripts/make_number_corpus.py
stage binarised scripts/make_number_corpus.py
key="$key $epochs"
stage model "$plugin"
stage translations "$plugin"
report
