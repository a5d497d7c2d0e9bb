"""A service of the order saga in which something is killed at a step.

    DATABASE_URL=... python3 faulty.py EXAMPLE FAULT NAME PORT

EXAMPLE is the directory of service.py. Where the file FAULT has a step and a point of it, the process that it names is killed
there, once: this one, or the one whose id another file has. A point is `begun` (nothing has been written), `written` (but not
committed) or `committed` (but not answered).
"""
import os
import signal
import sys
import time

example, fault = sys.argv[1:3]
sys.path.insert(0, example)
sys.argv = ["service.py", *sys.argv[3:]]
import service  # noqa: E402

run, answer = service.run, service.Service.answer


def kill_at(step, point):
    try:
        with open(fault) as file:
            wanted = file.read().split(" ")
    except FileNotFoundError:
        return
    if wanted[:2] != [step, point]:
        return
    os.remove(fault)
    if wanted[2] == "self":
        os.kill(os.getpid(), signal.SIGKILL)
    # The test writes the id once it knows it.
    while not os.path.exists(wanted[2]):
        time.sleep(0.001)
    with open(wanted[2]) as file:
        os.kill(int(file.read()), signal.SIGKILL)


def faulty_run(db, attempt, saga, step, order):
    kill_at(step, "begun")
    body = run(db, attempt, saga, step, order)
    kill_at(step, "written")
    return body


def faulty_answer(self, status, body):
    if self.command == "POST" and status == 200:
        kill_at(self.headers["X-Step"], "committed")
    answer(self, status, body)


service.run, service.Service.answer = faulty_run, faulty_answer
service.serve()
