"""The two convergence theorems, measured."""
