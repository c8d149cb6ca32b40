"""Engines: where an algorithm's plan runs."""
