"""From a configuration to the answers of a teacher on its own ranks: plan, transport, signals."""
