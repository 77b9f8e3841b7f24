#!/usr/bin/env bash
# WMT'14 English-German as in the paper (4.5M pairs); `-h` shows the usage.
RSKIP_PROG=prepare-wmt14-en-de.sh exec "$(dirname "${BASH_SOURCE[0]}")/prepare.sh" wmt14-en-de "$@"
