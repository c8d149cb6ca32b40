"""How messages travel: arrays as bytes, replies that cannot be read, sites that wait, threads that do not pile up."""

import ast
import gc
import subprocess
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("nvflare", reason="needs the federation extra: pip install 'fedbilevel[federation]'")

from nvflare.apis.fl_constant import ServerCommandNames
from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.cellnet import cell
from nvflare.fuel.f3.endpoint import Endpoint
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.sfm.sfm_conn import SfmConnection
from nvflare.fuel.f3.sfm.sfm_endpoint import SfmEndpoint
from nvflare.fuel.f3.streaming.blob_streamer import BlobHandler
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
from nvflare.fuel.sec.audit import Auditor
from nvflare.fuel.utils import fobs
from nvflare.fuel.utils.buffer_list import ConsumableBufferList
from nvflare.private.defs import CellMessageHeaderKeys
from nvflare.private.fed.server.fed_server import FederatedServer
from nvflare.private.fed.utils.fed_utils import fobs_initialize

from fedbilevel.federation.nvflare import console, controller, mended, steward
from fedbilevel.federation.nvflare.executor import SiteExecutor
from fedbilevel.federation.nvflare.job import read_twins
from fedbilevel.federation.protocol.payload import ARRAY, BadReply, packed, unpacked

ARRAYS = [
    np.array(3.5), np.zeros((0, 4)), np.array([np.nan, -np.inf, 1e-300]), np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::-1],
    np.array([True, False]), np.array([1 + 2j]), np.arange(3, dtype=">f4"),
]  # fmt: skip

STUCK = 60.0
"""Seconds after which something is stuck and not slow."""


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{list(array.shape)}")
def test_an_array_travels_as_its_bytes(array, monkeypatch):
    """Python's parser, which two threads must not use at once in CPython 3.11.7, is not asked."""
    fobs_initialize()
    monkeypatch.setattr(np, "load", None)
    sent = fobs.dumps(Shareable(packed({"a": [array], "b": {"n": 7, "none": None, "text": "x"}})))
    found = unpacked(dict(fobs.loads(sent)))
    assert found["b"] == {"n": 7, "none": None, "text": "x"}
    (back,) = found["a"]
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert back.flags.writeable


def test_nobody_parses_a_header_of_an_array_on_the_way(channel, monkeypatch):
    """A request and its reply as NVFlare's serialiser carries them."""
    made, _, sent = channel
    fobs_initialize()

    def never(*_, **__):
        raise AssertionError("Python's parser was asked")

    monkeypatch.setattr(np, "load", never)
    monkeypatch.setattr(ast, "literal_eval", never)
    carried = lambda content: fobs.loads(fobs.dumps(content))  # noqa: E731
    worker = SiteExecutor("")
    worker.site = SimpleNamespace(answer=lambda task, request: {"arrays": [request["arrays"][0] + 1]})

    def meanwhile():
        for number, task in enumerate(sent, 1):
            reply(made, number, carried(worker.execute(task.name, carried(task.data), None, None)))

    found = asked(made, meanwhile)
    assert [answer.content["arrays"][0].tolist() for answer in found.values()] == [[1.0, 1.0]] * 3


@pytest.mark.parametrize(
    "forged",
    [["|O", [1], b"12345678"], ["<f8", [2], b"12345678"], ["<f8", [-1], b"12345678"], ["<f8", "x", b""], ["V8", [1], b"12"],
     ["f8," * 1000, [1], b""], [7, [1], b"12345678"], ["<f8", [1]], "text", ["<f8", [2**62, 4], b""], ["<f8", [1], "12345678"]],
    ids=str,
)  # fmt: skip
def test_a_forged_array_is_refused(forged):
    with pytest.raises(BadReply, match="an array in it is damaged"):
        unpacked({"arrays": [{ARRAY: forged}]})


def test_messages_that_were_received_do_not_cost_a_thread_each():
    before = threading.active_count()
    made = [RxTask(number, "site-1", None, reliable=True) for number in range(300)]
    for task in made:
        RxTask.rx_task_map[("site-1", task.sid)] = task
        task.completed_task_ttl = 0.0
        task._schedule_remove_task()
    assert threading.active_count() == before
    time.sleep(0.01)
    RxTask(300, "site-1", None, reliable=True)._schedule_remove_task()
    assert not [key for key in RxTask.rx_task_map if key[0] == "site-1"], "they are forgotten all the same"


