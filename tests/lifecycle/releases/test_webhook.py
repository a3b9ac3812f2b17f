"""The webhook: what it is sent, where it may be, and what becomes of one that fails."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import ssl
import textwrap
from collections.abc import Callable
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from loraplex.control.db.clock import database_now
from loraplex.control.db.release_tables import WebhookDelivery
from loraplex.control.leases import NEVER, LeaseLost
from loraplex.control.release_types import ReleasePlan
from loraplex.lifecycle.releases import deliveries
from loraplex.lifecycle.releases.deliveries import MAX_TRIES, due_deliveries, record_try
from loraplex.lifecycle.releases.rounds import Rounds
from loraplex.lifecycle.releases.task import WebhookTask
from loraplex.lifecycle.releases.webhook import Webhook
from loraplex.lifecycle.releases.webhook_address import AllowedHosts, checked_url, is_public
from support.control.plane import ControlPlane
from support.markdown import read as page
from support.releases.watched import STEPS, Watched
from support.servers.certificates import make_certificates

SECRET = "0123456789abcdef"
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


class Receiver:
    """A server on loopback that keeps what it was sent; `answers` are given in turn, the last one again and again."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.heads: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.targets: list[str] = []

    tls: ssl.SSLContext | None = None

    async def __aenter__(self) -> Receiver:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        self.targets.append(first)
        self.heads.append(headers)
        self.bodies.append(await reader.readexactly(int(headers["content-length"])))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        try:
            if answer == b"hang":
                await reader.read()
            elif answer == b"endless":
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    writer.write(b"x" * 65536)
                    await writer.drain()
            else:
                writer.write(answer)
                await writer.drain()
        except OSError:
            pass
        writer.close()

    def webhook(self, **options: Any) -> Webhook:
        return Webhook(
            f"http://hooks.test:{self.port}/in?a=1", SECRET, AllowedHosts(["127.0.0.0/8"]), **at(), **options
        )


def at(*addresses: str) -> dict[str, Any]:
    async def resolve(_: str, __: int) -> list[str]:
        return list(addresses or ("127.0.0.1",))

    return {"resolve": resolve}


def ok(status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n".encode()


async def test_a_receiver_verifies_what_it_is_sent_as_the_page_on_releases_says() -> None:
    async with Receiver(ok("204 No Content")) as receiver:
        assert await receiver.webhook().send("d1", "release.promoted", b'{"a":1}') is None
    [headers], [body] = receiver.heads, receiver.bodies
    assert receiver.targets == ["POST /in?a=1 HTTP/1.1"]
    assert body == b'{"a":1}'
    assert headers["host"] == f"hooks.test:{receiver.port}"
    assert (headers["x-loraplex-delivery"], headers["x-loraplex-event"]) == ("d1", "release.promoted")
    [program] = [
        text for text in re.findall(r"```python\n(.*?)```", page("docs/releases.md"), re.S) if "hmac" in text
    ]
    receiving: dict[str, Any] = {}
    exec(textwrap.dedent(program), receiving)
    is_genuine = receiving["is_genuine"]
    assert is_genuine(SECRET, headers, body)
    assert not is_genuine(SECRET, headers, body + b" ")
    assert not is_genuine("another secret !", headers, body)
    assert headers["x-loraplex-signature"] == hmac.new(SECRET.encode(), body, "sha256").hexdigest()


@pytest.mark.parametrize(("host", "problem"), [("localhost", None), ("hooks.test", "certificate")])
async def test_a_certificate_has_to_be_of_the_urls_host(
    tmp_path: Path, host: str, problem: str | None
) -> None:
    made = make_certificates(tmp_path)
    receiver = Receiver(ok())
    receiver.tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    receiver.tls.load_cert_chain(made.cert, made.key)
    trusting = ssl.create_default_context(cafile=str(made.ca))
    async with receiver:
        url, allowed = f"https://{host}:{receiver.port}/", AllowedHosts(["127.0.0.1"])
        said = await Webhook(url, SECRET, allowed, tls=trusting, **at()).send("d", "e", b"{}")
    assert (said is None) if problem is None else (problem in (said or ""))
    assert len(receiver.bodies) == (problem is None)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (ok("500 Oh"), "the answer was 500"),
        (b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1/\r\n\r\n", "the answer was 302"),
        (b"SSH-2.0-OpenSSH\r\n", "not HTTP"),
        (b"HTTP/1.1 2\r\n", "not HTTP"),
        (b"", "0 bytes read"),
        (b"x" * 100_000, "limit"),
    ],
)
async def test_what_is_no_success_says_why(answer: bytes, words: str) -> None:
    async with Receiver(answer) as receiver:
        problem = await receiver.webhook().send("d", "e", b"{}")
    assert problem is not None
    assert words in problem
    assert len(receiver.bodies) == 1, "a redirect was followed"


