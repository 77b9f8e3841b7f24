#!/usr/bin/env bash
# State of the Union addresses, 1790 to 2026, for a language model; `-h` shows the usage.
RSKIP_PROG=prepare-sotu.sh exec "$(dirname "${BASH_SOURCE[0]}")/prepare.sh" sotu "$@"
