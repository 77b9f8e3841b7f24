#!/usr/bin/env bash
# WMT'14 English-French as in the paper (36M pairs); `-h` shows the usage.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Vaswani et al. 2017: 32,000 subwords.
src=en tgt=fr corpus=wmt14-en-fr tokenizer=moses
fetches=1

unpack_all() {
  unpack training-parallel-europarl-v7.tgz 'training/europarl-v7.fr-en.*'
  unpack training-parallel-commoncrawl.tgz 'commoncrawl.fr-en.*'
  unpack training-parallel-un.tgz 'un/undoc.2000.fr-en.*'
  unpack training-parallel-nc-v9.tgz 'training/news-commentary-v9.fr-en.*'
  unpack training-giga-fren.tar 'giga-fren.release2.fixed.*.gz'
  unpack dev.tgz 'dev/newstest201[23].??'
  unpack test-full.tgz 'test-full/newstest2014-fren-*.sgm'
}

collect() {
  local from=$out/unpacked
  split train "$from/training/europarl-v7.fr-en" "$from/commoncrawl.fr-en" "$from/un/undoc.2000.fr-en" \
    "$from/training/news-commentary-v9.fr-en" "$from/giga-fren.release2.fixed"
  split valid "$from/dev/newstest2012" "$from/dev/newstest2013"
  split test "$from/test-full/newstest2014-fren"
}

prepare "$@"
