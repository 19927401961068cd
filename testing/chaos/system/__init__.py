"""The service under test on this machine: its processes, connections and containers. Start reading at `system_under_test.py`."""
