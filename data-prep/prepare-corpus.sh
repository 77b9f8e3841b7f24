#!/usr/bin/env bash
# Your own parallel text to a fairseq data-bin; `-h` shows the usage.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# inputs, which the options set, are the source and the target file of train, valid and test
collect() {
  split train --files "${inputs[@]:0:2}"
  split valid --files "${inputs[@]:2:2}"
  split test --files "${inputs[@]:4:2}"
}

prepare "$@"
