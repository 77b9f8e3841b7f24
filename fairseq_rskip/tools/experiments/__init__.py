"""Experiments, one YAML file each.

``yaml_file`` reads it, ``plan`` makes its runs, ``execution`` executes them, and ``results`` reads
what they wrote. ``finished`` reads runs without their file, ``text_runs`` those on text.
"""
