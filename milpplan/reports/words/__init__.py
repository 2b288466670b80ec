"""Sentences that texts, pages and documents share."""
