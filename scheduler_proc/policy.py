"""Waiting queues: which request is looked at next. One small class per policy."""

from collections import OrderedDict

from scheduler_proc.request import Request


class Fcfs:
    """First come, first served. A request that does not fit yet holds back the ones behind it, so none starves."""

    def __init__(self) -> None:
        self._queue: OrderedDict[int, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: Request) -> None:
        self._queue[request.rid] = request

    def head(self) -> Request | None:
        """The request to admit next, which stays in the queue until `remove`."""
        return next(iter(self._queue.values()), None)

    def remove(self, request: Request) -> None:
        del self._queue[request.rid]
