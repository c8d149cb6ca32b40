"""Every method on every task it solves."""
