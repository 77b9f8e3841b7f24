#!/usr/bin/env bash
# A parallel corpus of one's own, from plain text to a fairseq data-bin; `-h` shows the usage.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

src='' tgt='' corpus='' tokenizer=moses bpe_size=32000
declare -A prefix=()

usage() {
  cat <<EOF
usage: data-prep/prepare-corpus.sh --src en --tgt de --train PREFIX --valid PREFIX --test PREFIX [options] FOLDER

PREFIX.en and PREFIX.de are plain text (UTF-8, gzip too: PREFIX.en.gz), one sentence a line, line i of one translating
line i of the other. The result is FOLDER/data-bin.

  --src LANG, --tgt LANG   language codes
  --train, --valid, --test PREFIX
  --name NAME              what the corpus is called (default: FOLDER's name)
  --tokenizer KIND         moses (default), or none for text that is tokenised already
$(text_options)
EOF
}

own_option() {
  case $1 in
    --src) src=$(value_of "$@") ;;
    --tgt) tgt=$(value_of "$@") ;;
    --name) corpus=$(value_of "$@") ;;
    --train | --valid | --test) prefix[${1#--}]=$(value_of "$@") ;;
    --tokenizer)
      tokenizer=$(value_of "$@")
      [[ $tokenizer == moses || $tokenizer == none ]] || die "--tokenizer $tokenizer: moses and none are known"
      ;;
    *) unknown_option "$1" ;;
  esac
}

# Sets found to PREFIX.LANG or PREFIX.LANG.gz.
find_text() {
  for found in "$1.$2" "$1.$2.gz"; do
    [[ ! -f $found ]] || return 0
  done
  die "no file $1.$2 (nor $1.$2.gz)"
}

own_checks() {
  local option name lang found
  for option in src tgt; do
    [[ ${!option} =~ ^[A-Za-z_]+$ ]] || die "--$option needs a language code such as en, not '${!option}'; -h shows the usage"
  done
  [[ $src != "$tgt" ]] || die "--src and --tgt are both $src"
  [[ ${#positional[@]} -eq 1 ]] || die "the target FOLDER is missing; -h shows the usage"
  corpus=${corpus:-$(basename "${positional[0]}")}
  for name in train valid test; do
    [[ -n ${prefix[$name]:-} ]] || die "--$name PREFIX is missing; -h shows the usage"
    for lang in "$src" "$tgt"; do
      find_text "${prefix[$name]}" "$lang"
      inputs+=("$(realpath -- "$found")")
    done
  done
}

collect() {
  local name
  for name in train valid test; do
    split "$name" "${prefix[$name]}"
  done
}

prepare "$@"
