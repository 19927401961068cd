"""What brings the service up."""
