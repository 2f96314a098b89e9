"""Settings, message keys, arrays and files that the server and devices share."""
