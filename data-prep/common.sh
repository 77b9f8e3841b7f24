# shellcheck shell=bash disable=SC2034,SC2154
# How a parallel corpus becomes a fairseq data-bin; sourced by prepare-*.sh.
#
# The caller sets corpus, src, tgt, tokenizer (moses; none for text that is tokenised already), bpe_size and paper (the
# paper's pairs per split), defines usage and collect, and calls prepare "$@". collect calls `split NAME PREFIX...`
# for train, valid and test. fetches=1 has archives/<corpus>.tsv fetched first, unpack_all, where there is one, unpacks
# them. own_option takes an option of the caller's own and its value, own_checks looks at all of them before anything is
# written.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly here
# shellcheck source=../scripts/shell.sh
source "$here/../scripts/shell.sh"

readonly format=1 # of the stages' files; another number makes everything anew
archive_list='' fetches='' paper=() positional=() inputs=()

archive_options() {
  cat <<EOF
  --from DIR-or-URL        take the archives from a folder or a mirror
  --archives FILE          another list of archives than those in data-prep/archives, with its own sizes and checksums
EOF
}

text_options() {
  cat <<EOF
  --bpe KIND               subword-nmt (default), sentencepiece (on untokenised text), or none
  --bpe-size N             merge operations, or sentencepiece's vocabulary (default: $bpe_size)
  --joint, --separate      one set of subwords and one dictionary for both languages (default), or one each
  --normalise-punctuation  quotes and dashes to ASCII before tokenising; the references stay as published
  --max-length N           longest training sentence in subwords (default: 250)
  --max-ratio X            most that one side may be longer than the other in training (default: 1.5)
  --workers N              processes (default: all cores)

Every stage runs once: after an interruption or an error the same command goes on where it stopped, and what an option
or an input changes is made anew.
EOF
}

say() { printf '%s: %s\n' "$corpus" "$*"; }

tool() {
  local name=$1
  shift
  python "$here/$name.py" "$@"
}

# make FILE COMMAND...: every tool writes its file under another name first, so that one that exists is complete.
make() {
  local file=$1
  shift
  [[ -e $file ]] || "$@"
}

value_of() {
  [[ -n ${2:-} ]] || die "$1 needs a value; -h shows the usage"
  printf '%s' "$2"
}

unknown_option() { die "unknown option $1; -h shows the usage"; }

own_option() { unknown_option "$1"; }
own_checks() { :; }

parse_options() {
  local taken
  bpe=subword-nmt vocabulary=joint workers='' from='' normalise='' max_length=250 max_ratio=1.5
  while [[ $# -gt 0 ]]; do
    taken=2
    case $1 in
      -h | --help) usage && exit ;;
      --bpe) bpe=$(value_of "$@") ;;
      --bpe-size) bpe_size=$(value_of "$@") ;;
      --joint) vocabulary=joint taken=1 ;;
      --separate) vocabulary=separate taken=1 ;;
      --normalise-punctuation) normalise=$1 taken=1 ;;
      --max-length) max_length=$(value_of "$@") ;;
      --max-ratio) max_ratio=$(value_of "$@") ;;
      --workers) workers=$(value_of "$@") ;;
      --from | --archives)
        [[ -n $fetches ]] || unknown_option "$1"
        if [[ $1 == --from ]]; then from=$(value_of "$@"); else archive_list=$(value_of "$@"); fi
        ;;
      -*) own_option "$@" ;;
      '') die "an empty argument; -h shows the usage" ;;
      *) positional+=("$1") taken=1 ;;
    esac
    shift "$taken"
  done
}

