"""The engine's checkpoints."""
