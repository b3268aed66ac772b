"""Memory of a rank: what an update takes, what is computed again or held on the host, and what happens without room."""
