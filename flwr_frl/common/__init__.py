"""What server and devices agree on: settings, message keys, arrays and files."""
