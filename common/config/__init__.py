"""Settings, user errors, logging and process limits of all programs. Start reading at `settings` and `sources`."""
