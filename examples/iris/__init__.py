"""A model without torch."""