check_options() {
  local number
  [[ ${#positional[@]} -le 1 ]] || die "one target folder is accepted, got ${#positional[@]}: ${positional[*]}; -h shows the usage"
  [[ $bpe =~ ^(subword-nmt|sentencepiece|none)$ ]] || die "--bpe $bpe: subword-nmt, sentencepiece and none are known"
  for number in "--bpe-size $bpe_size" "--max-length $max_length" "--workers ${workers:-1}"; do
    [[ $number =~ \ [1-9][0-9]*$ ]] || die "$number: a whole number above 0 is needed"
  done
  [[ $max_ratio =~ ^[1-9][0-9]*(\.[0-9]+)?$ ]] || die "--max-ratio $max_ratio: a number of at least 1 is needed"
  [[ -z $archive_list || -f $archive_list ]] || die "no list of archives $archive_list"
  if [[ $bpe == sentencepiece ]]; then
    tokenizer=none
  fi
}

# Only one preparation of a folder at a time; the lock ends with the process.
open_folder() {
  { mkdir -p -- "$out" && [[ -w $out ]]; } 2>/dev/null || die "cannot write to the folder $out"
  out=$(cd "$out" && pwd)
  exec 9>"$out/.lock"
  if command -v flock >/dev/null && ! flock --nonblock 9; then
    die "another preparation of $out is running"
  fi
}

# What tells one version of a file from another without reading all of it.
identity() { stat -L -c '%s %y' -- "$@"; }

# stage NAME FUNCTION [DEPENDS-ON...]: runs FUNCTION, which fills $part, unless $out/NAME was made from the same things.
stage() {
  local name=$1 function=$2 before=$key
  shift 2
  key=$(printf '%s\n' "$format" "$before" "$name" "$@" | sha256sum | cut -d ' ' -f 1)
  part=$out/$name.part
  if [[ -e $out/$name/.key && $(<"$out/$name/.key") == "$key" ]]; then
    say "$name: up to date"
    return
  fi
  if [[ ! -e $part/.key || $(<"$part/.key") != "$key" ]]; then
    rm -rf -- "$part"
    mkdir -- "$part"
    printf '%s\n' "$key" >"$part/.key"
  fi
  say "$name"
  check_space "$name"
  "$function"
  rm -rf -- "${out:?}/$name"
  mv -- "$part" "$out/$name"
}

# No stage writes more than about twice what another wrote.
check_space() {
  local needed free
  needed=$(du -sk -- "$out"/*/ | awk '$1 > most { most = $1 } END { print 2 * most }')
  free=$(df -Pk -- "$out" | awk 'NR == 2 { print $4 }')
  [[ $free -ge $needed ]] ||
    die "the stage $1 may need $((needed / 1024 + 1)) MB in $out, where $((free / 1024)) MB are free; finished stages are kept"
}

# unpack ARCHIVE [MEMBERS]: into the stage's folder, once.
unpack() {
  local done=$part/.$1
  [[ ! -e $done ]] || return 0
  tool unpack "$out/archives/$1" "$part" ${2:+--only "$2"}
  touch -- "$done"
}

split() {
  local name=$1
  shift
  [[ -e $part/$name.$src && -e $part/$name.$tgt ]] || tool collect "$part/$name" --src "$src" --tgt "$tgt" "$@"
}

# each FUNCTION: calls FUNCTION SPLIT LANGUAGE for all of them.
each() {
  local name lang
  for name in train valid test; do
    for lang in "$src" "$tgt"; do
      "$1" "$name" "$lang"
    done
  done
}

encode() {
  local source=$1 target=$2
  shift 2
  make "$target" tool encode "$@" ${workers:+--workers "$workers"} "$source" "$target"
}

clean_and_tokenise() {
  local step=(clean)
  [[ $tokenizer == none ]] || step=(moses --lang "$2" ${normalise:+"$normalise"})
  encode "$out/raw/$1.$2" "$part/$1.$2" "${step[@]}"
}

text() { each clean_and_tokenise; }

model_for() {
  if [[ $vocabulary == joint ]]; then printf 'model'; else printf 'model.%s' "$1"; fi
}

split_into_subwords() {
  if [[ $bpe == none ]]; then
    ln -sfn -- "../text/$1.$2" "$part/all.$1.$2"
  else
    encode "$out/text/$1.$2" "$part/all.$1.$2" "$bpe" --model "$part/$(model_for "$2")"
  fi
}

subwords() {
  local name text=$out/text/train
  if [[ $bpe != none && $vocabulary == joint ]]; then
    make "$part/model" tool learn_subwords "$bpe" --size "$bpe_size" --model "$part/model" "$text.$src" "$text.$tgt"
  elif [[ $bpe != none ]]; then
    for name in "$src" "$tgt"; do
      make "$part/model.$name" tool learn_subwords "$bpe" --size "$bpe_size" --model "$part/model.$name" "$text.$name"
    done
  fi
  each split_into_subwords
  # Training pairs only: a score is of the whole test set.
  tool filter_pairs "$part/all.train."{"$src","$tgt"} "$part/train."{"$src","$tgt"} \
    --max-length "$max_length" --max-ratio "$max_ratio"
  for name in {valid,test}.{"$src","$tgt"}; do
    ln -sfn -- "all.$name" "$part/$name"
  done
}

binarise() {
  local joined=(--joined-dictionary) log=$out/fairseq-preprocess.log text=$out/subwords
  [[ $vocabulary == joint ]] || joined=()
  find "$part" -mindepth 1 -not -name .key -delete # fairseq-preprocess refuses a dictionary that is there already
  fairseq-preprocess --source-lang "$src" --target-lang "$tgt" "${joined[@]}" --destdir "$part" \
    --trainpref "$text/train" --validpref "$text/valid" --testpref "$text/test" \
    --workers "${workers:-$(getconf _NPROCESSORS_ONLN)}" >"$log" 2>&1 ||
    die "fairseq-preprocess failed: $(grep . "$log" | tail -n 1); all it said is in $log"
  # As published: what a translation is compared with.
  mkdir -p -- "$part/raw"
  cp -- "$out/raw/"{valid,test}.{"$src","$tgt"} "$part/raw/"
  tool describe "$part" --log "$part/preprocess.log" --corpus "$corpus" --src "$src" --tgt "$tgt" --bpe "$bpe" \
    --bpe-size "$bpe_size" --tokenizer "$tokenizer" --vocabulary "$vocabulary" --paper "${paper[@]}" >"$part/summary.txt"
}

# The archives of archive_list, in $out/archives; their identity is what every later stage depends on.
fetch() {
  local archives
  tool fetch "$archive_list" "$out/archives" ${from:+--from "$from"}
  mapfile -t archives < <(sed '/^#/d;/^$/d' "$archive_list" | cut -f 1)
  inputs=("${archives[@]/#/$out/archives/}")
}

prepare() {
  local out bpe vocabulary workers from normalise max_length max_ratio
  parse_options "$@"
  check_options
  own_checks
  [[ -z $fetches ]] || archive_list=${archive_list:-$here/archives/$corpus.tsv}
  use_environment python fairseq-preprocess
  out=${positional[0]:-$here/../data/$corpus}
  open_folder
  run_job make_all
  [[ $job_status -eq 0 ]] || exit "$job_status"
}

make_all() {
  local part key
  if [[ -n $fetches ]]; then
    fetch
  fi
  key=$(identity "${inputs[@]}")
  if declare -F unpack_all >/dev/null; then
    stage unpacked unpack_all
  fi
  stage raw collect "$src" "$tgt"
  stage text text "$tokenizer" "$normalise"
  stage subwords subwords "$bpe" "$bpe_size" "$vocabulary" "$max_length" "$max_ratio"
  stage data-bin binarise "$corpus"
  cat -- "$out/data-bin/summary.txt"
  say "ready: $out/data-bin"
}
