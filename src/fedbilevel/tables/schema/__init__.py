"""What the columns of a table mean: inferred, written down, checked, and turned into numbers."""
