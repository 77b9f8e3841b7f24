"""The report of reproduce.py: its tables as numbers, tests and figures, and as Markdown, LaTeX, HTML and CSV."""
