"""The code of the command lines; the files in scripts/ that a person types are a few lines around it."""
