#!/usr/bin/env bash
#SBATCH --job-name=rskip
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --output=rskip-%j.log
# fairseq-train on every GPU of a SLURM job; `-h` says how. docs/distributed.md explains the choices.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: sbatch [sbatch options] scripts/train_slurm.sh DATA-BIN SAVE-DIR [fairseq-train options]

One torchrun a node, one process a GPU. sbatch options override the resources in the script, for instance:

  sbatch --nodes=2 --gpus-per-node=8 --time=48:00:00 scripts/train_slurm.sh data-bin/wmt14 checkpoints/wmt14 \
    --arch transformer_rskip_ln_vaswani_wmt_en_de_big --max-tokens 3584 --update-freq 1 --fp16 ...

Submit from the project's root, with its environment made beforehand (.venv, or one that is active).
Two minutes before the time limit the job requeues itself, and resumes from SAVE-DIR/checkpoint_last.pt.

  GPUS_PER_NODE=n      processes a node (default: SLURM_GPUS_ON_NODE)
EOF
}

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

requeue() {
  printf 'time is nearly up: requeueing job %s\n' "$SLURM_JOB_ID" >&2
  kill -TERM "$step" && wait "$step" || true
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
}

main() {
  local data save gpus head plugin trainer step
  case ${1:-} in
    -h | --help)
      usage
      return
      ;;
  esac
  [[ -n ${SLURM_JOB_ID:-} ]] || die "not inside a SLURM job; -h shows the usage"
  [[ $# -ge 2 ]] || die "DATA-BIN and SAVE-DIR are needed; -h shows the usage"
  data=$1 save=$2
  shift 2
  cd "${SLURM_SUBMIT_DIR:-.}"
  [[ -d $data ]] || die "no folder $data in $PWD"
  if [[ -z ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} && -d .venv/bin ]]; then
    export PATH="$PWD/.venv/bin:$PATH"
  fi
  trainer=$(command -v fairseq-train) || die "no fairseq-train in PATH; make the environment first: make test-fast"
  plugin=$(python -m fairseq_rskip)
  gpus=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
  [[ $gpus =~ ^[1-9][0-9]*$ ]] || die "the job has no GPUs (GPUS_PER_NODE=${gpus:-unset}); ask for them: --gpus-per-node=4"
  head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
  mkdir -p "$save"

  # Left over from a login shell or a module file they would reach every process, and fairseq trusts them above all.
  unset MASTER_ADDR MASTER_PORT WORLD_SIZE RANK LOCAL_RANK
  export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun takes no --cpus-per-task from sbatch since SLURM 22.05
  trap requeue USR1
  srun --ntasks-per-node=1 --kill-on-bad-exit=1 \
    torchrun --nnodes "${SLURM_NNODES:-1}" --nproc_per_node "$gpus" --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d \
    --rdzv_endpoint "$head:$((20000 + SLURM_JOB_ID % 20000))" \
    "$trainer" "$data" --user-dir "$plugin" --save-dir "$save" --save-interval-updates 1000 --keep-interval-updates 5 \
    "$@" &
  step=$!
  wait "$step" # in the background, so that the trap can run before srun ends
}

main "$@"
