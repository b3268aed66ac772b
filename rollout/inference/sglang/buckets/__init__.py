"""What a SGLang server does with the buckets of a weight update. Read by its processes."""
