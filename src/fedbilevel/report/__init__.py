"""Figures and pages made from results; nothing is rerun here."""
