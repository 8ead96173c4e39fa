"""The protocol of lines holds in every order of steps, each of its checks is needed, and the memo's protocol does not hold."""

import time

import pytest

from tests.unit.protocol_model import Lines, Memo, explore


@pytest.mark.parametrize(("a"),[1])
def test_x(a):
    for m in (Lines(messages="AA",crashes=1,expiries=2,losses=1), Lines(messages="AA",crashes=1,expiries=2,losses=1,aborts=False), Lines(messages="AAB"), Lines(messages="AAB",aborts=False), Lines(messages="AAA",expiries=2,crashes=0)):
        t=time.time(); f=explore(m); print(m, time.time()-t, f)
    for w in ("token", "first", "frontier", "known", "answer", "exclusive"):
        for msgs in ("AA",):
            t=time.time(); f=explore(Lines(messages=msgs,without=w,aborts=w!="token")); print(w, time.time()-t, f)
    for m in (Memo(messages="AA"), Memo(messages="AA",crashes=1), Memo(messages="AA",alarms=1), Memo(messages="AA",losses=1), Memo(messages="AAB",crashes=1,alarms=1,losses=1)):
        t=time.time(); f=explore(m); print(m, time.time()-t, f)
    assert 0
