#!/usr/bin/env bash
# Multi30k (Elliott et al. 2016), English image captions to German or French; `-h` shows the usage.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# The paper has no Multi30k; 6,000 merges suit 29,000 short captions.
src=en tgt=de corpus=multi30k-en-de tokenizer=moses
fetches=1

set_corpus() { corpus=multi30k-en-$tgt; }

collect() {
  split train "$out/archives/train"
  split valid "$out/archives/val"
  split test "$out/archives/test_2016_flickr"
}

prepare "$@"
