"""Access to processes and connections of this machine."""
