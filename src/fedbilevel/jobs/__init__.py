"""The product: fit a fair model, use it, and the same over real sites."""
