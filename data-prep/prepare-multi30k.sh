#!/usr/bin/env bash
# Multi30k (Elliott et al. 2016), English image captions to German or French; `-h` shows the usage.
RSKIP_PROG=prepare-multi30k.sh exec "$(dirname "${BASH_SOURCE[0]}")/prepare.sh" multi30k "$@"
