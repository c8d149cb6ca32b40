"""Files in: text and Parquet read column by column, with errors that name the file, the line and the remedy."""
