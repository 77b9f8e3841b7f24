# shellcheck shell=bash disable=SC2034,SC2154
# How a published corpus or your own text becomes a fairseq data-bin, stage by stage. `rskip prepare`
# (fairseq_rskip/tools/prepare/main.py) sets the variables, sources this and calls make_all: the options by their names;
# corpus, out, tokenizer; tgt, empty for a language model's text; train, valid and test, the parts of a split; inputs, the
# files of your own text; or, where there are none, the archives of archives/$corpus.tsv are fetched, and unpack has
# those to unpack and their members.
# Every step writes its files under other names first: a file that exists is complete.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly here
# shellcheck source=../scripts/shell.sh
source "$here/../scripts/shell.sh"

report() { printf '%s: %s\n' "$corpus" "$*"; }

step() { python -m fairseq_rskip.tools.prepare "$@"; }

# stage NAME FUNCTION [DEPENDS-ON...]: runs FUNCTION, which fills $part, unless $out/NAME was made from the same things.
stage() {
  local name=$1 function=$2 before=$key
  shift 2
  # 1: the format of the stages' files; another number makes all of them again
  key=$(printf '%s\n' 1 "$before" "$name" "$@" | sha256sum | cut -d ' ' -f 1)
  part=$out/$name.part
  if [[ -e $out/$name/.key && $(<"$out/$name/.key") == "$key" ]]; then
    report "$name: up to date"
    return
  fi
  if [[ ! -e $part/.key || $(<"$part/.key") != "$key" ]]; then
    rm -rf -- "$part"
    mkdir -- "$part"
    echo "$key" >"$part/.key"
  fi
  find "$part" -name '.*.part' -delete # what a killed step had begun
  report "$name"
  "$function"
  rm -rf -- "${out:?}/$name"
  mv -- "$part" "$out/$name"
}

# checksum KIND FILE: as in a list of archives; git-blob is what `git hash-object` prints.
checksum() {
  case $1 in
    sha256 | md5) "$1sum" <"$2" ;;
    git-blob) { printf 'blob %s\0' "$(stat -L -c %s -- "$2")" && cat -- "$2"; } | sha1sum ;;
  esac | cut -d ' ' -f 1
}

# download URL FILE: what FILE lacks; in $problem, why it is not complete. curl's own --retry would drop what an attempt got.
download() {
  local url=$1 file=$2 size tries=4
  while ((tries--)); do
    size=$(stat -c %s -- "$file" 2>/dev/null || true)
    problem=$(curl -fsSL --globoff -C - --connect-timeout 20 --speed-limit 100 --speed-time "${STALL:-30}" \
      -o "$file" --url "$url" 2>&1) && return
    [[ $problem != *' 40'[1345]* ]] || return 1
    [[ $problem != *' 416'* && $problem != *'(33)'* ]] || rm -f -- "$file" # it cannot be resumed from here
    [[ $(stat -c %s -- "$file" 2>/dev/null || true) == "$size" ]] || tries=4
    sleep "${RETRY_DELAY:-2}"
  done
  return 1
}

