"""Forks while copies run: the child can copy from a store of its own, and is told that the parent's leases aren't its."""

from __future__ import annotations

from pathlib import Path

from tests.support import run_child


def test_a_child_of_a_process_that_waits(tmp_path: Path) -> None:
    """A child that was forked while a thread waited for a stream can itself wait for streams, again and again."""
    code = """
    import threading
    from kvstore.kernel import progress_wait
    layout = plain_layout()
    tokens = list(range(300))
    with Store.open(path + "1", max_bytes=CAP) as store:
        save(store.namespace(layout), tokens)
    over, never = False, np.zeros(1, np.int32)
    def wait():
        while not over:
            progress_wait(never, 0, 0.2)
    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.3)
    pid = os.fork()
    if not pid:
        signal.alarm(20)
        with Store.open(path + "1") as store:
            for _ in range(20):
                into = destination(layout, 300)
                with store.namespace(layout).lease(tokens) as lease, lease.start_copy(into) as copy:
                    for name in copy.names:
                        copy.wait(name, 30)
        os._exit(7)
    _, status = os.waitpid(pid, 0)
    over = True
    waiter.join()
    print(os.waitstatus_to_exitcode(status))
    """
    assert run_child(code, tmp_path / "s") == "7"


def test_a_lease_in_a_forked_child(tmp_path: Path) -> None:
    """Copying from a lease of the parent's is refused in a child by name, no block is, and the parent's lease goes on."""
    code = """
    from kvstore.errors import ForkedStoreError
    layout = plain_layout()
    tokens = list(range(300))
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(layout)
        save(namespace, tokens)
        with namespace.lease(tokens) as lease:
            pid = os.fork()
            if not pid:
                refused = 0
                into = destination(layout, 300)
                for act in (lambda: lease.copy_into(into), lambda: lease.start_copy(into), lease.validate):
                    try:
                        act()
                    except ForkedStoreError:
                        refused += 1
                os._exit(refused)
            _, status = os.waitpid(pid, 0)
            lease.copy_into(destination(layout, 300))
        print(os.waitstatus_to_exitcode(status), restored(namespace, tokens))
    """
    assert run_child(code, tmp_path / "s") == "3 300"
