"""Steps of several strategies in turn: screening of sets, branch and bound on sets, dispatch of batches."""
