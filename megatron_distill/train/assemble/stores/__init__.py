"""From a configuration to stores: of one teacher or among several, and the terms they serve."""
