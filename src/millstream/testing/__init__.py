"""What tests of programs on millstream need; import the module you use, so that none costs you the others.

`millstream.testing.plugin`: pytest fixtures with a real redis-server, active once millstream is installed.
`millstream.testing.topologies`: Cluster, Sentinel, TLS and ACL deployments of local processes.
`millstream.testing.contract`: what a handler may rely on whichever engine runs it; `contract_cases` are the cases.
`millstream.testing.history`: the checker that says what was lost, duplicated or out of order.
"""
