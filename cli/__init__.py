"""The command `multiworld`: one module a verb, no logic of its own."""
