"""Measurements that are printed, never asserted: run them as modules from the root of a checkout."""
