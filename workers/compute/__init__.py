"""Computes batches: the engine and its thread, device copies, core sharing and compilation. Start reading at `engine`."""
