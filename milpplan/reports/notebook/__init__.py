"""Views of results in notebooks: HTML representations and plotly figures."""
