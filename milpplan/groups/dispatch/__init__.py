"""Dispatch of one batch under the strategies of a plan, in milliseconds, with a proved gap."""
