"""What the programs of the service exchange: messages of frontends and leaders, errors, snapshots, the served model and its predictions."""
