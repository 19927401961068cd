"""Child processes of `multiworld serve`: workers and frontends, forked from a fork server and restarted by a supervisor.

Start reading at `supervisor.py`; `local_workers.py` and `frontends.py` say what it runs.
"""
