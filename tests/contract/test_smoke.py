from duly.model import *
from duly.store import ops
from duly.store.ops import *
from tests.contract.stores import *

def test_smoke(store):
    ids=store.enqueue(5)
    a=store.claim(3); assert [j.id for j in a]==ids[:3]
    assert store.succeed(a[0],'{"x":1}')=='recorded'
    assert store.succeed(a[0])=='already'
    assert store.get(ids[0]).result=={"x":1}
    assert store.retry(a[1])=='recorded'; assert store.state(ids[1])=='scheduled'
    assert store.kill(a[2])=='recorded'; assert store.state(ids[2])=='dead'
    assert len(store.run(ops.attempts(ids[2])))==1
    r=store.run(ops.replay([Replay(ids[2],new_id())],by='me',why='x',now=store.now)); assert r[0].first
    store.run(ops.extend([held(a[1])])); store.run(ops.progress(held(a[1]),3)); store.run(ops.heartbeat(held(a[1])))
    e=store.enqueue_key('k'); assert not e.deduplicated
    e2=store.enqueue_key('k'); assert e2.deduplicated and e2.id==e.id
    assert store.enqueue_key('k',payload='{}').conflict
    store.run(ops.cancel([e.id],by='me',why='y',now=store.now)); assert store.state(e.id)=='cancelled'
    store.now+=60000
    c=store.claim(10); assert len(c)==4, c
    s=store.run(ops.expired_leases(now=store.now)); assert not s
    store.now+=60000
    s=store.run(ops.expired_leases(now=store.now)); assert len(s)==4
    r=store.run(ops.rescue(s,now=store.now)); assert set(r.values())=={'ready'}
    for w in ops.PRUNABLE: store.run(ops.prune(w,now=store.now))
    store.run(ops.pause('queue','default',by='a',why='b',now=store.now)); assert not store.claim(alone=True)
    assert len(store.run(ops.paused(now=store.now)))==1
    assert store.run(ops.resume('queue','default',by='a',why='b'))
    store.run(ops.register('w',host='h',pid=1,queues=['default'],tasks=['work'],beat_ms=10)); store.run(ops.workers()); store.run(ops.leave('w'))
    store.run(ops.dead_list()); store.run(ops.dead_metrics()); store.run(ops.listing(state=State.DEAD)); store.run(ops.events())
    store.run(ops.promote('default')); store.run(ops.next_due('default')); store.run(ops.expirable()); store.run(ops.expire(ids)); store.run(ops.resolve(ids,by='a',why='b')); store.run(ops.purge(ids)); store.run(ops.steps(ids[0])); store.run(ops.clock())
