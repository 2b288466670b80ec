"""HTML pages of answers, with charts and without external resources."""
