"""What scripts/train.sh runs: from a corpus, an architecture and options to a fairseq-train command."""
