"""A store that refuses a stale owner: every write carries the token of a lease, and the store keeps the greatest.

A lease alone cannot do that: a process that stands still for longer than its lease writes when it wakes, before it hears
that others have the stream.
"""

from millstream.balancer import Lease
from millstream.redis_client.client import Client

WRITE = """
-- KEYS 1 what is kept of the stream (hash)   ARGV 1 token   2 field   3 value
local newest = tonumber(redis.call('HGET', KEYS[1], 'token') or 0)
if tonumber(ARGV[1]) < newest then
  return 0 -- another consumer has had the stream since
end
redis.call('HSET', KEYS[1], 'token', ARGV[1], ARGV[2], ARGV[3])
return 1
"""


def write(client: Client, key: str, lease: Lease, field: str, value: str) -> bool:
    """Write under a lease; False if somebody has written under a newer one: then nothing was changed."""
    return bool(client.execute("EVAL", WRITE, 1, key, lease.token, field, value))
