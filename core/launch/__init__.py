"""Ray: the cluster, its actors and the clients that the training loop uses."""
