"""A ResNet-18 trained on scikit-learn's digits, to be served."""
