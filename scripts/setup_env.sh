#!/usr/bin/env bash
# Brings the project's Python environment up to date and runs a command in it.
set -euo pipefail

usage="usage: scripts/setup_env.sh [command [argument ...]]
Brings the project's Python environment up to date (at once when nothing changed), then runs the command in it.

  PYTHON=python3.12     interpreter for the environment, 3.10 to 3.14 (default: the first of python3, python3.14, ...)
  RSKIP_VENV=folder     where the environment is (default: .venv)
  RSKIP_VENV=none       install into the environment that is active

uv installs the packages. Its variables hold and, where they are not set, pip's:
  UV_TORCH_BACKEND=cpu                  take the small build of torch for machines without a GPU
  UV_NO_INDEX=1 UV_FIND_LINKS=FOLDER    install from a folder of packages, without network"
root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
extras=demo,docs,fairseq,notebook,test,vision
say() { printf 'set-up: %s\n' "$*" >&2; }
die() { say "error: $*" && exit 1; }

# Prints the version of the interpreter $1 if it is a Python from 3.10 to 3.14, and fails otherwise.
version_of() {
  "$1" -c 'import sys; v = sys.version_info; (3, 10) <= v < (3, 15) or sys.exit(1); print(f"{v[0]}.{v[1]}")' 2>/dev/null
}

# an environment serves one version of Python and one place of the checkout
place() { echo "$(version_of "${PYTHON:-$python}") $root"; }
fingerprint() {
  (cd "$root" && sha256sum requirements.* setup.py patches/* scripts/setup_env.sh \
    fairseq_rskip/{compat,errors,safe_load,tools/build_fairseq}.py) | sha256sum | tr '\n' ' ' && place
}

make_venv() {
  local base version='' lacks choice=(python3 python3.1{4,3,2,1,0})
  [[ ! -e $venv || -e $stamp ]] || die "this script did not make $venv: move it, or activate it for RSKIP_VENV=none"
  [[ -z ${PYTHON:-} ]] || choice=("$PYTHON")
  for base in "${choice[@]}"; do ! version=$(version_of "$base") || break; done
  [[ -n $version ]] || die "no Python 3.10 to 3.14 (${choice[*]}): apt-get install make g++ python3-{dev,venv}"
  lacks=$(cd "$root" && "$base" -m fairseq_rskip.tools.build_fairseq --missing)
  [[ -n $uv ]] || "$base" -c 'import venv, ensurepip' 2>/dev/null || lacks+=" python$version-venv"
  [[ -z $lacks ]] || die "the system lacks packages; on Debian: apt-get install make $lacks"
  say "making $venv with Python $version"
  rm -rf -- "$venv" && mkdir -p "$venv" && echo new >"$stamp"
  if [[ -n $uv ]]; then "$uv" venv -q --allow-existing --python "$base" "$venv"; else "$base" -m venv "$venv"; fi
}

install_all() {
  local wheel reinstall=()
  [[ $before != installing* ]] || reinstall=(--reinstall)
  [[ -n $uv ]] || { { [[ -x $bin/uv ]] || "$python" -m pip install uv; } && uv=$bin/uv; } >&2
  "$uv" pip install -q --python "$python" ${UV_NO_INDEX:+--no-index} pip # which downloads and builds fairseq
  wheel=$(cd "$root" && "$python" -m fairseq_rskip.tools.build_fairseq) || die 'fairseq cannot be built; see above'
  say 'installing the tested versions (torch is large)'
  echo "installing $(place)" >"$stamp"
  # a fairseq of another origin has the same files, and would take them along if it were removed later
  "$uv" pip uninstall -q --python "$python" fairseq 2>/dev/null || true
  # compat: the import hook that setuptools would write comes after any folder named fairseq_rskip
  if ! (cd "$root" && "$uv" pip install --python "$python" "${reinstall[@]}" ${UV_NO_INDEX:+--no-index} \
    -c requirements.lock -c requirements.in "$wheel" -C editable_mode=compat -e ".[$extras]"); then
    echo "$before" >"$stamp"
    [[ -z ${UV_TORCH_BACKEND:-} ]] ||
      say "UV_TORCH_BACKEND=$UV_TORCH_BACKEND takes torch from https://download.pytorch.org alone: without a route there," \
        'unset it, or set UV_NO_INDEX=1 and UV_FIND_LINKS to a folder of packages'
    die 'uv cannot install the tested versions; see above, then run this again'
  fi
  say 'building the operator for this processor (half a minute)'
  "$python" -m fairseq_rskip.ops >&2 || say 'warning: the operator cannot be built; torch computes in its place'
  fingerprint >"$stamp"
}

[[ ${1:-} != -h && ${1:-} != --help ]] || { echo "$usage" && exit; }
[[ ${1:-} != -* ]] || die "unknown option $1; -h shows the usage"
for name in INDEX_URL EXTRA_INDEX_URL NO_INDEX FIND_LINKS; do
  uvs=UV_$name pips=PIP_$name
  [[ -z ${!uvs:-${!pips:-}} ]] || export "$uvs=${!uvs:-${!pips}}" "$pips=${!pips:-${!uvs}}"
done
# where Python may not write bytecode itself, each command would compile torch again, for seconds
[[ -z ${PYTHONDONTWRITEBYTECODE:-} ]] || export UV_COMPILE_BYTECODE=${UV_COMPILE_BYTECODE:-1}
export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match} # as pip; the lock's hashes say which file is meant
venv=${RSKIP_VENV:-.venv}
if [[ $venv == none ]]; then
  python=${PYTHON:-python}
  version_of "$python" >/dev/null || die "RSKIP_VENV=none, but $python is not a Python from 3.10 to 3.14"
  prefix=$("$python" -c 'import sys; print(sys.prefix)')
else
  prefix=$(cd "$root" && realpath -ms "$venv")
  export VIRTUAL_ENV=$prefix
  python=$prefix/bin/python venv=$prefix PATH=${PATH//"$prefix/bin":/} # make_venv may remove what is there
fi
bin=$prefix/bin stamp=$prefix/.rskip-setup
exec 9<"${BASH_SOURCE[0]}" # the lock: one set-up at a time
if ! flock --nonblock 9; then say 'waiting for another set-up' && flock 9; fi
# The stamp holds the fingerprint, but "installing" and the place while packages change, and after that was cut off.
before=$(cat "$stamp" 2>/dev/null) || before=new
if [[ $before != "$(fingerprint)" ]]; then
  uv=$(command -v uv || true)
  [[ $venv == none || $before == *" $(place)" ]] || make_venv
  install_all
fi
export PATH="$bin:$PATH"
[[ $# -eq 0 ]] || exec "$@" 9<&-
