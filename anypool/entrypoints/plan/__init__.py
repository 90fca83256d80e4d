"""What embedding a collection takes: memory, time, cost and storage, from a model's configuration."""
