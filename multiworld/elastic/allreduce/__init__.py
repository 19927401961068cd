"""The all-reduce algorithms of elastic worlds.

It may import the layers below `multiworld.elastic` (`world`, `collectives`, `ops`), and neither the rest of `multiworld.elastic` nor the
manager. Start reading at `channel.py` (the transfers of the algorithms), then `ring.py` and `quantized.py` (the algorithms); `bucket.py`
groups small tensors.
"""
