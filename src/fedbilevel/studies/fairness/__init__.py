"""The longer comparison of the fair methods."""
