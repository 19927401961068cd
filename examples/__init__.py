"""Runnable examples of the library.

They use the public API of `multiworld`; some also use models of `multiworld_serving`. Start reading at README.md, then
`two_worlds.py` and `elastic_members.py` (shared code); `launch.py` starts all ranks of an example.
"""
