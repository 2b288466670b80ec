"""Judgement of an existing plan: its proved gap to the best plans and the changes that close it."""
