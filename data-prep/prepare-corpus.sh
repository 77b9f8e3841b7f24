#!/usr/bin/env bash
# A parallel corpus of one's own, from plain text to a fairseq data-bin; `-h` shows the usage.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

src='' tgt='' corpus='' tokenizer=moses bpe_size=32000
declare -A text_of=() # by split, the PREFIX; by split-src and split-tgt, the file

usage() {
  cat <<EOF
usage: data-prep/prepare-corpus.sh --src en --tgt de --train PREFIX --valid PREFIX --test PREFIX [options] FOLDER

PREFIX.en and PREFIX.de are plain text (UTF-8, gzip too: PREFIX.en.gz), one sentence a line, line i of one translating
line i of the other. The result is FOLDER/data-bin.

  --src LANG, --tgt LANG   language codes
  --train, --valid, --test PREFIX
  --train-src FILE --train-tgt FILE   in place of --train, where the two names have no prefix in common; and so
                           --valid-src, --valid-tgt, --test-src, --test-tgt
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
    --train | --valid | --test | --train-src | --train-tgt | --valid-src | --valid-tgt | --test-src | --test-tgt)
      text_of[${1#--}]=$(value_of "$@")
      ;;
    --tokenizer)
      tokenizer=$(value_of "$@")
      [[ $tokenizer == moses || $tokenizer == none ]] || die "--tokenizer $tokenizer: moses and none are known"
      ;;
    *) unknown_option "$1" ;;
  esac
}

own_checks() {
  local option name side
  for option in src tgt; do
    [[ ${!option} =~ ^[A-Za-z_]+$ ]] || die "--$option needs a language code such as en, not '${!option}'; -h shows the usage"
  done
  [[ $src != "$tgt" ]] || die "--src and --tgt are both $src"
  [[ ${#positional[@]} -eq 1 ]] || die "the target FOLDER is missing; -h shows the usage"
  corpus=${corpus:-$(basename "${positional[0]}")}
  for name in train valid test; do
    for side in src tgt; do
      find_text "$name" "$side"
    done
  done
}

# find_text SPLIT SIDE: sets text_of[SPLIT-SIDE] to an absolute path, from PREFIX where that is given.
find_text() {
  local prefix=${text_of[$1]:-} file=${text_of[$1-$2]:-}
  [[ -n $prefix$file ]] || die "--$1 PREFIX is missing (or --$1-src FILE and --$1-tgt FILE); -h shows the usage"
  [[ -z $prefix || -z $file ]] || die "--$1 and --$1-$2 are both given; -h shows the usage"
  file=${file:-$prefix.${!2}}
  [[ -z $prefix || -f $file || ! -f $file.gz ]] || file=$file.gz
  [[ -f $file ]] || die "no file $file${prefix:+ (nor $file.gz)}"
  text_of[$1-$2]=$(realpath -s -- "$file")
  inputs+=("${text_of[$1-$2]}")
}

collect() {
  local name
  for name in train valid test; do
    split "$name" --files "${text_of[$name-src]}" "${text_of[$name-tgt]}"
  done
}

prepare "$@"
