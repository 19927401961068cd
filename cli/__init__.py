"""The command `multiworld`: argument parsing and output only; the logic is in the packages that it imports.

May import every other package. Imports of torch and httpx are inside functions, so that `multiworld --help` stays fast.
Start reading at `main.py`; `verbs/` has one module per verb.
"""
