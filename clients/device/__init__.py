"""The parts of a client that all algorithms share: state, identity and records."""
