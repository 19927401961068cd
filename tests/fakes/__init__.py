"""A GPU, its driver, NVML, NCCL and TF32 on a machine without a GPU. One module for each interface that is replaced."""