# fetch NAME CHECKSUM URL...: $out/archives/NAME, checked. A file with another checksum is kept as NAME.bad.
fetch() {
  local name=$1 kind=${2%%:*} wanted=${2#*:} url urls file=$out/archives/$1 problems='' page
  shift 2
  if [[ -e $file ]]; then
    [[ $(checksum "$kind" "$file") != "$wanted" ]] || { report "$name: up to date, $kind checked" && return; }
    mv -f -- "$file" "$file.bad"
  fi
  urls=("$@")
  [[ ! -s $file.part ]] || urls+=("$@") # it may have begun as another file
  for url in "${urls[@]}"; do
    if [[ -d $from ]]; then
      rm -f -- "$file.part"
      ln -L -- "$url" "$file.part" 2>/dev/null || cp -- "$url" "$file.part" || die "cannot copy $url"
    elif [[ ! -s $file.part || $(checksum "$kind" "$file.part") != "$wanted" ]]; then
      download "$url" "$file.part" || { problems+="; $url: $problem" && continue; }
    fi
    if [[ $(checksum "$kind" "$file.part") == "$wanted" ]]; then
      mv -- "$file.part" "$file"
      report "$name: fetched, $kind checked"
      return
    fi
    page=$(head -c 99 -- "$file.part" | grep -aio '<html\|<!doctype' || true)
    problems+="; $url: wrong checksum${page:+ (a web page)}"
    mv -f -- "$file.part" "$file.bad"
  done
  die "cannot fetch $name${problems//$'\n'/ }; the same command resumes"
}

# The archives of the list, in $out/archives; their identity is what every later stage depends on.
fetch_all() {
  local row name size sum urls list=${archives:-$here/archives/$corpus.tsv}
  [[ -f $list ]] || die "there is no list of archives $list"
  [[ $from != *://* && -n $from && ! -d $from ]] && die "--from $from: expected a folder or a URL"
  mkdir -p -- "$out/archives"
  while IFS= read -r row; do
    [[ -n $row && $row != '#'* ]] || continue
    IFS=$'\t' read -r name size sum urls <<<"$row"
    [[ $name =~ ^[^/.][^/]*$ && $sum =~ ^(sha256:[0-9a-f]{64}|git-blob:[0-9a-f]{40}|md5:[0-9a-f]{32})$ && -n $urls ]] ||
      die "$list: expected a name, a size or -, sha256:, git-blob: or md5: with all digits, and URLs, separated by tabs: $row"
    IFS=$'\t' read -ra urls <<<"$urls"
    [[ -z $from ]] || urls=("${from%/}/$name")
    fetch "$name" "$sum" "${urls[@]}"
    inputs+=("$out/archives/$name")
  done <"$list"
}

# The members of the archives, which take turns in $unpack, into the stage's folder.
unpacked() {
  local log extract
  set -- "${unpack[@]}"
  while (($#)); do
    extract=(tar -xf "$out/archives/$1" -C "$part" --no-same-owner --wildcards "$2")
    [[ $1 != *.zip ]] || extract=(python -m zipfile -e "$out/archives/$1" "$part")
    [[ -e $part/.$1 ]] || log=$("${extract[@]}" 2>&1) || die "cannot unpack $1: ${log//$'\n'/; }"
    touch -- "$part/.$1"
    shift 2
  done
}

raw() {
  local name
  if [[ -n ${input:-} ]]; then
    step documents "$input" "$documents" "$held_out" "$part/"{train,valid,test}".$src"
    return
  fi
  for name in train valid test; do
    local -n parts=$name
    [[ ! -e $part/$name.$src || (-n $tgt && ! -e $part/$name.$tgt) ]] || continue
    if [[ -n $tgt ]]; then
      step "${parts[0]}" "$part/$name" "$src" "$tgt" "${parts[@]:1}"
    else
      step documents "${parts[1]}" "$documents" 0 "$part/$name.$src"
    fi
  done
}

# encode KIND FROM TO MODEL LANGUAGE: what TO lacks of {train,valid,test}.LANGUAGE, from the files in FROM.
encode() { step encode "$1" "$2" "$3" "$4" "$normalise" "$5" "$workers" {train,valid,test}".$5"; }

text() {
  local lang
  for lang in "${languages[@]}"; do
    encode "${tokenizer/none/clean}" "$out/raw" "$part" '' "$lang"
  done
}

subwords() {
  local name lang model text=$out/text texts
  if [[ $bpe == none ]]; then
    ln -sfn -- ../text "$part/all"
  else
    mkdir -p -- "$part/all"
    for lang in "${languages[@]}"; do
      model=$part/model texts=("${languages[@]/#/$text/train.}")
      [[ $vocabulary == joint ]] || model=$part/model.$lang texts=("$text/train.$lang")
      [[ -e $model ]] || step learn "$bpe" "$bpe_size" "$model" "${texts[@]}"
      encode "$bpe" "$text" "$part/all" "$model" "$lang"
    done
  fi
  for lang in "${languages[@]}"; do
    for name in {train,valid,test}".$lang"; do
      ln -sfn -- "all/$name" "$part/$name"
    done
  done
  [[ -n $tgt ]] || return 0
  # Training pairs only: a score is of the whole test set.
  rm -- "$part/train."{"$src","$tgt"}
  step filter "$max_length" "$max_ratio" "$part/all/train."{"$src","$tgt"} "$part/train."{"$src","$tgt"}
}

binarise() {
  local sides=(--source-lang "$src" --target-lang "$tgt" --joined-dictionary) log=$out/fairseq-preprocess.log
  local lang text=$out/subwords suffix=''
  [[ $vocabulary == joint ]] || unset 'sides[-1]'
  [[ -n $tgt ]] || sides=(--only-source) suffix=.$src
  find "$part" -mindepth 1 -not -name .key -delete # fairseq-preprocess refuses a dictionary that is there already
  fairseq-preprocess "${sides[@]}" --destdir "$part" \
    --trainpref "$text/train$suffix" --validpref "$text/valid$suffix" --testpref "$text/test$suffix" \
    --workers "${workers:-$(getconf _NPROCESSORS_ONLN)}" >"$log" 2>&1 ||
    die "fairseq-preprocess failed: $(grep . "$log" | tail -n 1); its output is in $log"
  mkdir -p -- "$part/raw" # as published: what a translation is compared with
  for lang in "${languages[@]}"; do
    cp -- "$out/raw/"{valid,test}".$lang" "$part/raw/"
  done
  step describe "$part" "$facts"
}

make_all() {
  local part key languages=("$src" ${tgt:+"$tgt"})
  [[ -v inputs ]] || fetch_all
  # what tells one version of a file from another without reading all of it
  key=$(printf '%s\0' "${inputs[@]}" | xargs -0 stat -L -c '%s %y' --)
  [[ -z ${unpack:-} ]] || stage unpacked unpacked
  stage raw raw "$src" "$tgt" ${held_out:+"$documents" "$held_out"}
  stage text text "$tokenizer" "$normalise"
  stage subwords subwords "$bpe" "$bpe_size" "$vocabulary" "$max_length" "$max_ratio"
  stage data-bin binarise "$corpus"
  report "ready: $out/data-bin; its preparation.json has the numbers of sentences, tokens and unknown words"
}
