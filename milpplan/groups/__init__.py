"""Steps of several strategies: which sequences run under which, packed how, in which order, with a proof."""
