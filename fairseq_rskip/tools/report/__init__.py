"""The report of experiments: ``tables`` compares and sets rows, ``main`` draws figures and writes the files."""
