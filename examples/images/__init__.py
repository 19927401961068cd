"""The image of the quick start. `draw_clock.py` draws it."""
