"""Curves and tables of finished rounds, and one HTML page."""
