"""Experiments that the commands run."""
