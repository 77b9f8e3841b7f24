#!/usr/bin/env bash
# WMT'14 English-French as in the paper (36M pairs); `-h` shows the usage.
RSKIP_PROG=prepare-wmt14-en-fr.sh exec "$(dirname "${BASH_SOURCE[0]}")/prepare.sh" wmt14-en-fr "$@"
