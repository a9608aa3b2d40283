"""Links: what carries the messages of an edge from one replica to another.

One `Links` per replica process owns everything that the replica sends and receives:

    links = Links("decode/0", boot, transport=ZeroMQ(), listen="ipc:///run/x/decode-0")
    links.address                                       where others reach it; "tcp://127.0.0.1:0" gets its real port
    links.serve(port, handler, max_streams=100_000)     Serves
    links.client(port, {"prefill": "requests"})         Calls -> Client; target node -> its port's name
    links.publisher(port, snapshot)                     Publishes -> Publisher
    links.subscribe(port, subscription, {"decode": "events"})
    links.set_peers(live)                               the registry's word: every live `Peer` of the graph
    await links.close()                                 ends every call and stream, then the sockets

All of it belongs to the event loop's thread. `set_peers` takes all live replicas, of whatever
state: clients list those that are ready; a draining one keeps its calls and may still be asked by
name. One that is gone, or back with another boot, fails its calls with `PeerLost`, and the streams it
had opened here are cancelled. Give a `Peer` an empty boot to reach one whose boot is not known (the
CLI and the supervisor). A replica that only calls leaves out `listen`. Ids are unique among live processes:
a new line from an id makes its older line here dead.
`InProcess()` in the place of `ZeroMQ()`, one instance shared by all `Links`, joins components in
one process; its addresses are any strings.
"""

from graph.link.inprocess import InProcess
from graph.link.links import Links
from graph.link.wire import Limits
from graph.link.zeromq import ZeroMQ

__all__ = ["InProcess", "Limits", "Links", "ZeroMQ"]