def test_what_a_message_held_is_let_go_of_once_it_was_read():
    read, unread, later = (RxTask(number, "site-1", None, reliable=True) for number in (401, 402, 403))
    read.stream_future, unread.stream_future = object(), object()
    for task in (read, unread):
        task._schedule_remove_task()
    assert read.stream_future is not None, "not yet read"
    read.eos = True
    later._schedule_remove_task()
    assert read.stream_future is None
    assert unread.stream_future is not None
    for task in (unread, later):
        task.eos = True
    RxTask(404, "site-1", None, reliable=True)._schedule_remove_task()
    assert unread.stream_future is None


@pytest.mark.parametrize(
    ("waited", "sites", "seconds"),
    [
        (0.0, 3, 0.01),
        (0.3, 3, 0.01),
        (2.0, 3, 0.04),
        (12.5, 3, 0.25),
        (1e6, 3, 0.25),
        (0.0, 30, 0.1),
        (12.5, 30, 0.25),
    ],
)
def test_who_waits_long_asks_seldom_and_so_do_many(waited, sites, seconds):
    assert controller.patience_of_sites(waited, sites) == pytest.approx(seconds)


@pytest.fixture
def channel():
    """A channel whose tasks go nowhere; (channel, the runner whose sites ask)."""
    runner = SimpleNamespace(config=SimpleNamespace(task_request_interval=0.01))
    manager = SimpleNamespace(clients={f"token-{n}": SimpleNamespace(name=f"site-{n}") for n in (1, 2, 3)})
    context = SimpleNamespace(get_engine=lambda: SimpleNamespace(client_manager=manager), get_prop=lambda name: runner)
    sent = []
    made = controller.TaskChannel(
        SimpleNamespace(broadcast=lambda task, *_, **__: sent.append(task)), context, SimpleNamespace(triggered=False)
    )
    return made, runner, sent


def asked(made, meanwhile):
    """What comes of a request to three sites while ``meanwhile`` happens; `Stopped` where it is still waited for then."""
    sites = ("site-1", "site-2", "site-3")
    thread, send = threading.Thread(target=meanwhile), made.controller.broadcast

    def sent(task, *_, targets, **__):
        send(task)
        if targets == ["site-3"]:  # all have theirs
            thread.start()

    def give_up():
        made.abort_signal.triggered = True

    made.controller = SimpleNamespace(broadcast=sent)
    end = threading.Timer(STUCK, give_up)
    end.start()
    try:
        return made.ask("work", {site: {"arrays": [np.zeros(2)]} for site in sites}, {*sites}, 2 * STUCK)
    finally:
        end.cancel()
        thread.join()
        made.controller = SimpleNamespace(broadcast=send)


def reply(made, number, content):
    task = SimpleNamespace(client=SimpleNamespace(name=f"site-{number}"), result=Shareable(content))
    made.exchange.received(task, None)


def test_a_site_whose_worker_ended_is_not_waited_for(channel):
    made, *_ = channel

    def meanwhile():
        made.lost("site-2")
        reply(made, 1, packed({"arrays": [np.ones(2)]}))
        reply(made, 3, {"arrays": [{ARRAY: ["<f8", [9], b""]}]})

    found = asked(made, meanwhile)
    assert set(found) == {"site-1", "site-3"}
    np.testing.assert_array_equal(found["site-1"].content["arrays"][0], np.ones(2))
    assert found["site-3"].fault == "its reply was not read: an array in it is damaged"
    assert set(asked(made, lambda: [reply(made, n, {}) for n in (1, 3)])) == {"site-1", "site-3"}


def submitted(token):
    return {StreamHeaderKey.TOPIC: ServerCommandNames.SUBMIT_UPDATE, CellMessageHeaderKeys.TOKEN: token}


