"""Robust least-squares fit of hardware and software constants to measured times."""
