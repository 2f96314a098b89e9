"""The device's part in secure aggregation: answers to its steps, and distrust.

It needs no torch: on a device, the short steps are answered in a new process each.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ConfigRecord, Context, Message, RecordDict
from pydantic import TypeAdapter

from flwr_frl.common import messages as keys
from flwr_frl.common.arrays import entries_of, fill, memory_record, reply_with
from flwr_frl.common.errors import require
from flwr_frl.common.files import PRIVATE, write_atomically
from flwr_frl.common.secure import messages as steps
from flwr_frl.common.secure.fixed_point import Plan
from flwr_frl.common.secure.messages import SECURE, texts_in
from flwr_frl.common.secure.primitives import mark
from flwr_frl.common.secure.protocol import FEWEST, SURVIVED, Member, demand, number
from flwr_frl.common.settings import Checked, Settings, build, setting

# Name of the file, and of the record in memory, with the sums that were unmasked.
UNMASKED = "secure-rounds"
SECURED = "secure-aggregation"
# Not an empty text, which a script with an unset variable would pass.
NO_FILE = "none"
PLAN, MEMBER = TypeAdapter(Plan), TypeAdapter(Member)


@dataclass
class Rules(Checked):
    """Requirements of a device for secure aggregation, from its node config.

    Parameters
    ----------
    secure_aggregation : bool, default False
        Whether plain training messages are refused.
    secure_min_clients : int, default 3
        Fewest clients in a sum.
    secure_key : str, default "none"
        File with the key that signs this client's keys.
    secure_peers : str, default "none"
        File with the public keys of the clients that it trusts; by default any.
    """

    secure_aggregation: bool = setting(False)
    secure_min_clients: int = setting(FEWEST, ge=FEWEST)
    secure_key: str = setting(NO_FILE)
    secure_peers: str = setting(NO_FILE)

    def __post_init__(self) -> None:
        """Check the values, and read the files."""
        super().__post_init__()
        self.key = _read("secure-key", self.secure_key, _private_key)
        self.peers = _read("secure-peers", self.secure_peers, _public_keys)
        allowed = "none without secure-key, as peers' keys must be signed"
        valid = self.key is not None or self.peers is None
        require(valid, "secure-peers", self.secure_peers, allowed)


# Among SSH keys, only Ed25519 keys have raw bytes.


def _private_key(data: bytes) -> Ed25519PrivateKey:
    key: Any = serialization.load_ssh_private_key(data, None)
    return Ed25519PrivateKey.from_private_bytes(key.private_bytes_raw())


def _public_keys(data: bytes) -> frozenset[bytes]:
    lines = filter(bytes.strip, data.splitlines())
    keys: Any = map(serialization.load_ssh_public_key, lines)
    return frozenset(key.public_bytes_raw() for key in keys)


def _read(name: str, path: str, parsed: Callable[[bytes], Any]) -> Any:
    """Return the content of a file of keys; None if the node config names none."""
    try:
        return None if path == NO_FILE else parsed(Path(path).expanduser().read_bytes())
    except (OSError, ValueError, AttributeError, UnsupportedAlgorithm) as error:
        allowed = "a file of Ed25519 keys, as ssh-keygen -t ed25519 -N '' writes it"
        require(False, name, path, f"{allowed} ({error})")


def check_rules(node: Settings, run: Settings) -> None:
    """Raise `SettingsError` if the node config is invalid or refuses the run."""
    required, is_secure = build(Rules, node).secure_aggregation, run[SECURED]
    allowed = "true, which this device's node config requires"
    require(bool(is_secure) or not required, SECURED, is_secure, allowed)


def check_message(message: Message, context: Context) -> None:
    """Raise `RefusedError` unless the client may train for a message."""
    if SECURE in message.content:
        member, _ = _restored(message, context, steps.MASKED)
        demand(member.step == 2, f"masked words do not follow step {member.step}")
    else:
        plain = not build(Rules, context.node_config).secure_aggregation
        demand(plain, "the server asks for plain arrays; this device sends none")


def answer(message: Message, context: Context) -> Message:
    """Answer a short step."""
    record, rules = message.content.get(SECURE), build(Rules, context.node_config)
    step = str(cast(Any, record or {}).get("step"))
    if step == steps.KEYS:
        node, session = message.metadata.dst_node_id, cast(Any, record).get("session")
        plan = texts_in(record, step, session).get(node, b"").decode()
        least = PLAN.validate_json(plan).threshold
        member = Member(node, session, least, about={"plan": plan})
        reply = member.keys(rules.secure_min_clients, rules.key)
    else:
        member, texts = _restored(message, context, step)
        # A step that fails is the last one.
        context.state[SECURE] = ConfigRecord()
        if step == steps.SHARES:
            reply = member.shares(texts, rules.peers)
        else:
            demand(step == steps.UNMASK, f"there is no step {step!r}")
            reply = member.unmask(texts)
            _note(member, [n for n, fate in texts.items() if fate == SURVIVED], context)
    context.state[SECURE] = ConfigRecord({"member": MEMBER.dump_json(member)})
    content = {SECURE: steps.record_of(step, member.session, reply)}
    return reply_with(fill(RecordDict(), content), message)


def mask(
    message: Message, context: Context, reply: Message, directory: Path | None
) -> Message:
    """Return the reply of a client that has trained, with words in place of arrays.

    Parameters
    ----------
    message, context : Message, Context
        The training message, and the client's context.
    reply : Message
        The plain reply.
    directory : Path, optional
        Folder of the record of the sums that the client has unmasked.

    Raises
    ------
    SettingsError
        If a change is too large, or the reply tells the server more than numbers.
    """
    member, boxes = _restored(message, context, steps.MASKED)
    context.state[SECURE] = ConfigRecord()
    content = dict(entries_of(reply.content))
    sent, arrays = steps.arrays_in(message.content), steps.arrays_in(reply.content)
    shapes, own = ({n: a.shape for n, a in of.items()} for of in (sent, arrays))
    only = {keys.ARRAYS, keys.METRICS, keys.PROPERTIES}
    text = "the algorithm sends more than the arrays that it has received"
    demand(shapes == own and content.keys() <= only, text)
    metrics, plan = entries_of(content[keys.METRICS]), member.about["plan"]
    if metrics.get(keys.IS_CHANGE) == 1:
        sent = {name: np.zeros_like(array) for name, array in sent.items()}
    examples = int(metrics[keys.NUM_EXAMPLES])
    words = PLAN.validate_json(plan).encode(sent, arrays, examples)
    words = member.masked(words, boxes, (steps.digest(message.content) + plan).encode())
    config = entries_of(message.content[keys.CONFIG])
    round = f"{config.get(keys.RUN, '')}/{config.get(keys.SERVER_ROUND, 0)}"
    member.about |= {"round": round, "directory": str(directory or "")}
    context.state[SECURE] = ConfigRecord({"member": MEMBER.dump_json(member)})
    del content[keys.ARRAYS]
    content[steps.WORDS] = memory_record({"words": words})
    content[SECURE] = steps.record_of(steps.MASKED, member.session, {})
    return reply_with(fill(RecordDict(), content), message)


def _restored(
    message: Message, context: Context, step: str
) -> tuple[Member, dict[int, bytes]]:
    """Return the member, and the texts of a message."""
    stored = cast(Any, context.state.get(SECURE, {})).get("member")
    demand(stored is not None, "this client has no keys for a sum")
    member = MEMBER.validate_json(stored)
    return member, texts_in(message.content.get(SECURE), step, member.session)


def _note(member: Member, survivors: list[int], context: Context) -> None:
    """Note a sum before it is unmasked; refuse another one of the same round.

    The same seed gives the same change, so the difference of the two sums would be
    that of a single client.
    """
    known = dict(cast(Any, context.state.get(UNMASKED, {})))
    round, directory = member.about["round"], member.about["directory"]
    path = Path(directory, f"{UNMASKED}.json")
    try:
        if directory and path.is_file():
            known = json.loads(path.read_bytes())
        sum_of = mark(*map(number, sorted(survivors))).hex()
        same = known.setdefault(round, sum_of) == sum_of
        demand(same, f"round {round} was unmasked with other clients before")
        if directory:
            write_atomically(path, json.dumps(known).encode(), mode=PRIVATE)
    except (OSError, AttributeError, json.JSONDecodeError) as error:
        demand(False, f"{path} cannot be used: {error}")
    context.state[UNMASKED] = ConfigRecord(known)
