"""Examples that run as they are; tests import them."""
