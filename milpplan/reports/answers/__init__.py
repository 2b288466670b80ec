"""Answers as documents and as blocks, a module for each answer."""
