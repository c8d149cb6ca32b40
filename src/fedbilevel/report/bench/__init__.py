"""The page of the bench."""
