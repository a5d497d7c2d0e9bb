"""The example upstream, deploy/examples/payments-python, with faults that a request asks for.

    python3 faulty.py DIRECTORY-OF-THE-EXAMPLE [HOST:]PORT

The header X-Fault has any of these words, with spaces between; X-File names a file that says when to go on:

    waits-before     before anything of the transaction
    unchecked        does not call oncegate.assert_current
    waits-charged    in the transaction, after the charge and before oncegate.complete
    waits-completed  in the transaction, after oncegate.complete
    rolls-back       does not commit
    dies-charged     in the transaction
    dies-committed   after the transaction, without an answer
    says-otherwise   gives its client another answer than the recorded one, and a 500 at that

Whoever waits makes the file X-File with `.reached` at its end, and the last thing that a request does is one with `.done`
and the status of its answer.
"""
import os
import sys
import threading
import time

sys.path.insert(0, sys.argv.pop(1))
import payments

charge = payments.charge


class OfRequest(threading.local):
    faults = ()
    file = None


of_request = OfRequest()


def asked(word):
    return word in of_request.faults


def wait():
    open(of_request.file + ".reached", "w").close()
    while not os.path.exists(of_request.file):
        time.sleep(0.005)


class Faulty:
    """A connection that does something else where it is asked to."""

    def __init__(self, db):
        self.db = db

    def execute(self, sql, values):
        if "assert_current" in sql and asked("unchecked"):
            return None
        if "complete" in sql:
            if asked("dies-charged"):
                os._exit(1)
            if asked("waits-charged"):
                wait()
        return self.db.execute(sql, values)


def faulty_charge(db, attempt, amount):
    if asked("waits-before"):
        wait()
    answer = charge(Faulty(db), attempt, amount)
    if asked("waits-completed"):
        wait()
    if asked("rolls-back"):
        raise payments.psycopg.OperationalError("as asked")
    return answer


class Payments(payments.Payments):
    def do_POST(self):
        of_request.faults = self.headers.get("X-Fault", "").split()
        of_request.file = self.headers.get("X-File")
        super().do_POST()

    def answer(self, status, headers, body):
        if asked("dies-committed"):
            os._exit(1)
        if of_request.file:
            with open(of_request.file + ".new", "w") as done:
                done.write(str(status))
            os.rename(of_request.file + ".new", of_request.file + ".done")
        if asked("says-otherwise"):
            status, headers, body = 500, [("X-Otherwise", "1")], b"otherwise"
        super().answer(status, headers, body)


payments.charge = faulty_charge
payments.Payments = Payments
payments.serve()
