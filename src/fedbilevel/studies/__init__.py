"""The studies behind the claims: designs, data and measurements of `table1`, `fairness`, `rates` and `bench`."""
