# shellcheck shell=bash
# What the project's shell scripts share; sourced, never run, by scripts that have set -euo pipefail.

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Uses the project's environment unless another one is active; fails if a tool that the caller names is missing.
use_environment() {
  local tool root
  root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  if [[ -z ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} && -d $root/.venv/bin ]]; then
    export PATH="$root/.venv/bin:$PATH"
  fi
  for tool in "$@"; do
    command -v "$tool" >/dev/null ||
      die "$tool is not installed; scripts/setup_env.sh makes the environment, and runs a command in it: scripts/setup_env.sh COMMAND ..."
  done
}