def test_a_reply_that_cannot_be_decoded_or_is_too_large_is_named_and_the_process_lives(channel, monkeypatch):
    made, _, sent = channel
    monkeypatch.setattr(mended, "unreadable", [made.unreadable])
    failed = []

    def meanwhile():
        garbled = Message({**submitted("token-1"), StreamHeaderKey.PAYLOAD_ENCODING: "fobs"}, b"\xc1 garbage")
        cell.decode_payload(garbled, StreamHeaderKey.PAYLOAD_ENCODING)
        assert isinstance(garbled.payload, Shareable)
        stream = SimpleNamespace(headers=submitted("token-2"))
        BlobHandler._fail(stream, SimpleNamespace(set_exception=failed.append), ValueError("too large"))
        reply(made, 3, {})

    found = asked(made, meanwhile)
    assert found["site-1"].fault == "its reply was not read: it cannot be decoded"
    assert found["site-2"].fault.startswith("its reply was not read: it is larger than the coordinator takes")
    assert found["site-3"].fault == ""
    assert len(failed) == 1
    assert all(task.completion_status is not None for task in sent), "or they would be done again"
    other = Message({StreamHeaderKey.TOPIC: "another", StreamHeaderKey.PAYLOAD_ENCODING: "fobs"}, b"\xc1 garbage")
    with pytest.raises(Exception, match=r".+"):
        cell.decode_payload(other, StreamHeaderKey.PAYLOAD_ENCODING)


def test_sites_ask_seldom_while_they_wait_and_often_afterwards(channel, monkeypatch):
    made, runner, _ = channel
    monkeypatch.setattr(controller, "IDLE_SHARE", 1.0)
    paces = []

    def meanwhile():
        while runner.config.task_request_interval < controller.IDLE_INTERVAL and not made.abort_signal.triggered:
            time.sleep(0.01)
        paces.append(runner.config.task_request_interval)
        for number in (1, 2, 3):
            reply(made, number, {})

    asked(made, meanwhile)
    assert paces == [0.25]
    assert runner.config.task_request_interval == controller.REQUEST_INTERVAL


class Circle:
    def __init__(self):
        self.itself = self


def test_large_replies_do_not_pile_up(channel):
    """Tasks refer to each other in circles: what came with them goes when much has come, not when Python looks for it."""
    made, *_ = channel
    made.litter = controller.Litter(most=3 * 8 * 1000)

    def all_send(count):
        content = packed({"arrays": [np.zeros(count)]})
        asked(made, lambda: [reply(made, number, content) for number in (1, 2, 3)])

    gc.disable()
    try:
        seen = weakref.ref(Circle())
        all_send(999)
        all_send(1)
        assert seen() is not None, "little has come"
        all_send(1)
        assert seen() is None
    finally:
        gc.enable()
        gc.unfreeze()


def test_what_is_received_is_not_written_out_for_a_log():
    """NVFlare makes the line of its log whether or not anybody reads it."""
    adapter, lines = cell.Adapter(None, None, None), []
    adapter.logger = SimpleNamespace(debug=lines.append)
    received = ConsumableBufferList([bytes(1000), memoryview(bytes(1000))])
    with pytest.raises(AttributeError):  # there is no cell to go on with
        adapter.call(SimpleNamespace(headers={}, result=lambda: received))
    (line,) = lines
    assert line.endswith("incoming data=2000 bytes")


def test_a_worker_that_dies_leaves_the_run_and_does_not_end_it(monkeypatch):
    told = []
    monkeypatch.setattr(steward, "_failed", lambda server, request: told.append(request.payload["code"]))
    server = SimpleNamespace(
        client_manager=SimpleNamespace(clients={"token": SimpleNamespace(name="site-2")}),
        engine=SimpleNamespace(notify_dead_job=lambda *about: told.append(about)),
    )
    report = lambda code, token: Message({CellMessageHeaderKeys.TOKEN: token}, {"job_id": "job", "code": code})  # noqa: E731
    FederatedServer.process_job_failure(server, report(101, "token"))
    assert told == [0, ("job", "site-2", "its worker has ended")]
    FederatedServer.process_job_failure(server, report(0, "token"))
    FederatedServer.process_job_failure(server, report(101, "stranger"))
    assert told[2:] == [0, 101], "what ends well, and strangers, are NVFlare's"


def test_a_kit_that_is_in_use_twice_is_written_down(tmp_path, monkeypatch):
    steward.Steward(str(tmp_path))
    monkeypatch.setattr(steward.Steward, "kit", tmp_path)
    properties = {}
    context = SimpleNamespace(get_prop=properties.get)
    monkeypatch.setattr(steward, "_heard", lambda *_: True)
    steward.ClientManager.heartbeat(None, "token", "site-1", "site-1", context)
    assert read_twins(tmp_path) == {}
    properties[steward.FLContextKey.COMMUNICATION_ERROR] = "already registered"
    assert steward.ClientManager.heartbeat(None, "token", "site-1", "site-1", context)
    assert time.time() - read_twins(tmp_path)["site-1"] < 60


