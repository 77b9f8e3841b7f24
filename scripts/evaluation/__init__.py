"""What scripts/evaluate.sh and scripts/score.py share: from a prepared corpus and checkpoints to a table of scores."""
