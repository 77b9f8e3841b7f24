"""Experiments, one YAML file each: ``yaml_file`` reads it, ``plan`` makes runs of it, ``execution`` executes these."""
