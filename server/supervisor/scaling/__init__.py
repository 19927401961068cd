"""Starts and stops workers as the load changes (`multiworld serve --autoscale`).

`policy.py` decides, without clock or I/O; `autoscaler.py` asks it regularly and performs what it decides. Imports no torch.
"""
