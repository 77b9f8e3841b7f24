"""Report on experiments.

``comparison`` compares rows, ``tables`` sets them, ``main`` draws figures and writes the files.
"""
