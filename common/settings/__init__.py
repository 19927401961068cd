"""The settings of the programs: `serve` has those of frontends and of the supervisor, `leader` and `worker` those of these programs."""
