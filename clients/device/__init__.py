"""What a device needs besides an algorithm: its state, identity and records."""
