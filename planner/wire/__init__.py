"""What travels between ranks: frames, and pure encode and decode functions for each message."""
