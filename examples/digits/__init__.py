"""Trains a ResNet-18 on scikit-learn's digits, to be served. Start reading at README.md and `train.py`."""
