"""Hypergradient estimators: plug-ins with one signature (see `base`)."""
