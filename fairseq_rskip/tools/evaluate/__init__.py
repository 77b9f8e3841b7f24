"""What scripts/evaluate.sh runs: from a prepared corpus and checkpoints to a table of scores."""
