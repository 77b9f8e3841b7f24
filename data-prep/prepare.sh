#!/usr/bin/env bash
# `rskip prepare` in the project's environment, which the other prepare-*.sh call; `-h` shows the usage.
set -euo pipefail
# shellcheck source=../scripts/shell.sh
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/shell.sh"
use_environment python fairseq-preprocess
exec python -m fairseq_rskip.tools prepare "$@"
