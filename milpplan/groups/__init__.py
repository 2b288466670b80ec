"""Steps of several parallel strategies: which sequences run under which strategy, packed and ordered, with a
proof.

Times come from tables (``problem``); ``milpplan.lengths`` takes them from the cost model.
"""
