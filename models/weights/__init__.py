"""Weights of a model: published, from a file, or random; and class labels. Start reading at `loading`."""
