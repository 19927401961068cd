"""Load generator: clients in a closed or open loop that check every answer. Start reading at `clients.py`."""
