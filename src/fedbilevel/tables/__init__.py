"""Your own tables: reading files, saying what columns mean, and one encoding for all."""
