"""Views of results in notebooks: HTML representations and matplotlib figures."""
