"""HTTP services: the gateway for browsers, the console for operators, the master and its consumers."""