def test_a_kit_whose_copy_never_gets_to_register_is_written_down_too(tmp_path, monkeypatch):
    """Two processes of one name drive each other off the line: the copy gave up, and nobody had been told of it."""
    monkeypatch.setattr(steward.Steward, "kit", tmp_path)
    line = SfmEndpoint(Endpoint("site-1"))

    def connects(process):
        """As NVFlare does it: what a process says of itself when it connects, then the connection."""
        said = []
        monkeypatch.setattr(mended, "PROCESS", process)
        peer = SfmConnection(SimpleNamespace(name=process), Endpoint("site-1", {"fqcn": "site-1"}))
        monkeypatch.setattr(SfmConnection, "send_dict", lambda _, kind, stream, data: said.append(data))
        peer.send_handshake(1)
        line.endpoint = Endpoint("site-1", said[0])
        line.add_connection(SimpleNamespace(conn=SimpleNamespace(close=lambda: None), get_name=lambda: process))

    for process in ("original", "original", "restarted", "restarted", "restarted again"):
        connects(process)
    assert read_twins(tmp_path) == {}, "a site may be started again, and may connect anew as often as it likes"
    connects("restarted")
    assert time.time() - read_twins(tmp_path)["site-1"] < 60


def test_who_looks_sees_all_jobs_while_somebody_else_looks(tmp_path):
    """NVFlare fills one list for everybody: a supervisor took a job for ended because another one was just looking."""
    engine = object.__new__(steward.ServerEngine)
    engine.engine_info, engine.run_processes = steward.EngineInfo(), {"job-1": {}, "job-2": {}}
    engine._get_run_folder = lambda job: str(tmp_path)
    first, during = engine.get_engine_info(), []

    def slow(job):
        during.append(list(first.app_names))  # what the first one reads while the second one is on its way
        return str(tmp_path)

    engine._get_run_folder = slow
    engine.get_engine_info()
    assert during == [["job-1", "job-2"]] * 2


def test_the_audit_trail_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(mended, "AUDIT_BYTES", 1000)
    auditor = Auditor(str(tmp_path / "audit.log"))
    for _ in range(20):
        auditor.add_job_event("job", msg="x" * 50)
        auditor.add_event("ann", "look", msg="x" * 50)
    auditor.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["audit.log", "audit.log.1"]
    assert all(file.stat().st_size < 1300 for file in tmp_path.iterdir())


PRINTING = """
import subprocess, sys, time
from pathlib import Path
from fedbilevel.federation.nvflare import console
file = Path(console.OUTPUT)
for _ in range(2):
    console.watch(file, 1000, 0.01)
for number in range(60):
    print(f"{number:>99}", flush=True)
    if number == 20:
        subprocess.run([sys.executable, "-c", "print('worker')"], check=True)
    time.sleep(0.005)
time.sleep(0.1)
"""


def test_what_is_printed_is_bounded(tmp_path):
    """By the process that prints and for those that it starts, while they have the file open."""
    with (tmp_path / console.OUTPUT).open("ab") as output:
        subprocess.run([sys.executable, "-c", PRINTING], stdout=output, cwd=tmp_path, check=True, timeout=60)
    names = [console.OUTPUT, *(f"{console.OUTPUT}.{number}" for number in (1, 2, 3))]
    assert sorted(file.name for file in tmp_path.iterdir() if not file.name.startswith(".")) == names
    texts = [(tmp_path / name).read_bytes() for name in names]
    assert all(len(text) < 2500 for text in texts)
    assert not any(b"\0" in text for text in texts), "it goes on at the beginning"
    assert b"".join(reversed(texts)).split()[-20:] == [str(number).encode() for number in range(40, 60)]


def test_only_output_of_its_own_is_watched(tmp_path):
    file, before = tmp_path / console.OUTPUT, threading.active_count()
    console.watch(file)
    file.write_bytes(bytes(console.LOG_BYTES + 1))
    console.watch(file)
    assert threading.active_count() == before
