#!/usr/bin/env bash
# WMT'14 English-German as in the paper (4.5M pairs); `-h` shows the usage.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Vaswani et al. 2017: about 37,000 joint subwords.
src=en tgt=de corpus=wmt14-en-de tokenizer=moses
fetches=1

unpack_all() {
  unpack training-parallel-europarl-v7.tgz 'training/europarl-v7.de-en.*'
  unpack training-parallel-commoncrawl.tgz 'commoncrawl.de-en.*'
  unpack training-parallel-nc-v9.tgz 'training/news-commentary-v9.de-en.*'
  unpack dev.tgz 'dev/newstest2013.??'
  unpack test-full.tgz 'test-full/newstest2014-deen-*.sgm'
}

collect() {
  local from=$out/unpacked
  split train "$from/training/europarl-v7.de-en" "$from/commoncrawl.de-en" "$from/training/news-commentary-v9.de-en"
  split valid "$from/dev/newstest2013"
  split test "$from/test-full/newstest2014-deen"
}

prepare "$@"
