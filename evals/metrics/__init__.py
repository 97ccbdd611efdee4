"""Metrics as `evaluate` modules of our own, each in a folder with a script of its name: loaded by path, no network."""
