#!/usr/bin/env bash
# Brings the project's Python environment up to date and runs a command in it.
set -euo pipefail

usage="usage: scripts/setup_env.sh [command [argument ...]]

Brings the project's Python environment up to date (at once when nothing changed), then runs the command in it.

  PYTHON=python3.12     interpreter for a new environment, 3.10 to 3.14 (default: the first of python3, python3.14, ...)
  RSKIP_VENV=folder     where the environment is (default: .venv)
  RSKIP_VENV=none       install into the environment that is active

uv installs the packages. Its variables hold and, where they are not set, pip's:
  UV_TORCH_BACKEND=cpu                  take the small build of torch for machines without a GPU
  UV_NO_INDEX=1 UV_FIND_LINKS=FOLDER    install from a folder of packages, without network"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf 'set-up: %s\n' "$*" >&2; }
die() { say "error: $*" && exit 1; }

# Prints the version of the interpreter $1; fails unless it is a Python from 3.10 to 3.14.
version_of() {
  "$1" -c 'import sys; v = sys.version_info; print(f"{v[0]}.{v[1]}"); sys.exit(not (3, 10) <= v < (3, 15))' 2>/dev/null
}

# Everything that decides what is installed, and where.
fingerprint() {
  (cd "$root" && "$python" -VV && sha256sum requirements.* setup.py patches/* scripts/setup_env.sh \
    fairseq_rskip/{compat,errors,safe_load,tools/build_fairseq}.py) 2>/dev/null | sha256sum | tr '\n' ' ' && echo "$root"
}

# The stamp holds the fingerprint; "new" before the first set-up, "installing" during one and after one was cut off.
stamped() { cat "$stamp" 2>/dev/null || echo new; }

same_python() { [[ -z ${PYTHON:-} || $(version_of "$PYTHON") == "$(version_of "$python")" ]]; }

# Names everything that the system lacks in one line, before anything is downloaded.
check_system() {
  local lacks
  lacks=$(cd "$root" && "$1" -m fairseq_rskip.tools.build_fairseq --missing)
  [[ -n $uv ]] || "$1" -c 'import venv, ensurepip' 2>/dev/null || lacks+=" python$(version_of "$1")-venv"
  [[ -z $lacks ]] || die "the system lacks packages; on Debian or Ubuntu: apt-get install make $lacks"
}

make_venv() {
  local base candidates=(python3 python3.1{4,3,2,1,0})
  [[ ! -e $venv || -e $stamp ]] || die "$venv was not made by this script; move it away, or activate it and use RSKIP_VENV=none"
  [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
  for base in "${candidates[@]}" ''; do
    ! version_of "$base" >/dev/null || break
  done
  [[ -n $base ]] || die "no Python from 3.10 to 3.14 (tried ${candidates[*]});" \
    "on Debian or Ubuntu: apt-get install make g++ python3-dev python3-venv"
  check_system "$base"
  say "making $venv with Python $(version_of "$base")"
  rm -rf -- "$venv" && mkdir -p "$venv" && echo new >"$stamp"
  if [[ -n $uv ]]; then "$uv" venv -q --allow-existing --python "$base" "$venv"; else "$base" -m venv "$venv"; fi
}

install_all() {
  local wheel before reinstall=()
  before=$(stamped)
  [[ $before != installing* ]] || reinstall=(--reinstall)
  [[ -n $uv ]] || { "$python" -m pip install uv >&2 && uv=$bin/uv; }
  "$uv" pip install -q --python "$python" pip
  wheel=$(cd "$root" && "$python" -m fairseq_rskip.tools.build_fairseq) || die 'fairseq cannot be built; the reason is above'
  say 'installing the tested versions (torch is large)'
  echo "installing $root" >"$stamp"
  # compat: the import hook that setuptools would write comes after any folder named fairseq_rskip
  (cd "$root" && "$uv" pip install --python "$python" "${reinstall[@]}" -C editable_mode=compat -c requirements.lock \
    -c requirements.in "$wheel" -e '.[demo,notebook,test,vision]') ||
    { echo "$before" >"$stamp" && die 'uv cannot install the tested versions; the reason is above; run again to resume'; }
  say 'building the operator for this processor (half a minute)'
  "$python" -m fairseq_rskip.ops >&2 || say 'warning: the operator cannot be built; torch computes in its place'
  fingerprint >"$stamp"
}

main() {
  local venv=${RSKIP_VENV:-.venv} bin stamp python uv name
  case ${1:-} in
    -h | --help) echo "$usage" && return ;;
    -*) die "unknown option $1; -h shows the usage" ;;
  esac
  for name in INDEX_URL EXTRA_INDEX_URL NO_INDEX FIND_LINKS; do
    local ours=UV_$name pips=PIP_$name
    [[ -z ${!ours:-${!pips:-}} ]] || export "$ours=${!ours:-${!pips}}" "$pips=${!pips:-${!ours}}"
  done
  export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match} # pip's: the lock's hashes say which file is meant
  if [[ $venv == none ]]; then
    python=${PYTHON:-python}
    version_of "$python" >/dev/null || die "RSKIP_VENV=none, but $python is not a Python from 3.10 to 3.14"
    bin=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
    stamp=$("$python" -c 'import sys; print(sys.prefix)')/.rskip-setup
  else
    [[ $venv == /* ]] || venv=$root/$venv
    bin=$venv/bin stamp=$venv/.rskip-setup python=$bin/python
    export VIRTUAL_ENV=$venv
  fi
  exec 9<"${BASH_SOURCE[0]}"
  if command -v flock >/dev/null && ! flock --nonblock 9; then say 'waiting for another set-up' && flock 9; fi
  if [[ $(stamped) != "$(fingerprint)" ]] || ! same_python; then
    uv=$(command -v uv || command -v "$bin/uv" || true)
    if [[ $venv == none ]]; then
      check_system "$python"
    elif [[ $(stamped) != *" $root" ]] || ! same_python; then
      make_venv
    fi
    install_all
  fi
  exec 9<&-
  export PATH="$bin:$PATH"
  [[ $# -eq 0 ]] || exec "$@"
}

main "$@"
