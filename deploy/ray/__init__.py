"""A service on a Ray cluster: Ray reserves resources, places one actor per process, and starts lost actors again on other nodes.

Ray carries no request and no tensor, and nothing that a client sends is pickled: the processes join each other as on any machines. Only
this package imports Ray, which is an extra (`pip install multiworld-serving[ray]`). Start reading at `launcher.py`; `placement.py` decides
without Ray which processes share a node, and `actor.py` runs on the nodes.
"""