async def test_one_that_hangs_is_left_after_its_time() -> None:
    async with Receiver(b"hang") as receiver:
        problem = await receiver.webhook(timeout_s=0.05).send("d", "e", b"{}")
    assert problem == "no answer within 0.05 s"


async def test_a_body_without_end_is_not_read() -> None:
    async with Receiver(b"endless") as receiver:
        assert await receiver.webhook().send("d", "e", b"{}") is None


async def test_one_that_is_away_says_so() -> None:
    async with Receiver(ok()) as receiver:
        webhook = receiver.webhook()
    problem = await webhook.send("d", "e", b"{}")
    assert problem is not None
    assert "onnect" in problem


INSIDE = [
    *("127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.5", "172.16.3.4", "192.168.1.1", "169.254.169.254"),
    *("100.64.0.1", "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
    *("::", "::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "fe80::1", "fe80::1%lo", "fc00::1"),
    *("fd00:ec2::254", "fec0::1", "64:ff9b::7f00:1", "64:ff9b:1::1", "2002:7f00:1::1", "2002:a9fe:a9fe::1"),
    *("2001:0:4136:e378:8000:63bf:80ff:fffe", "2001:db8::1", "ff02::1", "100::1"),
]


@pytest.mark.parametrize("address", INSIDE)
async def test_a_host_inside_the_network_is_not_connected_to(address: str) -> None:
    assert not is_public(ip_address(address))
    async with Receiver(ok()) as receiver:
        url = f"http://hooks.test:{receiver.port}/"
        problem = await Webhook(url, SECRET, AllowedHosts(), **at(address)).send("d", "e", b"{}")
    assert problem is not None
    assert "has no public address" in problem
    assert "--webhook-allow" in problem
    assert receiver.bodies == []


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "2002:808:808::1"])
def test_public_addresses_are_allowed(address: str) -> None:
    assert AllowedHosts().allow("hooks.example.com", address)


def test_an_operator_allows_hosts_and_networks_of_his_own() -> None:
    allowed = AllowedHosts(["Hooks.internal", "10.1.0.0/16", "fd00::/8", "127.0.0.1"])
    assert allowed.allow("hooks.INTERNAL", "192.168.1.1")
    assert allowed.allow("other", "10.1.2.3")
    assert allowed.allow("other", "fd00::1")
    assert allowed.allow("other", "127.0.0.1")
    for host, address in (("other", "10.2.0.1"), ("x.hooks.internal", "192.168.1.1"), ("other", "127.0.0.2")):
        assert not allowed.allow(host, address)


@pytest.mark.parametrize("entry", ["10.1.0.5/16", "1.2.3", "hooks internal", "*", "a..b", "http://x", "ü.de"])
def test_what_is_no_host_and_no_network_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match=r"no network|neither a host"):
        AllowedHosts([entry])


@pytest.mark.parametrize("spelled", ["2130706433", "0x7f.1", "127.1", "localhost"])
async def test_other_spellings_of_loopback_are_judged_by_what_they_resolve_to(spelled: str) -> None:
    problem = await Webhook(f"http://{spelled}:1/", SECRET, AllowedHosts()).send("d", "e", b"{}")
    assert problem is not None
    assert "has no public address" in problem


