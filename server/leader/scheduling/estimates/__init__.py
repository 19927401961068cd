"""What the scheduler predicts from earlier batches: service times, replicas for the load, and when a batch in flight counts as late."""
