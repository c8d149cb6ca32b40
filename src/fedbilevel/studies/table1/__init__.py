"""The paper's experiment."""
