"""Problems and plans from the description files of Calculon."""
