"""NumPy references for the six methods, written from the specification alone."""
