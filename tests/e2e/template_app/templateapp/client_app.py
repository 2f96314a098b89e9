"""The ClientApp: complete models in messages and replies, and no query handler."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from templateapp.task import Net, load_data
from templateapp.task import test as test_fn
from templateapp.task import train as train_fn

app = ClientApp()


def load(msg: Message, context: Context):
    """Return the received model and the loaders of this node."""
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    node = context.node_config
    batch_size = int(context.run_config["batch-size"])
    loaders = load_data(node["partition-id"], node["num-partitions"], batch_size)
    return net, *loaders


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the received model."""
    net, loader, _ = load(msg, context)
    epochs = int(context.run_config["local-epochs"])
    loss = train_fn(net, loader, epochs, msg.content["config"]["lr"])
    metrics = {"train_loss": loss, "num-examples": len(loader.dataset)}
    content = {
        "arrays": ArrayRecord(net.state_dict()),
        "metrics": MetricRecord(metrics),
    }
    return Message(content=RecordDict(content), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Test the received model."""
    net, _, loader = load(msg, context)
    loss, accuracy = test_fn(net, loader)
    metrics = {
        "eval_loss": loss,
        "eval_acc": accuracy,
        "num-examples": len(loader.dataset),
    }
    content = {"metrics": MetricRecord(metrics)}
    return Message(content=RecordDict(content), reply_to=msg)
