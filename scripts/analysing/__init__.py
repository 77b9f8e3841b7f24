"""What ``scripts/analyze.py`` runs, one module a subcommand."""
