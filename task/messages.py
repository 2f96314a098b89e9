"""The keys under which server and clients put things into messages."""

# Records.
ARRAYS = "arrays"
HEAD = "head"
CONFIG = "config"
METRICS = "metrics"
PROPERTIES = "properties"
BYTES = "bytes"

# Names of SCAFFOLD's control variate begin so.
CONTROL = "control."
# And that of FedDBE's consensual mean of the features.
CONSENSUS = "consensus."
# FedProto's mean features of each class, and of how much they are the mean.
PROTOTYPES = "prototypes.means"
PROTOTYPE_COUNTS = "prototypes.counts"

# In the metrics of a reply whose arrays are a change of what was sent: 1.
IS_CHANGE = "is-change"
# Of a client that trains privately: its ε so far.
EXAMPLE_EPSILON = "example-epsilon"

# In the config of a message to a client.
SERVER_ROUND = "server-round"
RUN = "run"
ACKNOWLEDGED_ROUND = "acknowledged-round"
CHECKPOINT_ROUND = "checkpoint-round"
# Of gossip: up to which round messages are relayed.
EXCHANGED_ROUND = "exchanged-round"
# As in Flower's FedProx.
PROXIMAL_WEIGHT = "proximal-mu"
# Of L2GD: a number from which all clients of a round draw the same.
COINS = "coins"
# Where what is shared is a mean of what clients keep: whether it has this client's, and
# whether a change is that of what is shared, and not of the client's own.
IN_MEAN = "in-mean"
FROM_SHARED = "from-shared"

# Actions of queries.
INITIAL_ARRAYS = "arrays"
STATISTICS = "statistics"

# What a client tells of itself.
CLIENT = "client"
STRUCTURE = "structure"
# How many classes it has, and a digest of their names.
NUM_CLASSES = "num-classes"
CLASSES_DIGEST = "classes-digest"
# How many bytes the arrays have that it shares.
SHARED_BYTES = "shared-bytes"
# Which rounds of a run it has kept, and the newest checkpoint it has heard of.
KEPT_ROUNDS = "kept-rounds"
KEPT_CHECKPOINT = "kept-checkpoint"
REFUSAL = "refusal"
# Why it goes on without what it had kept last.
UNUSED_STATE = "unused-state"
NUM_EXAMPLES = "num-examples"
NUM_TEST_EXAMPLES = "num-test-examples"
# What a simulated client tells besides: what its folder is called, the classes of its
# training examples, how many it has of each, and whether it comes after the training.
OWN_NAME = "own-name"
HELD_CLASSES = "held-classes"
CLASS_COUNTS = "class-counts"
NEWCOMER = "newcomer"
# Of a newcomer: on which share of its examples it fits what is its own, and how many
# these are.
SHARE = "share"
FITTED = "fitted"
# Of a client with images.
INPUTS = ("channels", "height", "width")
