"""Tables of one's own: reading files, saying what columns mean, and one encoding for all."""
