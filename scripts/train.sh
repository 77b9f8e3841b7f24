#!/usr/bin/env bash
# Trains an architecture on a corpus with that corpus's settings; `-h` says how, docs/training.md says why.
set -euo pipefail
scripts=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/shell.sh
source "$scripts/shell.sh"

use_environment fairseq-train
RSKIP_PROG=train.sh exec python -m fairseq_rskip.tools train "$@"
