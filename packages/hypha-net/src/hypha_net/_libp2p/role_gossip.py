"""Topics on which only some roles speak: what others publish there is dropped and not passed on.

Only a publisher that is connected has shown its certificate. What comes by way of a gateway has been judged there, so
one gateway is enough to keep a message from everybody behind it.
"""

from __future__ import annotations

from collections.abc import Callable

from libp2p.peer.id import ID
from libp2p.pubsub.pb.rpc_pb2 import Message
from libp2p.pubsub.pubsub import Pubsub

from hypha_net.events import Events, GossipLost
from hypha_proto.errors import InvalidIdError
from hypha_proto.ids import PeerId
from hypha_proto.protocol import SENDERS


def restrict_topics(pubsub: Pubsub, may_speak: Callable[[PeerId, str], bool], events: Events) -> None:
    """Have pubsub ask `may_speak` about publisher and topic of every message on a topic of `SENDERS`."""
    for name in SENDERS:
        pubsub.set_topic_validator(name, _validator(name, may_speak, events), False)


def _validator(topic: str, may_speak: Callable[[PeerId, str], bool], events: Events) -> Callable[[ID, Message], bool]:
    def validate(_forwarder: ID, message: Message) -> bool:
        try:
            publisher = PeerId(message.from_id)
        except InvalidIdError:
            return False
        if may_speak(publisher, topic):
            return True
        events.emit(GossipLost(topic, "role", publisher))
        return False

    return validate
