"""Code that several programs need. May import the `multiworld` library and `models`.

`config`: how settings and logs are read and written; `settings`: the settings of each program; `service`: messages, errors and snapshots
of the service; `wire`: messages between two processes; `edges`: tensors between workers; `http`: the HTTP port of all processes.
"""