async def test_the_address_that_was_checked_is_the_one_that_is_connected_to() -> None:
    """A name that resolves to another address at each question is asked once."""
    asked = []

    async def rebinding(host: str, _: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["127.0.0.2"]

    async with Receiver(ok()) as receiver:
        url, allowed = f"http://hooks.test:{receiver.port}/", AllowedHosts(["127.0.0.1"])
        assert await Webhook(url, SECRET, allowed, resolve=rebinding).send("d", "e", b"{}") is None
        assert asked == ["hooks.test"]
        # Of several addresses those that are not allowed are passed over.
        assert (
            await Webhook(url, SECRET, allowed, **at("10.0.0.1", "127.0.0.1")).send("d", "e", b"{}") is None
        )
    assert len(receiver.bodies) == 2


@pytest.mark.parametrize(
    "url",
    [
        *("hooks.example.com", "ftp://h/", "https://", "https://u:p@h/", "https://h/#f", "https://h:0/"),
        *("https://h:99999/", "https://h/\r\nx: y", "https://h/a b", "https://h/" + "a" * 3000),
    ],
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="must "):
        checked_url(url)


@pytest.fixture
def promoted(plane: ControlPlane) -> tuple[Watched, Rounds]:
    """A release whose promotion waits to be told, and the leader."""
    watched = Watched(plane)
    watched.put(ReleasePlan(schedule=STEPS[:1]), v1=100, v2=0)
    server = watched.server(announces=True)
    watched.round(server, after=60)
    return watched, server


def make_due(watched: Watched) -> None:
    with watched.plane.database.write() as session:
        session.execute(update(WebhookDelivery).values(next_at=database_now(session)))


def pauses(watched: Watched) -> list[float]:
    """Seconds until each delivery is due, in whole seconds."""
    with watched.plane.database.read() as session:
        now = database_now(session)
        return [(at - now) / timedelta(seconds=1) for at in session.scalars(select(WebhookDelivery.next_at))]


async def test_a_delivery_that_fails_is_tried_again_until_it_is_taken(
    promoted: tuple[Watched, Rounds],
) -> None:
    watched, server = promoted
    async with Receiver(ok("500 Oh"), ok()) as receiver:
        task = WebhookTask(server, watched.plane.database, receiver.webhook())
        await task.round()
        assert pauses(watched)[0] == pytest.approx(5, abs=4)
        await task.round()
        assert len(receiver.bodies) == 1, "it is not due yet"
        make_due(watched)
        await task.round()
        assert watched.stored()["deliveries"] == []
        await task.round()
    assert len(receiver.bodies) == 2
    assert receiver.bodies[0] == receiver.bodies[1]
    assert {head["x-loraplex-event"] for head in receiver.heads} == {"release.promoted"}
    told = json.loads(receiver.bodies[0])
    assert told["id"] == receiver.heads[0]["x-loraplex-delivery"]
    assert (told["tenant"], told["adapter"], told["revision"]) == ("acme", "pirate", 3)
    assert told["targets"] == [{"version": "v2", "weight": 100}]
    assert (told["control"], told["candidate"], told["reason"]) == ("v1", "v2", None)


def test_pauses_double_up_to_an_hour_and_the_last_try_gives_up(plane: ControlPlane) -> None:
    watched = Watched(plane)
    watched.put(ReleasePlan(schedule=STEPS[:1]), v1=100, v2=0)
    server = watched.server(announces=True)
    watched.round(server, after=60)
    assert server.term is not None
    database = plane.database
    [delivery] = due_deliveries(database)
    seen = []
    for number in range(1, MAX_TRIES + 1):
        given_up = record_try(database, server.term, delivery, delivered=False)
        assert given_up is (number == MAX_TRIES)
        seen += pauses(watched)
    expected = [min(3600, 5 * 2**number) for number in range(MAX_TRIES - 1)]
    assert seen == [pytest.approx(pause, abs=60) for pause in expected]
    assert watched.stored()["deliveries"] == []


async def test_a_server_that_does_not_lead_delivers_nothing(promoted: tuple[Watched, Rounds]) -> None:
    watched, server = promoted
    async with Receiver(ok()) as receiver:
        await WebhookTask(watched.server("b"), watched.plane.database, receiver.webhook()).round()
        assert receiver.bodies == []
        watched.end_lease()
        with pytest.raises(LeaseLost):
            await WebhookTask(server, watched.plane.database, receiver.webhook()).round()
    assert len(watched.stored()["deliveries"]) == 1, "the next leader tells it again"


def test_without_a_webhook_nothing_waits_to_be_told(plane: ControlPlane) -> None:
    watched = Watched(plane)
    watched.put(ReleasePlan(schedule=STEPS[:1]), v1=100, v2=0)
    assert len(watched.round(watched.server(), after=60)) == 1
    assert watched.stored()["deliveries"] == []


def waiting(*tenants: str, minutes: int = 0) -> list[WebhookDelivery]:
    """An event of each tenant, all due, the first one first; they were put this many minutes ago."""
    at = NEVER + timedelta(days=1, minutes=-minutes)
    return [
        WebhookDelivery(
            id=f"{minutes}-{number:04}",
            tenant_id=tenant,
            event="release.promoted",
            body="{}",
            created_at=at + timedelta(milliseconds=number),
            attempts=0,
            next_at=at + timedelta(milliseconds=number),
        )
        for number, tenant in enumerate(tenants)
    ]


def test_a_tenants_events_do_not_wait_for_all_those_of_another(plane: ControlPlane) -> None:
    with plane.database.write() as session:
        session.add_all(waiting(*["acme"] * 50, "zeta", "beta"))
    due = [delivery.id for delivery in due_deliveries(plane.database)]
    assert due == ["0-0000", "0-0050", "0-0051", "0-0001", "0-0002", "0-0003", "0-0004", "0-0005"]


def test_of_a_tenants_events_that_nobody_takes_the_newest_are_kept(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "MAX_WAITING", 3)
    with plane.database.write() as session:
        session.add_all([*waiting(*["acme"] * 4), *waiting("zeta", minutes=9)])
    watched = Watched(plane)
    watched.put(ReleasePlan(schedule=STEPS[:1]), v1=100, v2=0)
    assert len(watched.round(watched.server(announces=True), after=60)) == 1
    with plane.database.read() as session:
        kept = session.scalars(select(WebhookDelivery).order_by(WebhookDelivery.created_at)).all()
    assert [row.id for row in kept[:-1]] == ["9-0000", "0-0002", "0-0003"]
    assert json.loads(kept[-1].body)["adapter"] == "pirate"
