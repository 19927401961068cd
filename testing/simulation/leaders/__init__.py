"""Simulates leaders that fail and frontends that send their requests again, in virtual time.

The frontends run the real `LeaderPool`, each leader runs a real scheduler, and all leaders use the same workers. Start with `run.py`.
"""
