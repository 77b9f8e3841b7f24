#!/usr/bin/env bash
# Your own parallel text to a fairseq data-bin; `-h` shows the usage.
RSKIP_PROG=prepare-corpus.sh exec "$(dirname "${BASH_SOURCE[0]}")/prepare.sh" corpus "$@"
