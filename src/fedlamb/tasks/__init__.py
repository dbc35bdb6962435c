"""Models, data sets and splits: what is learnt, and who holds which part of it."""
