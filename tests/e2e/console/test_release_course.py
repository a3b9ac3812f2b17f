"""The comparison of a release as the console draws it, in a real browser: quantiles, evidence, what is missing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from playwright.sync_api import expect
from sqlalchemy import insert

from loraplex.control.db.tables import Usage
from loraplex.control.release_types import ReleasePlan
from loraplex.lifecycle.release_guard.rules import Rules
from support.console.axe import check_axe, need_axe
from support.console.browser import PATIENCE_MS, Screen
from support.control.usage import ended
from support.http.admin_plane import ADMIN_TOKEN
from support.http.whole_server import WholeServer, bearer, whole_server
from support.releases.watched import STEPS, Watched

pytestmark = pytest.mark.slow
expect.set_options(timeout=PATIENCE_MS)

EVERY_S = 3
"""How often the page of a release reads it."""
PLACE = "tenants/acme/adapters/pirate/release"
GUARD = Rules(min_requests=5).document()
GUARDED = ReleasePlan(guard=GUARD)
WIDTHS = (320, 768, 1280)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    with whole_server(tmp_path_factory.mktemp("server")) as running:
        running.plane.make_tenant("acme")
        for seed in (1, 2):
            running.plane.make_adapter("pirate", seed=seed)
        yield running


@pytest.fixture
def watched(server: WholeServer) -> Iterator[Watched]:
    plane: Any = SimpleNamespace(releases=server.plane.services.releases, database=server.plane.database)
    made = Watched(plane)
    yield made
    made.end_lease()
    server.http.post(
        f"{server.admin_url}/admin/v1/{PLACE}/promote", json={"version": "v1"}, headers=bearer(ADMIN_TOKEN)
    )


@pytest.fixture
def viewer(server: WholeServer, screen: Screen) -> Screen:
    """Signed in with a key that reads alone."""
    secret = server.plane.make_key("acme", "adapters:read")
    return screen.with_clock().sign_in(server.admin_url, secret, PLACE)


def use(server: WholeServer, version: int, first_tokens: list[float], **fields: Any) -> None:
    """Rows of the ledger, from now."""
    known = Usage.__table__.columns.keys()
    rows = [
        ended(
            adapter="pirate",
            version=version,
            at=datetime.now(UTC),
            first_token_s=first_token_s,
            **{"total_s": first_token_s + 1, "completion_tokens": 11} | fields,
        )
        for first_token_s in first_tokens
    ]
    with server.plane.database.write() as session:
        values = [{k: v for k, v in msgspec.structs.asdict(row).items() if k in known} for row in rows]
        session.execute(insert(Usage), values)


def heights(screen: Screen) -> list[float]:
    """How far each point of the line is above the threshold, in the drawing's own unit."""
    lines = (
        screen["course"]
        .locator(".evidence")
        .evaluate_all("all => all.map(one => one.getAttribute('points'))")
    )
    threshold = float(screen["course"].locator(".threshold").get_attribute("y1") or "")
    return [threshold - float(point.split(",")[1]) for line in lines for point in line.split()]


def test_the_line_of_evidence_crosses_its_threshold_as_requests_come(
    server: WholeServer, watched: Watched, viewer: Screen
) -> None:
    watched.put(GUARDED, v1=50, v2=50)
    decider = watched.server()
    expect(viewer.pass_time(EVERY_S)["run-words"]).to_contain_text("The guard watches v2 beside v1.")
    expect(viewer.page.locator("main")).to_contain_text("The guard has not looked yet.")
    watched.ended(1, 8)
    watched.ended(2, 8)
    watched.round(decider)
    needs = viewer.pass_time(EVERY_S)["guard-needs"]
    expect(needs).to_have_text(
        re.compile(r"^It needs about [0-9]+ more requests of both versions together\.$")
    )
    assert max(heights(viewer)) < 0
    watched.ended(1, 8)
    watched.ended(2, 8)
    watched.round(decider, after=30)
    expect(viewer.pass_time(EVERY_S)["guard-needs"]).to_contain_text("; as they come now, in about ")
    for _ in range(4):
        watched.ended(1, 2)
        watched.ended(2, 2, status="internal_error")
        watched.round(decider)
    expect(viewer.pass_time(EVERY_S)["guard-needs"]).to_have_text(
        "Errors: looks worse: waits for more evidence."
    )
    while not watched.changes:
        watched.ended(1, 8)
        watched.ended(2, 8, status="internal_error")
        watched.round(decider, after=10)
    expect(viewer.pass_time(EVERY_S)["guard-verdict"]).to_have_text("breach v2 is worse: errors.")
    found = heights(viewer)
    assert [height >= 0 for height in found] == [False] * (len(found) - 1) + [True]
    expect(viewer["course"]).to_have_attribute(
        "aria-label",
        re.compile(r"Evidence that v2 is worse, .* at last [1-9][0-9,]{2,}(\.[0-9])?%, at most "),
    )
    expect(viewer["guard-needs"]).to_have_count(0)
    # What a viewer reads, in words and not in names of fields.
    expect(viewer["run-words"]).to_have_text("It went back: v2 gets no traffic any more.")
    expect(viewer["release-row"].first).to_contain_text("back to revision")
    expect(viewer["release-row"].first).to_contain_text(
        re.compile(
            r"Errors: [0-9.]+ % ended with an error \([0-9]+ requests\); 0 % of the version before allow 0.5 %"
        )
    )
    expect(viewer["release-rollback"]).to_have_count(0)
    # The same by the keyboard, as a table.
    expect(viewer["course-row"].first).to_be_hidden()
    viewer.page.get_by_text("The same in numbers").focus()
    viewer.page.keyboard.press("Enter")
    expect(viewer["course-row"].first).to_be_visible()
    expect(viewer["course-row"].last).to_contain_text("%")
    assert viewer["course-row"].count() == len(found)


