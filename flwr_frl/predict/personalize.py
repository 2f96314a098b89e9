"""Fit the personal parameters of a device that arrives after the training.

``python -m flwr_frl.predict.personalize --checkpoint results/fedrep --data-dir
/srv/images --client-name pi-9 --state-dir /var/lib/flwr-frl/state`` fits a head, or the
algorithm's other personal parameters, for ``newcomer-epochs`` of the run's settings.
The checkpoint stays unchanged. ``flwr_frl.predict`` with the same options then
uses the result, and so does a later run in which the device takes part.
"""

import sys

from flwr_frl.predict.runs import Fitted, personalize

__all__ = ["Fitted", "personalize"]

if __name__ == "__main__":
    from flwr_frl.predict.__main__ import personalize_main

    sys.exit(personalize_main())
