#!/usr/bin/env bash
# WikiText-103 (Merity et al. 2016), articles of Wikipedia for a language model; `-h` shows the usage.
RSKIP_PROG=prepare-wikitext103.sh exec "$(dirname "${BASH_SOURCE[0]}")/prepare.sh" wikitext103 "$@"
