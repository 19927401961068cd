"""Detection with non-maximum suppression."""
