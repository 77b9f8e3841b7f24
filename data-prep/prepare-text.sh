#!/usr/bin/env bash
# Your own text to a fairseq data-bin for a language model; `-h` shows the usage.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# the options set input, a file or a folder, and inputs, its files
collect() { step documents "${documents[@]}" "$input" "$part/"{train,valid,test}".$src"; }

prepare "$@"
