"""An app on Cloudflare's own runtime, from the first migration to drained jobs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from duly import Duly
from duly.errors import SchemaMismatch
from tests.servers.workerd import Workerd, why_not

pytestmark = [
    pytest.mark.cloudflare,
    pytest.mark.skipif(why_not() is not None, reason=f"no Cloudflare runtime: {why_not()}"),
]


@pytest.fixture(scope="module")
def runtime() -> Iterator[Workerd]:
    with Workerd() as made:
        yield made


def test_c06_a_worker_drains_jobs_through_the_gateway(runtime: Workerd) -> None:
    app = Duly(runtime.d1_url)
    ran: list[int] = []

    @app.task
    def work(number: int) -> int:
        ran.append(number)
        return number * 2

    with pytest.raises(SchemaMismatch, match="no duly tables yet: run `duly migrate --url d1://127"):
        work.enqueue(0)
    app.database.migrate()
    app.database.migrate()
    job = work.using(key="one").enqueue(1)
    assert work.using(key="one").enqueue(1).deduplicated
    work.enqueue_many(work.call(number) for number in range(2, 40))
    app.run(drain=True, signals=False)
    assert sorted(ran) == list(range(1, 40))
    assert job.result() == 2
    about = app.driver.about()
    assert (about.store, about.where) == ("D1", f"{runtime.host}:{runtime.port}/duly")
    assert {finding.level for finding in app.driver.examine()} == {"ok"}
    app.close()
