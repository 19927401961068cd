"""The service under test on this machine: its processes and connections. Start reading at `system_under_test.py`."""
