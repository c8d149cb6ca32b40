"""What the operator of a federation does: provision kits, start and stop processes, rehearse, stay with a run."""
