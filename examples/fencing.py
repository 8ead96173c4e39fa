"""A store that refuses a stale owner: every write carries its lease's token, and the store keeps the greatest one.

A lease alone is not enough: a process that pauses for longer than its lease may write when it resumes, before it learns
that another consumer owns the stream.
"""

from millstream.balancer import Lease
from millstream.redis_client import Client

WRITE = """
-- KEYS 1 the stored data of the stream (hash)   ARGV 1 token   2 field   3 value
local newest = tonumber(redis.call('HGET', KEYS[1], 'token') or 0)
if tonumber(ARGV[1]) < newest then
  return 0 -- another consumer has owned the stream since
end
redis.call('HSET', KEYS[1], 'token', ARGV[1], ARGV[2], ARGV[3])
return 1
"""


def write(client: Client, key: str, lease: Lease, field: str, value: str) -> bool:
    """Write under a lease; False, without a change, if another consumer has written under a newer one."""
    return bool(client.execute("EVAL", WRITE, 1, key, lease.token, field, value))
