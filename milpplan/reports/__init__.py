"""Answers as text, HTML pages, JSON documents, traces and notebook views."""
