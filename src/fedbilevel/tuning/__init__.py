"""Tuning across sites: what a grid search would look for, as the outer variable of one bilevel run."""
