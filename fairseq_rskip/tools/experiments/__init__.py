"""Experiments, one YAML file each: ``yaml_file`` reads a Table of Rows, ``plan`` joins its rows and columns to Cells and
these to Runs, ``execution`` runs them, ``results`` reads what they gave as Results. A task (``images``, ``translation``)
is one class that says how a run is checked, started and read."""
