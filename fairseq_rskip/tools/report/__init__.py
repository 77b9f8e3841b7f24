"""Report on experiments.

``tables`` compares and sets rows, ``main`` draws figures and writes the files.
"""
