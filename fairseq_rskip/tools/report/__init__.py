"""The report of experiments: ``compare`` tests rows against their baseline, ``page`` sets tables, ``figures`` draws."""
