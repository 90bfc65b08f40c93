"""`kvist top`: what it shows of a server and of a file, and what it says when there is nothing to show."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from urllib.parse import parse_qs, urlsplit

import pytest
import typer
from cache_requests import cached, compute, manager_of
from rich.console import Console
from typer.testing import CliRunner

from kvist.iterations.recorder import Iterations
from kvist.iterations.records import MEDIA_TYPE, Begin, RecordError, StepRecord, read_run
from kvist.testing.values import tokens
from kvist.views.board import Board, spread
from kvist.views.feed import FeedError, FileFeed, ServerFeed
from kvist.views.top import bar, command, sparkline, view


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Server:
    """Answers as a server does, with what ``answer`` makes of the number in ``since``."""

    def __init__(self) -> None:
        self.answer = lambda since: b""
        self.status = 200
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                body = outer.answer(int(parse_qs(urlsplit(self.path).query)["since"][0]))
                self.send_response(outer.status)
                self.send_header("Content-Type", MEDIA_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server():
    found = Server()
    yield found
    found.stop()


def shown(board: Board, trouble: str = "") -> str:
    console = Console(record=True, width=130, file=StringIO(), color_system=None)
    console.print(view(board, trouble))
    return console.export_text()


def top(*arguments: object) -> str:
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "130"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def recorded(clock: Clock) -> Iterations:
    """12 pages; 20 prompt tokens of which 7 are reused; 2 pages held and 1 cached at the end: a block that was computed
    again is kept once."""
    manager = manager_of(12)
    iterations = Iterations(manager, source="by hand", clock=clock)
    cached(manager, range(1, 13))
    clock.now = 10.0
    iterations.step(running=1)
    timer = iterations.request("1")
    clock.now = 20.0
    timer.enter("prefill")
    sequence = manager.open(tokens(range(1, 9)))
    step = compute(manager, sequence)
    clock.now = 50.0
    timer.enter("decode")
    iterations.step(step, running=2, waiting=5)
    clock.now = 52.0
    timer.finish("stop", prompt_tokens=8, reused_tokens=7, generated_tokens=1)
    return iterations


def board_of(iterations: Iterations, tmp_path, window: float = 30.0) -> Board:
    path = tmp_path / "records.jsonl"
    path.write_bytes(iterations.since())
    begin, records = read_run(path)
    board = Board(begin, window)
    board.take(begin, records)
    return board


def test_the_view_says_what_the_records_say(tmp_path) -> None:
    text = shown(board_of(recorded(Clock()), tmp_path))
    lines = [" ".join(line.replace("│", " ").split()) for line in text.splitlines()]
    assert lines[0] == "kvist top by hand 50 s"
    # One token in the last 30 seconds; 7 of its 8 prompt tokens reused, 7 of 20 in all.
    work = next(line for line in lines if line.startswith("computed"))
    assert work.startswith("computed 0 tokens/s") and "hit rate 87.5% 35.0% since the start" in work
    assert any("requests 2 running 5 waiting, 1 finished" in line for line in lines)
    assert any("reused 7 of 20: 7 device" in line for line in lines)
    (group,) = [line for line in lines if line.startswith("device target/History()")]
    assert group.endswith("2 1 9 0") and group.count("█") == 7 and group.count("▒") == 3 and group.count("·") == 30
    assert any(line == "queue 10.00 10.00 10.00" for line in lines)
    assert any(line == "prefill 30.00 30.00 30.00" for line in lines)
    assert any(line == "decode 2.00 2.00 2.00" for line in lines)
    assert not any(line.startswith("transfer") for line in lines)


def test_totals_say_when_they_lack_something(tmp_path) -> None:
    manager = manager_of(12)
    iterations = Iterations(manager, keep=2)
    sequence = manager.open(tokens(range(8)))
    for _ in range(5):
        iterations.step(compute(manager, sequence, 1))
    board = board_of(iterations, tmp_path)
    board.take(iterations.begin, [])
    text = shown(board)
    assert "without 3 lost records" in text and "since the start" not in text


def test_trouble_is_shown_and_what_was_seen_stays(tmp_path) -> None:
    text = shown(board_of(recorded(Clock()), tmp_path), "no answer from somewhere")
    assert "no answer from somewhere" in text and "87.5%" in text


def test_tiers_have_bars_too(records) -> None:
    text = top(records, "--once")
    lines = [" ".join(line.replace("│", " ").split()) for line in text.splitlines()]
    _, all_records = read_run(records)
    steps = [record for record in all_records if isinstance(record, StepRecord)]
    for place, name in enumerate(("host", "disk")):
        (line,) = [line for line in lines if line.startswith(f"{name} target/History()")]
        assert f" {steps[-1].lower[place].groups[0].used} " in line
    reused = sum(step.reused_tokens for step in steps)
    host, disk = (sum(step.lower[place].reused_tokens for step in steps) for place in (0, 1))
    assert host > 0 and disk > 0
    assert f"{reused - host - disk:,} device, {host:,} host, {disk:,} disk" in text


def test_a_run_without_steps(tmp_path) -> None:
    text = shown(board_of(Iterations(manager_of(4), clock=Clock()), tmp_path))
    assert "no step yet" in text


def test_rates_are_of_the_last_window_only(tmp_path) -> None:
    clock = Clock()
    manager = manager_of(200)
    iterations = Iterations(manager, clock=clock)
    sequence = manager.open(tokens(range(600)))
    for _ in range(60):
        clock.now += 1.0
        iterations.step(compute(manager, sequence, 10))
    board = board_of(iterations, tmp_path, window=20.0)
    assert board.rate(board.recent.counts["computed_tokens"]) == pytest.approx(10.0, rel=0.06)
    history = board.history(10)
    assert len(history) == 10 and sum(history) == board.recent.counts["computed_tokens"] and min(history) >= 10
    assert board.totals.counts["computed_tokens"] == 600


def test_parts_of_the_view() -> None:
    assert bar((1, 1, 2), 4).plain == "█" * 10 + "▒" * 10 + "·" * 20
    assert bar((1, 0, 0), 4).plain == "█" * 10 + " " * 30
    assert bar((0, 0, 0), 0).plain == " " * 40
    # What is not nothing is seen.
    assert sparkline([0, 1, 4, 8]) == " ▁▄█" and sparkline([0, 0]) == "  " and sparkline([1, 1000]) == "▁█"
    assert spread([]) is None and spread([3.0]) == (3.0, 3.0)
    assert spread([float(value) for value in range(101)]) == (50.0, 95.0)


# A server.


def test_a_server_is_asked_for_what_is_new(server) -> None:
    clock = Clock()
    iterations = recorded(clock)
    server.answer = iterations.since
    feed = ServerFeed(server.url)
    begin, records = feed.take()
    assert isinstance(begin, Begin) and [record.number for record in records] == [0, 1, 2]
    assert feed.take()[1] == []
    iterations.request("2").finish("stop", prompt_tokens=1, reused_tokens=0, generated_tokens=1)
    assert [record.number for record in feed.take()[1]] == [3]
    assert server.asked == [f"/v1/iteration_stats?since={number}" for number in (-1, 2, 2)]
    # It was started anew: everything of the new run comes, also what has a number that was seen.
    again = Iterations(manager_of(4), source="again", clock=clock)
    for name in range(2):
        again.request(str(name)).finish("stop", prompt_tokens=1, reused_tokens=0, generated_tokens=1)
    server.answer = again.since
    begin, records = feed.take()
    assert begin.source == "again" and [record.number for record in records] == [0, 1]


def test_the_command_shows_a_server_once(server) -> None:
    server.answer = recorded(Clock()).since
    assert "by hand" in top(server.url, "--once")
    assert "by hand" in top(f"{server.url}/v1/iteration_stats", "--once")


def test_servers_that_give_no_records(server) -> None:
    url = f"{server.url}/v1/iteration_stats"
    for body in (b"<html>", b"", b'{"kind": "request", "number": 1, "time": 0.1, "request": "1", "outcome": "stop"}\n'):
        server.answer = lambda since, body=body: body
        with pytest.raises(FeedError) as caught:
            top(server.url, "--once")
        assert str(caught.value) == f"{url} does not answer with records\nhint: is this a Kvist server?"
    server.status = 404
    with pytest.raises(FeedError) as caught:
        top(server.url)
    assert str(caught.value) == (
        f"{url} answers 404 Not Found\n"
        "hint: is it a server that records its iterations? give its address, such as http://127.0.0.1:8000"
    )
    server.stop()
    with pytest.raises(FeedError) as caught:
        top(server.url)
    assert str(caught.value) == (
        f"no answer from {url}: [Errno 111] Connection refused\n"
        "hint: is the server running, and is this its address and port?"
    )
    server.__init__()


@pytest.mark.parametrize("url", ["ftp://host/", "http://", "file:///etc/passwd"])
def test_what_is_no_server(url) -> None:
    with pytest.raises(FeedError) as caught:
        top(url)
    assert str(caught.value) == f"{url!r} is not the URL of a server\nhint: give for example http://127.0.0.1:8000"


# A file.


def test_a_file_is_played_in_equal_times(records) -> None:
    feed = FileFeed(records, 4)
    begin, all_records = read_run(records)
    parts = []
    while not feed.ended:
        again, part = feed.take()
        assert again == begin
        parts.append(part)
    assert [record for part in parts for record in part] == all_records
    assert len(parts) == 4
    for place, part in enumerate(parts[:-1], 1):
        assert all(record.time <= all_records[-1].time * place / 4 for record in part)
        assert parts[place][0].time > all_records[-1].time * place / 4


def test_the_command_plays_a_file_to_its_end(records) -> None:
    text = top(records, "--play-seconds", 0.3, "--interval", 0.1)
    assert text.splitlines()[0].strip().startswith("kvist top")
    assert json.loads(records.read_text().splitlines()[0])["source"] in text
    with pytest.raises(RecordError, match="cannot read records"):
        top(records.parent / "none")
