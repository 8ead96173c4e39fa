"""The master: delegates a consumer group's messages over HTTP to consumers in any language, one at a time per ticket.

It follows "Redis streaming concurrency with master and consumers" (Dwarves Memo), but keeps no state of its own: all
state is in Redis, in the key queues and leases of `millstream.delivery.keyed_stream`. So any number of masters may run,
and any of them may die.
"""
