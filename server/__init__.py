"""The programs of the service, except for the workers: `frontend`, `leader` and `supervisor`, one folder for each.

No program imports another one. What several programs need is in `common`: messages, errors and snapshots in `common.service`, settings in
`common.settings`. Start reading at docs/architecture.md, then at the `main.py` of a program.
"""
