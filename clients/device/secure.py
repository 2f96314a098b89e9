"""The device's part in secure aggregation: answers to its steps, and distrust.

It needs no torch: on a device, the short steps are answered in a new process each.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from cryptography.hazmat.primitives.serialization import (
    load_ssh_private_key,
    load_ssh_public_key,
)
from flwr.app import ConfigRecord, Context, Message, RecordDict

from flwr_frl.common import messages as keys
from flwr_frl.common.arrays import entries_of, fill, memory_record, reply_with
from flwr_frl.common.files import PRIVATE, write_atomically
from flwr_frl.common.secure import messages as steps
from flwr_frl.common.secure.fixed_point import Plan
from flwr_frl.common.secure.messages import SECURE, texts_in
from flwr_frl.common.secure.primitives import mark
from flwr_frl.common.secure.protocol import FEWEST, SURVIVED, Member, demand, number
from flwr_frl.common.settings import Settings, require

# Keys of a node config.
REQUIRED, LEAST = "secure-aggregation", "secure-min-clients"
KEY_FILE, PEERS = "secure-key", "secure-peers"
OF_A_NODE = (REQUIRED, LEAST, KEY_FILE, PEERS)
# Name of the file, and of the record in memory, with the sums that were unmasked.
UNMASKED = "secure-rounds"


class Rules(NamedTuple):
    """Requirements of a device for secure aggregation, from its node config.

    Parameters
    ----------
    required : bool
        Whether plain training messages are refused.
    least : int
        Fewest clients in a sum.
    key : Ed25519PrivateKey, optional
        Key that signs this client's keys.
    peers : frozenset of bytes, optional
        Public keys of the clients that it trusts; by default any.
    """

    required: bool
    least: int
    key: Ed25519PrivateKey | None
    peers: frozenset[bytes] | None

    @classmethod
    def of(cls, node: Settings) -> "Rules":
        """Return the rules in a node config; raise `SettingsError` if one is wrong."""
        required, least = node.get(REQUIRED, False), node.get(LEAST, FEWEST)
        require(type(required) is bool, REQUIRED, required, "true or false")
        valid = type(least) is int and least >= FEWEST
        require(valid, LEAST, least, f"an integer, at least {FEWEST}")
        key = _read(node, KEY_FILE, _private_key)
        peers = _read(node, PEERS, _public_keys)
        allowed = f"none without {KEY_FILE}, as peers' keys must be signed"
        require(key is not None or peers is None, PEERS, node.get(PEERS), allowed)
        return cls(bool(required), cast(int, least), key, peers)


def _private_key(data: bytes) -> Any:
    key = load_ssh_private_key(data, None)
    _bytes_of(key.public_key())
    return key


def _public_keys(data: bytes) -> frozenset[bytes]:
    lines = filter(bytes.strip, data.splitlines())
    return frozenset(_bytes_of(load_ssh_public_key(line)) for line in lines)


def _bytes_of(key: Any) -> bytes:
    if not isinstance(key, Ed25519PublicKey):
        raise TypeError("another kind of key")
    return key.public_bytes_raw()


def _read(node: Settings, name: str, parsed: Callable[[bytes], Any]) -> Any:
    """Return the content of a file of keys; None if the node config names none."""
    if name not in node:
        return None
    try:
        return parsed(Path(str(node[name])).expanduser().read_bytes())
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        allowed = "a file of Ed25519 keys, as ssh-keygen -t ed25519 -N '' writes it"
        require(False, name, node[name], f"{allowed} ({error})")


def check_rules(node: Settings, run: Settings) -> None:
    """Raise `SettingsError` if the node config is invalid or refuses the run."""
    required = Rules.of(node).required
    allowed = "true, which this device's node config requires"
    require(bool(run[REQUIRED]) or not required, REQUIRED, run[REQUIRED], allowed)


def check_message(message: Message, context: Context) -> None:
    """Raise `RefusedError` unless the client may train for a message."""
    if SECURE in message.content:
        member, _, _ = _restored(message, context, steps.MASKED)
        demand(member.step == 2, f"masked words do not follow step {member.step}")
    else:
        plain = not Rules.of(context.node_config).required
        demand(plain, "the server asks for plain arrays; this device sends none")


def answer(message: Message, context: Context) -> Message:
    """Answer a short step."""
    record = cast(Any, message.content.get(SECURE, {}))
    rules, step = Rules.of(context.node_config), str(record.get("step"))
    if step == steps.KEYS:
        texts_in(record, step, record.get("session"))
        plan = Plan.read(record["plan"])
        node = message.metadata.dst_node_id
        member = Member(node, record["session"], plan.threshold)
        about = {"plan": plan.text}
        with _saved(member, about, context):
            reply = member.keys(rules.least, rules.key)
    else:
        demand(step in (steps.SHARES, steps.UNMASK), f"there is no step {step!r}")
        member, about, texts = _restored(message, context, step)
        with _saved(member, about, context):
            if step == steps.SHARES:
                reply = member.shares(texts, rules.peers)
            else:
                reply = member.unmask(texts)
                survivors = [n for n, fate in texts.items() if fate == SURVIVED]
                _note(context, about, survivors)
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
    member, about, boxes = _restored(message, context, steps.MASKED)
    content, plan = dict(entries_of(reply.content)), Plan.read(about["plan"])
    metrics = entries_of(content[keys.METRICS])
    sent, arrays = steps.arrays_in(message.content), steps.arrays_in(reply.content)
    fits = content.keys() <= {keys.ARRAYS, keys.METRICS, keys.PROPERTIES}
    fits = fits and [(n, a.shape) for n, a in sent.items()] == [
        (n, a.shape) for n, a in arrays.items()
    ]
    demand(fits, "the algorithm sends more than the arrays that it has received")
    config = entries_of(message.content[keys.CONFIG])
    about["round"] = f"{config.get(keys.RUN, '')}/{config.get(keys.SERVER_ROUND, 0)}"
    about["directory"] = str(directory or "")
    with _saved(member, about, context):
        before = steps.changes_from(sent, metrics.get(keys.IS_CHANGE) == 1)
        words = plan.encode(before, arrays, int(metrics[keys.NUM_EXAMPLES]))
        received = steps.digest(message.content) + about["plan"].encode()
        words = member.masked(words, boxes, received)
    del content[keys.ARRAYS]
    content[steps.WORDS] = memory_record({"words": words})
    content[SECURE] = steps.record_of(steps.MASKED, member.session)
    return reply_with(fill(RecordDict(), content), message)


def _restored(
    message: Message, context: Context, step: str
) -> tuple[Member, dict[str, str], dict[int, bytes]]:
    """Return the member, what is kept beside it, and the texts of a message."""
    state: dict[str, Any] = dict(cast(ConfigRecord, context.state.get(SECURE, {})))
    demand(bool(state), "this client has no keys for a sum")
    texts = texts_in(message.content.get(SECURE), step, state["session"])
    names = "plan", "round", "directory"
    about = {name: state.pop(name) for name in names if name in state}
    return Member(**state), about, texts


@contextlib.contextmanager
def _saved(member: Member, about: dict[str, str], context: Context) -> Iterator[None]:
    """Save a member afterwards: a step that has failed counts as well."""
    try:
        yield
    finally:
        context.state[SECURE] = ConfigRecord({**vars(member), **about})


def _note(context: Context, about: dict[str, str], survivors: list[int]) -> None:
    """Note a sum before it is unmasked; refuse another one of the same round.

    The same seed gives the same change, so the difference of the two sums would be
    that of a single client.
    """
    path = Path(about["directory"]) / f"{UNMASKED}.json"
    is_file = bool(about["directory"])
    try:
        text = cast(Any, context.state.get(UNMASKED, {})).get("rounds", "{}")
        if is_file and path.is_file():
            text = path.read_text(encoding="utf-8")
        known, found = json.loads(text), mark(*map(number, sorted(survivors))).hex()
        same = known.setdefault(about["round"], found) == found
        demand(same, f"round {about['round']} was unmasked with other clients before")
        text = json.dumps(known)
        if is_file:
            write_atomically(path, text.encode(), mode=PRIVATE)
    except (OSError, AttributeError, json.JSONDecodeError) as error:
        demand(False, f"{path} cannot be used: {error}")
    context.state[UNMASKED] = ConfigRecord({"rounds": text})
