"""The configuration tree: schema, loading, rules and checks before the start."""
