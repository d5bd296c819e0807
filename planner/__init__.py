"""Coordinate torch.distributed.checkpoint saves and loads over a dedicated CPU gloo group."""
