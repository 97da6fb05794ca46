"""How many bytes the parcels of K clients take, and which clients go together in a call."""

from sparing.core.context import Ctx
from sparing.core.download import downloads_later, sizes_in_round
from sparing.core.method import Method
from sparing.core.operation import operation
from sparing.core.parcel import Parcel
from sparing.core.tree import Tree
from sparing.engines.engine import Job
from sparing.engines.upload_check import check_written_size
from sparing.wire import Later


@operation
def join_sizes(job: Job) -> Job:
    """The same job, in which clients of several sizes may go together in a call. Here they never do."""
    return job


@operation
def upload_sizes(method: Method, parcel: Parcel, who: int | None, ctx: Ctx) -> Later:
    """What the uploads of these K clients take; that of client `who`, if it is among them, is really written."""
    return check_written_size(parcel, sizes_in_round(parcel, ctx), who, ctx)


@operation
def download_sizes(method: Method, past: Tree, parcel: Parcel, ctx: Ctx) -> Later:
    """What their downloads take."""
    return downloads_later(method, past, parcel, ctx)
