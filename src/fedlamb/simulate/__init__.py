"""Federations simulated in one process: `fit`, and the executors that map a client's round."""
