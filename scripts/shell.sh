# shellcheck shell=bash
# What the project's shell scripts share; sourced, never run, by scripts that have set -euo pipefail.

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Runs a function in a process group of its own, so that a signal to the script ends every process that it started; sets
# job_status. Not to be called in a condition, which would switch errexit off inside the function.
# shellcheck disable=SC2034 # job_status is for the caller
run_job() {
  local job
  job_status=0
  set -m
  ("$@") &
  job=$!
  set +m
  trap 'stop_job 130' INT
  trap 'stop_job 143' TERM HUP
  wait "$job" || job_status=$?
  trap - INT TERM HUP
}

# Ends every process of $job, the obstinate ones after ten seconds, then the script.
stop_job() {
  local tenths=100
  trap '' INT TERM HUP
  { kill -TERM -- "-$job" && wait "$job"; } 2>/dev/null || true
  while kill -0 -- "-$job" 2>/dev/null && ((tenths--)); do sleep 0.1; done
  kill -KILL -- "-$job" 2>/dev/null || true
  stopped >&2
  exit "$1"
}

# What a stopped job says; a script may know more.
stopped() { printf 'error: interrupted; the same command resumes from here\n'; }

# The project's own environment, where no other is active; then every tool that the caller names must be there.
use_environment() {
  local tool root
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  if [[ -z ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} && -d $root/.venv/bin ]]; then
    export PATH="$root/.venv/bin:$PATH"
  fi
  for tool in "$@"; do
    command -v "$tool" >/dev/null ||
      die "$tool is not installed; scripts/setup_env.sh makes the environment, and activates it for a command: scripts/setup_env.sh ${0#"$root/"} ..."
  done
}
