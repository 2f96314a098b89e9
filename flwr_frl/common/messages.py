"""Keys of messages between server and clients."""

# Names of records in a message.
ARRAYS = "arrays"
HEAD = "head"
CONFIG = "config"
METRICS = "metrics"
PROPERTIES = "properties"
BYTES = "bytes"

# Names and prefixes of arrays.
# Prefix of SCAFFOLD's control variates.
CONTROL = "control."
# Prefix of FedDBE's consensual mean features.
CONSENSUS = "consensus."
# FedProto and FedPAC: each class's mean features, and the number of examples behind
# each mean.
PROTOTYPES = "prototypes.means"
PROTOTYPE_COUNTS = "prototypes.counts"
# q-FedAvg's h_k.
NORMALIZER = "normalizer.value"
# FedFomo and APPLE: prefix of the stacked models that a client receives, and a client's
# weights of these.
CANDIDATES = "candidates."
MODEL_WEIGHTS = "weights.values"
# APPLE: prefix of the sum of other core models, and a client's p_i beside p_0.
REST = "rest."
RELATIONS = "relations.values"
# FedCAC: the positions of a client's critical parameters, as bits, in the order of the
# arrays' sorted names.
CRITICAL = "critical.mask"
# Prefix of IFCA's models of all clusters, stacked.
CLUSTERS = "clusters."
# Suffixes of the names of batch norms' statistics, which must stay means.
BATCH_NORM = ("running_mean", "running_var")

# Key of the compressed vector among the attachments of a reply.
MESSAGE = "message"

# Keys in the metrics of a reply.
# AFL: the loss of the received model on the client's training examples.
RECEIVED_LOSS = "received-loss"
# IFCA: the cluster that a client has chosen, from 0.
CLUSTER = "cluster"
# 1 if the reply's arrays are differences from the arrays that the server sent.
IS_CHANGE = "is-change"
# ε that a client with private training has spent so far.
EXAMPLE_EPSILON = "example-epsilon"
# Suffix of the number of clients over which a metric is a mean, if some lack it.
OF_CLIENTS = "-clients"
# FedAS: trace of the client's empirical Fisher information.
FISHER_TRACE = "fisher-trace"
# FedNova: the total weight of the client's local gradients.
GRADIENT_WEIGHT = "gradient-weight"
NUM_EXAMPLES = "num-examples"
NUM_TEST_EXAMPLES = "num-test-examples"

# Keys in the config of a message to a client.
SERVER_ROUND = "server-round"
RUN = "run"
# Version of the server's flwr-frl, in queries.
VERSION = "version"
ACKNOWLEDGED_ROUND = "acknowledged-round"
CHECKPOINT_ROUND = "checkpoint-round"
# Gossip: the newest round whose messages are relayed.
EXCHANGED_ROUND = "exchanged-round"
# Gossip: the number of float32 entries of a model's sketch. The standard error of a
# squared length is at most √(2 / SKETCH) = 9 %.
SKETCH = 256
# The key that Flower's FedProx uses.
PROXIMAL_WEIGHT = "proximal-mu"
# CCVR: whether a client sends statistics of its features instead of training.
CALIBRATE = "calibrate"
# L2GD: a seed of the coin flips that all clients of a round share.
COINS = "coins"
# FedKD: the share of the energy that matrices of lower rank keep.
ENERGY = "energy"
# Means of client states: whether the mean includes this client.
IN_MEAN = "in-mean"
# The name under which the node is registered.
REGISTERED_NAME = "registered-name"
# Entries that differ between the clients of a round.
OF_A_CLIENT = ACKNOWLEDGED_ROUND, CHECKPOINT_ROUND, REGISTERED_NAME, IN_MEAN

# Actions of queries.
INITIAL_ARRAYS = "arrays"
STATISTICS = "statistics"

# Keys in the properties of a client.
CLIENT = "client"
STRUCTURE = "structure"
# Number of classes, and a digest of their names.
NUM_CLASSES = "num-classes"
CLASSES_DIGEST = "classes-digest"
FROZEN_DIGEST = "frozen-digest"
# The model that the client tests: the received one, one with personal parts, a personal
# one, or one that is adapted to the client's data before each test.
TESTED_MODEL = "tested-model"
TESTED_MODELS = ("received", "with personal parts", "personal", "adapted")
# Why client-level noise cannot be added to the client's model.
INCOMPATIBLE_WITH_NOISE = "incompatible-with-noise"
# Why the client does not take part.
REFUSAL = "refusal"
# Why the client does not use its latest saved state.
UNUSED_STATE = "unused-state"
# Simulated clients: the name of the client's folder.
OWN_NAME = "own-name"
# Simulated clients: the classes of a client's training examples, the number of
# examples per class, and whether the client joins after training.
HELD_CLASSES = "held-classes"
CLASS_COUNTS = "class-counts"
NEWCOMER = "newcomer"
# Devices with a table: number, mean and deviation of each column in the training data;
# in the config of a message, those of all devices together.
COLUMNS = "column-statistics"
# Most of these numbers, as the server refuses longer lists.
MOST_STATISTICS = 12_000
# Name of the client's model, where clients may have different ones.
MODEL = "model"
# Shape of the images, for clients of image tasks.
INPUTS = ("channels", "height", "width")
# Flower's error for an app without a query handler, such as its templates.
ANSWERS_NO_QUERY = "No query function registered"
