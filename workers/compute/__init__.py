"""Computes batches: the engine's thread, device copies, core sharing and compilation. Start reading at `engine`."""
