"""The master: delegates the messages of a consumer group to consumers in any language, by HTTP, one at a time of each ticket.

It is the master of "Redis streaming concurrency with master and consumers" (Dwarves Memo) without its state: all of that
is in Redis, in the lines and leases of `millstream.delivery.keyed_stream`, so that any number of masters may run and die.
"""
