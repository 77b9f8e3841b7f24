#!/usr/bin/env bash
# IWSLT'15 English-Vietnamese as Stanford NLP and the paper use it; `-h` shows the usage.
RSKIP_PROG=prepare-iwslt15-en-vi.sh exec "$(dirname "${BASH_SOURCE[0]}")/prepare.sh" iwslt15-en-vi "$@"
