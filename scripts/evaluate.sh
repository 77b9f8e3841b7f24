#!/usr/bin/env bash
# Averages checkpoints, translates a subset, scores it; `-h` lists the options. The work is in fairseq_rskip/tools/evaluate.
set -euo pipefail
scripts=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/shell.sh
source "$scripts/shell.sh"

use_environment python fairseq-generate
RSKIP_PROG=evaluate.sh exec python -m fairseq_rskip.tools evaluate "$@"
