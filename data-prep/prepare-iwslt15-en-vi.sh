#!/usr/bin/env bash
# IWSLT'15 English-Vietnamese as Stanford NLP and the paper use it; `-h` shows the usage.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Published as tokens already, with HTML entities. The paper: 32k joint subwords.
src=en tgt=vi corpus=iwslt15-en-vi tokenizer=none
fetches=1

unpack_all() {
  unpack train-en-vi.tgz
  unpack dev-2012-en-vi.tgz
  unpack test-2013-en-vi.tgz
}

collect() {
  split train "$out/unpacked/train"
  split valid "$out/unpacked/tst2012"
  split test "$out/unpacked/tst2013"
}

prepare "$@"
