"""Fitting a fair classifier on tables of one's own."""
