#!/usr/bin/env bash
# Your own text to a fairseq data-bin for a language model; `-h` shows the usage.
RSKIP_PROG=prepare-text.sh exec "$(dirname "${BASH_SOURCE[0]}")/prepare.sh" text "$@"