def test_a_change_by_hand_is_told_as_what_it_is(
    server: WholeServer, watched: Watched, viewer: Screen
) -> None:
    def change(how: str, **body: str) -> None:
        answer = server.http.post(
            f"{server.admin_url}/admin/v1/{PLACE}/{how}", json=body, headers=bearer(ADMIN_TOKEN)
        )
        assert answer.status_code == 200, answer.text

    decider = watched.server()
    for share in (10, 50):
        watched.put(GUARDED, v1=100 - share, v2=share)
        watched.ended(1, 8)
        watched.ended(2, 8)
        watched.round(decider)
    expect(viewer.pass_time(EVERY_S)["guard-needs"]).to_contain_text("It needs about ")
    change("rollback")
    expect(viewer.pass_time(EVERY_S)["released"]).to_contain_text("v1 90%, v2 10%")
    expect(viewer["run-words"]).to_have_text("It went back: v2 gets what the release before gave it.")
    expect(viewer["guard-verdict"]).to_contain_text("hold")
    expect(viewer["guard-needs"]).to_have_count(0)
    watched.put(GUARDED, v1=50, v2=50)
    change("promote", version="v2")
    expect(viewer.pass_time(EVERY_S)["run-words"]).to_have_text("All traffic goes to v2.")


def test_both_versions_stand_on_one_scale_with_their_intervals(
    server: WholeServer, watched: Watched, viewer: Screen
) -> None:
    watched.put(GUARDED, v1=50, v2=50)
    use(server, 1, [0.1 + 0.001 * n for n in range(100)])
    use(server, 2, [0.4 + 0.001 * n for n in range(100)], completion_tokens=33)
    use(server, 2, [0.4], status="internal_error")
    viewer.pass_time(EVERY_S)
    expect(viewer["arm"]).to_have_text(
        ["v1, the one before100 requests, 0 errors", "v2, the new one101 requests, 1 error"]
    )
    first = viewer.page.locator("[data-testid=marks][data-key=ttft]")
    expect(first).to_contain_text("median 150 ms (139 ms to 160 ms), 95% below 194 ms (189 ms to 199 ms)")
    expect(first).to_contain_text("median 449 ms")
    places = first.locator(".value").evaluate_all("all => all.map(one => Number(one.getAttribute('x')))")
    assert places == sorted(places), "v2 is right of v1 on the same scale"
    assert places[2] == pytest.approx(3 * places[0], rel=0.02)
    lengths = viewer.page.locator("[data-testid=marks][data-key=output_length]")
    expect(lengths).to_contain_text("median 11 (11 to 11)")
    expect(lengths).to_contain_text("median 33 (33 to 33)")
    errors = viewer.page.locator("[data-testid=marks][data-key=error_rate]")
    expect(errors).to_contain_text("0% (0% to 3.7%)")
    expect(errors).to_contain_text("1% (0.2% to 5.4%)")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_the_drawings_at_any_width(
    server: WholeServer, watched: Watched, viewer: Screen, theme: str
) -> None:
    need_axe()
    watched.put(ReleasePlan(guard=GUARD, schedule=STEPS), v1=50, v2=50)
    decider = watched.server()
    for after in (1, 61, 5):
        watched.ended(1, 100)
        watched.ended(2, 100)
        watched.round(decider, after=after)
    use(server, 1, [0.1, 0.2])
    viewer.pass_time(EVERY_S)["course"].wait_for()
    viewer["theme"].select_option(theme)
    viewer.page.get_by_text("The same in numbers").click()
    for width in WIDTHS:
        viewer.page.set_viewport_size({"width": width, "height": 900})
        check_axe(viewer, f"{theme} {width}")
        assert viewer.page.evaluate("() => document.documentElement.scrollWidth") <= width
