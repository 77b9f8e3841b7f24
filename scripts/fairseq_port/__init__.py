"""Brings PyPI's fairseq 0.12.2 to today's Python, torch, numpy and hydra (entry point: scripts/build_fairseq.py)."""
