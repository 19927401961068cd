"""The steps of `benchmarks.gpu_check`. Each runs in a process of its own. Start reading at `setup`."""
