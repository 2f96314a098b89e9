"""SQuARM-SGD as a Flower app."""
