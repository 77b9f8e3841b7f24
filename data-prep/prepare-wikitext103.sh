#!/usr/bin/env bash
# WikiText-103 (Merity et al. 2016), articles of Wikipedia for a language model; `-h` shows the usage.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Published as tokens already, rare words as <unk>; an article begins with its title.
src=en corpus=wikitext103 tokenizer=none
fetches=1

unpack_all() { unpack wikitext-103-v1.zip; }

collect() {
  local name
  for name in train valid test; do
    step documents --titles "$out/unpacked/wikitext-103/wiki.$name.tokens" "$part/$name.en"
  done
}

prepare "$@"
