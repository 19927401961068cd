"""Example of an elastic world: an ensemble of models behind an HTTP server. Start reading at README.md, then `front.py` and `m8d.py`."""
