"""The engine: requests in, results out, one thread that owns the device."""
