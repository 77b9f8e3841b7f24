"""Report on experiments.

``comparison`` compares rows, ``tables`` sets them, ``main`` draws figures and writes the files;
``reading`` reads a report's CSV file.
"""
