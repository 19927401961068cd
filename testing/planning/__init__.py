"""Capacity planning: availability, latency and losses of a simulated fleet. Start reading at `forecast.py`."""
