"""Start programs as forks of a process that has imported their libraries."""
