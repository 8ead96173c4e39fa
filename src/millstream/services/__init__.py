"""Services that speak HTTP: the gateway for browsers, the master and its consumers."""
