"""What a client can do to hurt a service, as data: requests that are wrong, and connections that are."""
