"""Weights of a model: published, from a file, or random; and class labels. Start reading at `loading`."""

SUFFIXES = (".pth", ".pt", ".ckpt", ".safetensors")
"""Endings of the names of files with weights."""
