"""What the scheduler predicts from earlier batches: service times, throughput, and when a batch in flight counts as late."""
