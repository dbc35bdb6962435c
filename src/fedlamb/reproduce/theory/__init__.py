"""The paper's Theorem 1 and its corollary, put to the test."""
