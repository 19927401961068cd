"""What brings the service up in a cluster: kustomize's base and overlays, and the rules as a resource of the Prometheus operator."""
