"""Benchmarks of the library and of the service; most modules are programs: `python -m benchmarks.NAME`.

May import every package of the project; these do not import this one. Start reading at `ranks.py` (processes for benchmarks of the
library), `servers.py` and `connections.py` (servers and HTTP clients for benchmarks of the service).
"""
