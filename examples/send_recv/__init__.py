"""Example of `send` and `recv`, and the same with stock `torch.distributed`. Start reading at README.md and `m8d.py`."""
