"""The verbs of `multiworld`, one module each: options, examples and output. Registered in `cli/main.py`."""
